"""torch.compile."""

from service.levers.base import Choice, Lever

LEVER = Lever(
    name="compile",
    summary="Fuse and generate kernels with torch.compile (inductor); the time it takes is counted in the run.",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    choices=(
        Choice("off", "eager mode"),
        Choice(
            "per-layer",
            "each transformer layer compiled in place, dynamic shapes: keeps sdpa's is_causal path",
            changes_numerics=True,
            not_expressible="Trainer's torch_compile compiles the whole model; train.py compiles each layer",
        ),
    ),
)
