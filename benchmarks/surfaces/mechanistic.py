"""Jobs as they are run: models and devices with their published figures, without drawn effects."""

from __future__ import annotations

from typing import Any

from benchmarks.surfaces.analytic import Analytic
from benchmarks.surfaces.costs import ATTENTION, SHARED, Costs, Form, complete, precision
from benchmarks.surfaces.lengths import Lengths
from benchmarks.surfaces.physics import Device, Interaction, Model, World
from benchmarks.surfaces.workers import H200, RTX_3080_TI, RTX_4090, SMALL_CPU
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.levers import LEVERS

SPEEDS = {
    "3080ti": {"16": 3.0, "tf32": 1.6, "medium": 1.6},
    "4090": {"16": 2.6, "tf32": 1.3, "medium": 1.3},
    "h200": {"16": 13.0, "tf32": 6.0, "medium": 6.0},
    "cpu": {"16": 3.2, "tf32": 1.0, "medium": 2.6},
}
DEVICES = {
    "3080ti": Device(2.2e13, 9.1e11, 5e-6, RTX_3080_TI.memory_bytes, half=250, overlap=4),
    "4090": Device(6e13, 1e12, 5e-6, RTX_4090.memory_bytes, half=350, overlap=4),
    "h200": Device(5e13, 4.2e12, 4.5e-6, H200.memory_bytes, half=700, overlap=4, bus=5e10),
    "cpu": Device(1.3e11, 2e10, 6e-6, SMALL_CPU.memory_bytes, half=20, overlap=1, context=0.3e9, cache_tokens=3000),
}
BERT: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 0, "causal": False, "tensors": 200}
LLAMA_1B: dict[str, Any] = {"layers": 16, "hidden": 2048, "heads": 32, "vocabulary": 128_256, "causal": True}
LLAMA_8B: dict[str, Any] = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "vocabulary": 128_256,
    "causal": True,
    "tensors": 448,
}
MODELS: dict[str, Model] = {
    "bert": Model(1.1e8, 1.1e8, **BERT, load_seconds=1.5, compile_seconds=25),
    "1b-lora": Model(1.24e9, 1.1e7, **LLAMA_1B, tensors=224, load_seconds=3, compile_seconds=20),
    "1b-full": Model(1.24e9, 1.24e9, **LLAMA_1B, tensors=146, load_seconds=3, compile_seconds=20),
    "8b-lora": Model(8.03e9, 4.2e7, **LLAMA_8B, load_seconds=14, compile_seconds=30),
    "cpu-lora": Model(
        1.3e7, 4e5, 6, 384, 6, 8192, causal=True, tensors=84, load_seconds=0.4, compile_seconds=40, collate=1e-6
    ),
}
PACKED, MASKED = ("packed", "packed-global"), ("sdpa", "sdpa-efficient", "sdpa-cudnn")
# What follows from how kernels are made, and is the same for all jobs.
STRUCTURE = (
    Interaction({"batching": PACKED, "attention": MASKED}, 1.5, "attention"),
    Interaction({"batching": PACKED, "attention": ("sdpa-flash",)}, 4.0, "attention"),
    Interaction({"attention": ("eager",), "compile": ("per-layer", "whole")}, 0.7, "attention"),
    Interaction({"kernels": ("liger",), "compile": ("per-layer", "per-layer-max-autotune")}, 1.25, "elementwise"),
    Interaction({"normalisation": ("low-precision",), "compile": ("per-layer",)}, 1.06, "elementwise"),
    Interaction({"checkpointing": ("selective",), "compile": ("per-layer",)}, 1.1, "kernels"),
)
ENCODER = (Interaction({"attention": ("sdpa-flash",), "batching": ("padded", "grouped")}, 3.0, "attention"),)


DENSE = {f"experts={one}": "the model has no experts" for one in ("eager", "batched", "grouped")}
WITH_DROPOUT = {
    f"attention={one.name}": "it has no dropout, and the model's config.json asks for 0.1"
    for one in LEVERS["attention"].choices
    if not one.drops_attention
}


