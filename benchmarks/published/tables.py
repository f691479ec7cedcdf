"""Published figures, each row with the levers that stand for it here.

Sources: B. Warner, "Efficient finetuning" (2023), BERT base on an RTX 3080 Ti; Lightning, "Accelerating LLMs with
mixed precision" (2023), DistilBERT on an A100; Predibase, "How we accelerated fine-tuning by 15x" (2024), QLoRA;
Hugging Face's performance guides, bert-base-cased on MRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One row: its levers, its batch (None: as large as fits), and what was published, as a ratio to the first row."""

    name: str
    levers: Mapping[str, str] = field(default_factory=dict)
    batch: int | None = None
    rate: float = 1e-4
    published: float | None = None
    stable: bool | None = None
    note: str = ""
    kept: bool = False  # the quantised weights are loaded, not made


@dataclass(frozen=True)
class Table:
    """A table on one job; `effective` is held over all rows, or is the row's own batch."""

    name: str
    title: str
    model: str
    task: str
    method: str
    rows: tuple[Row, ...]
    effective: int | None = None
    shows: str = "speed"


FOREACH = {"optimizer": "adamw-foreach"}
AMP = {"precision": "fp16-mixed", **FOREACH}
COMPILED = {**AMP, "compile": "whole"}
WARNER = (
    Row("fp32", {"precision": "fp32", "optimizer": "adamw-loop"}, 40, 1e-4, 1.0, True),
    Row("foreach optimizer", {"precision": "fp32", **FOREACH}, 40, 1e-4, 137 / 136, True),
    Row("tf32 matmul", {"precision": "tf32", **FOREACH}, 40, 1e-4, 137 / 136, True),
    Row("fp16 AMP", AMP, 40, 1e-4, 200 / 136, True),
    Row("fp16 AMP, batch 56", AMP, 56, 1.5e-4, 209 / 136, True),
    Row("bf16 AMP", {"precision": "bf16-mixed", **FOREACH}, 56, 1.5e-4, 208 / 136, True),
    Row("compile", COMPILED, 56, 1.25e-4, 270 / 136, True),
    Row("compile, batch 64", COMPILED, 64, 1.25e-4, 280 / 136, True),
    Row("Apex optimizer", {**COMPILED, "optimizer": "apex-fused-adam"}, 64, 1.25e-4, 278 / 136, True),
    Row("fused LayerNorm (Apex)", {**COMPILED, "normalisation": "apex-fused"}, 72, 1e-4, 287 / 136, False),
    Row("low-precision LayerNorm", {**COMPILED, "normalisation": "low-precision"}, 72, 1.35e-4, 282 / 136, True),
    Row("8-bit Adam", {**COMPILED, "optimizer": "adamw-8bit"}, 64, 8e-5, 285 / 136, False),
    Row("fused AdamW", {**COMPILED, "optimizer": "adamw-fused"}, 64, 1.25e-4, 245 / 136, True),
    Row("bitsandbytes 32-bit", {**COMPILED, "optimizer": "adamw-bnb-32bit"}, 64, 1.25e-4, 277 / 136, True),
    Row(
        "8-bit Adam + low-precision LayerNorm",
        {**COMPILED, "optimizer": "adamw-8bit", "normalisation": "low-precision"},
        72,
        1.25e-4,
        286 / 136,
        False,
    ),
)
WARNER_MLM = (
    Row("AMP", {**AMP, "attention": "eager"}, 32, 5e-5, 1.0),
    Row("compile", {**COMPILED, "attention": "eager"}, 32, 5e-5, 200 / 163),
    Row("FlashAttention", {**AMP, "attention": "varlen"}, 40, 7.5e-5, 209 / 163, note="varlen stands for it"),
    Row("FlashAttention + compile", {**AMP, "attention": "varlen", "compile": "per-layer"}, 48, 1e-4, 224 / 163),
)
LIGHTNING = (
    Row("fp32", {"precision": "fp32"}, 16, 5e-5, 1.0, True),
    Row("fp64", {"precision": "fp64"}, 16, 5e-5, None, True),
    Row("fp32, matmul high", {"precision": "tf32"}, 16, 5e-5, 2.5, True),
    Row("fp16-mixed", {"precision": "fp16-mixed"}, 16, 5e-5, 21.75 / 7.25, True),
    Row("fp16", {"precision": "fp16"}, 16, 5e-5, 21.75 / 5.23, False),
    Row("bf16-mixed", {"precision": "bf16-mixed"}, 16, 5e-5, None, True),
    Row("bf16", {"precision": "bf16"}, 16, 5e-5, None, True, "trains, by luck, it says"),
)
# Cumulative. Each evaluation generates for 100 rows until text metrics go; weights are quantised at every load until
# they are kept. The whole run includes loading and evaluations, one every 1,000 steps.
START = {"optimizer": "paged-adamw-32bit", "checkpointing": "full", "evaluation": "generation"}
FUSED = {**START, "optimizer": "adamw-fused"}
LOSS = {**FUSED, "evaluation": "loss"}
KEPT = {**LOSS, "checkpointing": "off"}
FLASH = {**KEPT, "batching": "padding-free", "attention": "varlen"}
PREDIBASE = (
    Row("paged optimizer, batch 1, checkpointing", START, 1, 2e-4, 1.0),
    Row("fused AdamW", FUSED, 1, 2e-4, None, note="10% to 39% said of paged to fused"),
    Row("automatic batch size", FUSED, None, 2e-4, None, note="30-40% less time"),
    Row("no text metrics", LOSS, None, 2e-4, None, note="1-17 minutes an evaluation"),
    Row("no checkpointing", KEPT, None, 2e-4, 3.71, note="25-35%; 3.71 with the GPU's change"),
    Row("weights quantised before", KEPT, None, 2e-4, None, note="loads 3-4x faster", kept=True),
    Row("packing", {**KEPT, "batching": "packed"}, None, 2e-4, None, note="2-5x", kept=True),
    Row("padding-free, flash kernel", FLASH, None, 2e-4, None, note="attention 3-8x", kept=True),
    Row("kernels", {**FLASH, "head": "chunked", "kernels": "liger"}, None, 2e-4, 15.0, note="20%; 15-16x", kept=True),
)
MEMORY = tuple(
    Row(f"{name}, batch {batch}", {"precision": precision}, batch, 5e-5, published / 4247)
    for batch, plain, half in ((8, 4247, 4163), (16, 4971, 4793), (32, 6827, 6207), (64, 10037, 8061))
    for name, precision, published in (("fp32", "fp32", plain), ("fp16", "fp16-mixed", half))
)
STATES = (
    Row("AdamW", {"precision": "fp32", "optimizer": "adamw-fused"}, 8, 5e-5, 1.0),
    Row("Adafactor", {"precision": "fp32", "optimizer": "adafactor"}, 8, 5e-5, 12.5 / 24),
    Row("8-bit AdamW", {"precision": "fp32", "optimizer": "adamw-8bit"}, 8, 5e-5, 6 / 24),
    Row("SGD", {"precision": "fp32", "optimizer": "sgd"}, 8, 5e-5, None, note="no state at all"),
)

CLASSIFY = "sequence-classification"
TABLES = (
    Table("warner", "B. Warner: BERT classification", "bert", CLASSIFY, "full", WARNER),
    Table("warner-mlm", "B. Warner: BERT masked language modelling", "bert", "masked-lm", "full", WARNER_MLM),
    Table(
        "lightning",
        "Lightning: DistilBERT in every precision",
        "distilbert",
        "sequence-classification",
        "full",
        LIGHTNING,
    ),
    Table("predibase", "Predibase: QLoRA, cumulative", "llama", "causal-lm", "qlora", PREDIBASE, 32),
    Table("memory", "Hugging Face: memory by batch", "bert", CLASSIFY, "full", MEMORY, None, "memory"),
    Table("states", "Hugging Face: optimizer memory", "bert", CLASSIFY, "full", STATES, None, "memory"),
)
