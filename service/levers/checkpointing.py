"""Activation (gradient) checkpointing: memory for time."""

from service.levers.base import Choice, Lever, cuda

WHOLE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

LEVER = Lever(
    name="checkpointing",
    summary="Recompute activations in the backward pass instead of keeping them (Chen et al. 2016).",
    baseline="off",
    source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    stage="model",
    choices=(
        Choice("off", "keep all activations"),
        Choice(
            "full",
            "keep each layer's input only, non-reentrant",
            function="checkpoint_layers",
            training_arguments=WHOLE,
        ),
        Choice(
            "every-2",
            "every second layer: half the saving, half the cost",
            function="checkpoint_layers",
            options={"every": 2},
            not_expressible="Trainer checkpoints all layers or none; train.py every second one",
        ),
        Choice(
            "every-4",
            "every fourth layer",
            function="checkpoint_layers",
            options={"every": 4},
            not_expressible="Trainer checkpoints all layers or none; train.py every fourth one",
        ),
        Choice(
            "selective",
            "recompute all but matmuls and attention, which are dear to compute",
            function="checkpoint_selectively",
            not_expressible="a policy is Python, which TrainingArguments cannot hold; train.py has it",
        ),
        Choice(
            "offloaded",
            "keep each layer's input, in host memory",
            needs=(cuda(),),
            function="checkpoint_offloaded",
            not_expressible="Trainer cannot offload activations; train.py keeps layers' inputs in host memory",
        ),
    ),
)