def costs(device: str, speeds: str, method: Form, checkpoint: str) -> Costs:
    """The catalogue's costs on a kind of device."""
    kind = "cpu" if device == "cpu" else "cuda"
    shared = {**SHARED, "attention": ATTENTION[kind]}
    if kind == "cpu":  # compiled code gains nothing there but memory, and 8-bit states cost arithmetic
        slow = {"elementwise": 1.08, "kernels": 0.9, "activations": 0.85}
        shared["compile"] = {"per-layer": {**slow, "compiling": 1}, "whole": {**slow, "compiling": 3}}
        shared["optimizer"] = {
            name: {**one, "update": one["update"] * (3 if "8bit" in name or "4bit" in name else 1)}
            for name, one in SHARED["optimizer"].items()
        }
    if method != "qlora":  # other methods' weights are not quantised, whatever choice stands there
        shared["quantization"] = {}
    shared["precision"] = precision(kind, SPEEDS[speeds], method, checkpoint)
    return complete(shared)


def specification(name: str, task: str, method: str, length: int, **training: Any) -> JobSpec:
    """A job whose search ends by the count of trials alone."""
    return JobSpec.model_validate(
        {
            "name": name,
            "model": {"source": name},
            "task": task,
            "dataset": {"source": "made-up", "max_length": length},
            "method": method,
            "training": {"epochs": 2, **training},
            "search": {"trials": 1000, "minutes": 10_000},
        }
    )


def surface(
    name: str, device: str, model: str, facts: HardwareFacts, task: str, method: Form, lengths: Lengths, **training: Any
) -> Analytic:
    """A surface of a device and a model by their names in DEVICES and MODELS."""
    spec = specification(name, task, method, lengths.longest, **training)
    table = costs(device, device, method, "fp32" if model in ("bert", "cpu-lora") else "bf16")
    extra: tuple[Interaction, ...] = ()
    if not MODELS[model].causal:  # Liger has no kernels for BERT
        table, extra = {**table, "kernels": {name: {} for name in table["kernels"]}}, ENCODER
    world = World(
        device=DEVICES[device],
        model=MODELS[model],
        lengths=lengths,
        epochs=spec.training.epochs,
        wall_clock=True,
        costs=table,
        interactions=STRUCTURE + extra,
        lacks=DENSE if MODELS[model].causal else DENSE | WITH_DROPOUT,
    )
    return Analytic("mechanistic", name, spec, facts, world)


def bert_small_gpu() -> Analytic:
    """BERT base on a GPU of 12 GiB: bound by arithmetic and memory."""
    reviews = Lengths(180, 0.6, 256, 8000)
    return surface(
        "bert-12gib", "3080ti", "bert", RTX_3080_TI, "sequence-classification", "full", reviews, effective_batch_size=32
    )


def bert_large_gpu() -> Analytic:
    """BERT base on a GPU of 139 GiB: bound by the host, which cannot start kernels fast enough."""
    return surface(
        "bert-139gib", "h200", "bert", H200, "sequence-classification", "full", Lengths(60, 0.7, 256, 20_000)
    )


def llama_lora() -> Analytic:
    """Llama 1B with LoRA on 24 GiB."""
    return surface("llama-1b-lora", "4090", "1b-lora", RTX_4090, "causal-lm", "lora", Lengths(220, 0.8, 1024, 10_000))


def llama_full() -> Analytic:
    """Llama 1B in full on 139 GiB."""
    return surface(
        "llama-1b-full",
        "h200",
        "1b-full",
        H200,
        "causal-lm",
        "full",
        Lengths(350, 0.7, 2048, 50_000),
        effective_batch_size=64,
    )


def llama_large_lora() -> Analytic:
    """Llama 8B with LoRA over a 16-bit base on 24 GiB: little else than checkpointed configurations fit."""
    data = Lengths(220, 0.8, 1024, 10_000)
    return surface("llama-8b-lora", "4090", "8b-lora", RTX_4090, "causal-lm", "lora", data, effective_batch_size=16)


def llama_large_qlora() -> Analytic:
    """Llama 8B with QLoRA on 24 GiB."""
    data = Lengths(220, 0.8, 1024, 10_000)
    return surface("llama-8b-qlora", "4090", "8b-lora", RTX_4090, "causal-lm", "qlora", data, effective_batch_size=16)


def small_cpu() -> Analytic:
    """A small Llama with LoRA on a CPU of four cores."""
    return surface("llama-13m-cpu", "cpu", "cpu-lora", SMALL_CPU, "causal-lm", "lora", Lengths(120, 0.8, 512, 4000))


MECHANISTIC = {
    "bert-12gib": bert_small_gpu,
    "bert-139gib": bert_large_gpu,
    "llama-1b-lora": llama_lora,
    "llama-1b-full": llama_full,
    "llama-8b-lora": llama_large_lora,
    "llama-8b-qlora": llama_large_qlora,
    "llama-13m-cpu": small_cpu,
}
