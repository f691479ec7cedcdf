"""How an optimizer step's samples become micro batches."""

from service.levers.base import Choice, Lever

# Steps over which `grouped` sorts, by how thorough the job's verification is: what is timed is what is exported.
GROUP_STEPS = {"quick": 2, "full": 8}

LEVER = Lever(
    name="batching",
    summary="Arrangement of samples into micro batches; the loss is normalised over the step's tokens in all.",
    baseline="padded",
    source="https://huggingface.co/docs/transformers/main_classes/trainer",
    choices=(
        Choice("padded", "samples in random order, each micro batch padded to its longest"),
        Choice(
            "sorted",
            "the samples of a step sorted by length, then cut into micro batches: same step, less padding",
            not_expressible="Trainer cannot sort within a step; train.py does",
        ),
        Choice(
            "grouped",
            "samples sorted by length across a few steps, micro batches shuffled: least padding, changes the order",
            changes_order=True,
            training_arguments={"train_sampling_strategy": "group_by_length"},
            not_expressible="Trainer's length groups span 50 batches, train.py's as many steps as were timed",
        ),
        Choice(
            "packed",
            "samples of a step packed into rows of max_length (best-fit decreasing), position_ids restarting",
            not_expressible="Trainer has no packing within a step; train.py packs with restarting position_ids",
        ),
    ),
)
