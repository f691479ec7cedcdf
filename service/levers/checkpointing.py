"""Activation (gradient) checkpointing, which saves memory by computing activations a second time."""

from typing import Any

from service.levers.base import Asked, Choice, Effect, Lever, Memory, cuda


def kept(**options: Any) -> dict[str, Any]:
    """TrainingArguments that ask transformers 5.23 for non-reentrant checkpointing with these options."""
    return {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False, **options},
    }


def asked(note: str = "", **options: Any) -> tuple[Asked, ...]:
    """How a user asks for checkpointing with these options, with or without `use_reentrant` being set to False."""
    said = kept(**options)
    return Asked(said, note), Asked({**said, "activation_checkpointing_kwargs": options}, note)


BESIDE = "The baseline's offload makes the computation wait for its copies; it was measured with copies beside it."
CHECKPOINTED = ("full", "every-2", "every-4", "selective", "offloaded")

LEVER = Lever(
    name="checkpointing",
    summary="Recompute activations in the backward pass instead of keeping them (Chen et al. 2016).",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    order=100,
    stage="model",
    families=(("every-2", "every-4"), ("full", "offloaded")),
    choices=(
        Choice("off", "keep all activations"),
        Choice(
            "full",
            "keep each layer's input only, non-reentrant",
            function="checkpoint_layers",
            memory=Memory(activations=0.4),
            asked_by=(Asked({"gradient_checkpointing": True}), Asked({"activation_checkpointing": True})),
            training_arguments=kept(),
            effect=Effect(1.27, 0.1, limited=0.95),
        ),
        Choice(
            "every-2",
            "every second layer: half the saving, half the cost",
            function="checkpoint_layers",
            options={"every": 2},
            memory=Memory(activations=0.7),
            asked_by=asked(every_n_layers=2),
            training_arguments=kept(every_n_layers=2),
            effect=Effect(1.14, 0.08, limited=0.97),
        ),
        Choice(
            "every-4",
            "every fourth layer",
            function="checkpoint_layers",
            options={"every": 4},
            memory=Memory(activations=0.85),
            asked_by=asked(every_n_layers=4),
            training_arguments=kept(every_n_layers=4),
            effect=Effect(1.07, 0.06, limited=0.98),
        ),
        Choice(
            "selective",
            "recompute all but matmuls and attention, which are dear to compute",
            function="checkpoint_selectively",
            memory=Memory(activations=0.6),
            not_expressible="a policy is Python, which TrainingArguments cannot hold; train.py has it",
            effect=Effect(1.12, 0.08, limited=0.94),
        ),
        Choice(
            "offloaded",
            "keep each layer's input, in host memory, by copies that run beside the computation (as torchtune's do)",
            needs=(cuda(),),
            function="checkpoint_offloaded",
            memory=Memory(activations=0.3),
            asked_by=asked(BESIDE, offload=True),
            training_arguments=kept(offload=True),
            not_expressible="Trainer's offload computes nothing while it copies; train.py copies and computes at once",
            effect=Effect(1.3, 0.15, limited=1.0),
        ),
    ),
)
