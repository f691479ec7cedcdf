"""Generation with a causal model in several formats: tokens/s and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FORMATS = ("float32", "bfloat16", "int8", "nf4")
# LLaMA 7B on an A100, by Lightning: tokens/s and GB.
PUBLISHED = {"float32": (11.47, 27.02), "bfloat16": (16.70, 13.52)}


def child(folder: str, kind: str, tokens: int) -> None:
    """Generate `tokens` tokens greedily after a warm-up, and say how fast; a random model never ends by itself."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from worker.devices import open_device

    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.limit(None)
    quantised = kind in ("int8", "nf4")
    half = torch.bfloat16 if device.torch.type == "cuda" else torch.float32
    options: dict[str, Any] = {"dtype": half if quantised else getattr(torch, kind)}
    if quantised:
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": options["dtype"]}
        options["quantization_config"] = BitsAndBytesConfig(**(four if kind == "nf4" else {"load_in_8bit": True}))
    before = device.used()
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device.torch}, **options).eval()
    ids = torch.ones((1, 16), dtype=torch.long, device=device.torch)
    limits = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, **limits)
    device.reset_peak()
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **limits)
    device.synchronize()
    seconds = time.perf_counter() - started
    print(json.dumps({"tokens_per_second": tokens / seconds, "peak_bytes": device.peak() - before}))


def generate(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """A row a format, each in a fresh process; a format that cannot run says why."""
    rows: list[dict[str, Any]] = []
    for kind in FORMATS:
        arguments = ["benchmarks.published.generation", str(folder), kind, str(tokens)]
        command = [sys.executable, "-W", "ignore", "-m", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            rows.append({"name": kind, "reason": (done.stderr.strip().splitlines() or ["it failed"])[-1][:200]})
        else:
            rows.append({"name": kind, "published": PUBLISHED.get(kind), **json.loads(done.stdout.splitlines()[-1])})
    return rows


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
