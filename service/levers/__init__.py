"""The catalogue, as data: one lever a file. A new lever is a file here, its twin in worker/levers, and a line below."""

from __future__ import annotations

from collections.abc import Mapping

from service.contract.job import JobSpec
from service.levers import (
    activations,
    adapter,
    allocator,
    attention,
    batching,
    cache,
    checkpointing,
    compile,
    evaluation,
    experts,
    float8,
    head,
    kernels,
    loading,
    normalisation,
    optimizer,
    padding,
    precision,
    quantization,
    vocabulary,
)
from service.levers.base import Choice, Exclusion, Lever, Need, package
from service.levers.exclusions import EXCLUSIONS

MODULES = (
    *(precision, float8, attention, kernels, experts, normalisation, head, vocabulary, optimizer, checkpointing),
    *(compile, activations, batching, padding, quantization, adapter, loading, allocator, cache, evaluation),
)
LEVERS: dict[str, Lever] = {module.LEVER.name: module.LEVER for module in MODULES}

METHOD_NEEDS: dict[str, tuple[Need, ...]] = {
    "lora": (package("peft", "LoRA adapters"),),
    "qlora": (package("peft", "LoRA adapters"), package("bitsandbytes", "NF4 weights of QLoRA")),
    "full": (),
}


def excluded(point: Mapping[str, str]) -> Exclusion | None:
    """The first exclusion that a point (levers and circumstances) runs into, or None."""
    return next((exclusion for exclusion in EXCLUSIONS if exclusion.hits(point)), None)


def circumstances(spec: JobSpec, method: str) -> dict[str, str]:
    """What of a job the exclusions look at beside its levers."""
    clipping = "on" if spec.training.max_grad_norm else "off"
    return {"task": spec.task, "method": method, "clipping": clipping, "loss_on": spec.training.loss_on}


def unknown(name: str, choice: str | None = None) -> str | None:
    """A sentence when a lever or its choice does not exist, listing those that do; else None."""
    if name not in LEVERS:
        return f"there is no lever {name!r}; known levers: {', '.join(LEVERS)}"
    if choice is not None and choice not in LEVERS[name].names:
        return f"lever {name!r} has no choice {choice!r}; it has: {', '.join(LEVERS[name].names)}"
    return None


__all__ = [
    "EXCLUSIONS",
    "LEVERS",
    "METHOD_NEEDS",
    "Choice",
    "Exclusion",
    "Lever",
    "circumstances",
    "excluded",
    "unknown",
]
