"""Activation (gradient) checkpointing, which saves memory by computing activations a second time."""

from service.levers.base import Asked, Choice, Effect, Lever, Memory, cuda

WHOLE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
CHECKPOINTED = ("full", "every-2", "every-4", "selective", "offloaded")

LEVER = Lever(
    name="checkpointing",
    summary="Recompute activations in the backward pass instead of keeping them (Chen et al. 2016).",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    order=100,
    stage="model",
    choices=(
        Choice("off", "keep all activations"),
        Choice(
            "full",
            "keep each layer's input only, non-reentrant",
            function="checkpoint_layers",
            memory=Memory(activations=0.4),
            asked_by=(Asked({"gradient_checkpointing": True}),),
            training_arguments=WHOLE,
            effect=Effect(1.27, 0.1, limited=0.95),
        ),
        Choice(
            "every-2",
            "every second layer: half the saving, half the cost",
            function="checkpoint_layers",
            options={"every": 2},
            memory=Memory(activations=0.7),
            not_expressible="Trainer checkpoints all layers or none; train.py every second one",
            effect=Effect(1.14, 0.08, limited=0.97),
        ),
        Choice(
            "every-4",
            "every fourth layer",
            function="checkpoint_layers",
            options={"every": 4},
            memory=Memory(activations=0.85),
            not_expressible="Trainer checkpoints all layers or none; train.py every fourth one",
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
            "keep each layer's input, in host memory",
            needs=(cuda(),),
            function="checkpoint_offloaded",
            memory=Memory(activations=0.3),
            not_expressible="Trainer cannot offload activations; train.py keeps layers' inputs in host memory",
            effect=Effect(1.3, 0.15, limited=1.0),
        ),
    ),
)
