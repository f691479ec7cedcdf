"""Activation (gradient) checkpointing: memory for time."""

from service.levers.base import Choice, Lever

LEVER = Lever(
    name="checkpointing",
    summary="Recompute activations in the backward pass instead of keeping them (Chen et al. 2016).",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    choices=(
        Choice("off", "keep all activations"),
        Choice(
            "full",
            "keep each layer's input only, non-reentrant",
            training_arguments={
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
            },
        ),
    ),
)
