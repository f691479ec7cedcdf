"""Make examples/llama-13m: the shape of a small Llama and a tokenizer for it, but no weights.

    python examples/make_llama_13m.py [--out DIR]

The tokenizer is trained on the files of stdlib_data.py, so the same Python and the same `tokenizers` give
the same bytes; the committed folder was made with CPython 3.11.7 and tokenizers 0.23.3. For a model, call
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("examples/llama-13m")).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stdlib_data
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CONTEXT = 2048
VOCAB = 8192

# 12.6 million parameters: 3.1 in the embedding, which the output shares, and 1.6 in each layer.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    # The plain class, which takes tokenizer.json as it is: Llama's own would set up its pieces anew.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "bos_token": BOS,
    "eos_token": EOS,
    "model_max_length": CONTEXT,
    "padding_side": "right",
    "clean_up_tokenization_spaces": False,
}


def texts(data: Path) -> Iterator[str]:
    """Yield the functions and the topics written to `data`; FileNotFoundError if they are not there."""
    for line in (data / "functions.jsonl").read_text("utf-8").split("\n"):
        if line:
            row = json.loads(line)
            yield row["prompt"] + row["completion"]
    yield from (data / "topics.txt").read_text("utf-8").split("\n\n")


def train(data: Path) -> Tokenizer:
    """Train byte-level BPE on the files in `data`; ValueError if they do not yield VOCAB tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, BOS, EOS],  # in the order of their ids in CONFIG
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{data} yields {tokenizer.get_vocab_size()} tokens of the {VOCAB} needed")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, CONFIG["bos_token_id"])],
    )
    return tokenizer


def make(out: Path, data: Path) -> None:
    """Write the folder from the files in `data`; ValueError if they are too few for the vocabulary."""
    tokenizer = train(data)
    out.mkdir(parents=True, exist_ok=True)
    # Not pretty: a line for each of 8,000 merges would triple the file.
    (out / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=False).encode("utf-8") + b"\n")
    for name, content in (("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (out / name).write_bytes((json.dumps(content, indent=2) + "\n").encode("utf-8"))


def main() -> None:
    """Make the folder from data in a temporary one, and print its sizes; exits 2 on a bad argument."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).parent / "llama-13m"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to, made if missing")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as data:
        stdlib_data.write(Path(data))
        make(out, Path(data))
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
