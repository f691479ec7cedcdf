"""Examples of answers that have no model of their own, for the API's description; a test holds them to the truth."""

from __future__ import annotations

from typing import Any

SPEC = {
    "name": "functions-lora",
    "model": {"source": "examples/llama-13m", "weights": "random"},
    "dataset": {"source": "examples/data/functions.jsonl", "max_length": 512},
    "method": ["lora"],
    "training": {"effective_batch_size": 32, "learning_rate": 2e-4},
    "search": {"minutes": 5, "verify": "quick"},
    "hardware": {"memory_gib": 3},
}
SUMMARY: dict[str, Any] = {
    "id": "5f1d7a90c2e84b36",
    "name": "functions-lora",
    "labels": {"team": "nlp"},
    "status": "running",
    "phase": "searching",
    "error": None,
    "created_at": 1795268400.0,
    "started_at": 1795268402.5,
    "finished_at": None,
    "elapsed_seconds": 61.2,
}
LEVERS = {"precision": "fp32", "batching": "grouped"}
JOB: dict[str, Any] = SUMMARY | {
    "progress": {"trials": {"ok": 3, "running": 1}, "planned": 12, "now": "trial 4: timing"},
    "best": {
        "method": "lora",
        "levers": LEVERS,
        "micro_batch_size": 8,
        "tokens_per_second": 1206.0,
        "speedup": 1.99,
        "stable": None,
    },
    "estimated_finish_at": 1795268700.0,
    "waiting_for": None,
    "notes": [],
    "spec": SPEC,
}
TRIAL: dict[str, Any] = {
    "id": "9a0c4e1b77d25f83",
    "job_id": SUMMARY["id"],
    "number": 4,
    "origin": "recipe",
    "state": "running",
    "outcome": None,
    "attempt": 1,
    "progress": "timing",
    "worker_id": "cpu0-1f2e3d4c",
    "started_at": 1795268450.0,
    "finished_at": None,
    "configuration": {
        "method": "lora",
        "levers": LEVERS,
        "effective_batch_size": 32,
        "learning_rate": 2e-4,
        "micro_batch_size": None,
    },
    "measurement": None,
}
WORKER = {
    "id": "cpu0-1f2e3d4c",
    "pid": 4711,
    "alive": True,
    "state": "busy",
    "task_id": TRIAL["id"],
    "seen_at": 1795268460.0,
    "started_at": 1795268300.0,
    "fingerprint": "0c9d2f4e6a8b1357",
    "facts": {"host": "here", "device": "cpu", "name": "AMD EPYC (AVX2)", "memory_bytes": 25282306048, "cores": 2},
}
CATALOGUE = {
    "levers": [
        {
            "name": "attention",
            "summary": "How attention is computed.",
            "source": "https://huggingface.co/docs/transformers/attention_interface",
            "baseline": "sdpa",
            "choices": [
                {
                    "name": "sdpa",
                    "summary": "PyTorch's scaled_dot_product_attention",
                    "searched": True,
                    "changes_numerics": False,
                    "changes_order": False,
                    "needs": [],
                    "workers": {"cpu0-1f2e3d4c": {"available": True, "why_not": None}},
                }
            ],
        }
    ],
    "methods": [{"name": "lora", "workers": {"cpu0-1f2e3d4c": {"available": True, "why_not": None}}}],
    "tasks": ["causal-lm", "sequence-classification", "masked-lm"],
    "exclusions": [{"when": {"batching": ["packed"]}, "reason": "…", "reference": "https://…"}],
}
EVENT = {"seq": 2, "at": 1795268402.5, "kind": "started", "data": {"worker": "cpu0-1f2e3d4c"}}


def page(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A list as it is answered."""
    return {"items": list(items)} | more
