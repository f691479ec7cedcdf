"""How an optimizer step's samples become micro batches. The options are data about the rows."""

from service.levers.base import Choice, Lever

# Steps over which `grouped` sorts, by how thorough the job's verification is: what is timed is what is exported.
GROUP_STEPS = {"quick": 2, "full": 8}
LATER = "packs with restarting position_ids"

LEVER = Lever(
    name="batching",
    summary="Arrangement of samples into micro batches; the loss is normalised over the step's tokens in all.",
    baseline="padded",
    source="https://huggingface.co/docs/transformers/main_classes/trainer",
    stage="batching",
    choices=(
        Choice("padded", "samples in random order, each micro batch padded to its longest", function="padded"),
        Choice(
            "sorted",
            "the samples of a step sorted by length, then cut into micro batches: same step, less padding",
            function="sorted_within",
            not_expressible="Trainer cannot sort within a step; train.py does",
        ),
        Choice(
            "token-budget",
            "the samples of a step sorted by length, in micro batches of equally many padded tokens: same step, and "
            "short samples fill the memory that long ones need",
            function="token_budget",
            not_expressible="Trainer's micro batches count samples; train.py's count padded tokens",
        ),
        Choice(
            "grouped",
            "samples sorted by length across a few steps, micro batches shuffled: least padding, changes the order",
            changes_order=True,
            function="grouped",
            training_arguments={"train_sampling_strategy": "group_by_length"},
            not_expressible="Trainer's length groups span 50 batches, train.py's as many steps as were timed",
        ),
        Choice(
            "packed",
            "samples of a step packed into rows of max_length (best-fit decreasing), position_ids restarting",
            function="packed_within",
            not_expressible=f"Trainer has no packing within a step; train.py {LATER}",
        ),
        Choice(
            "padding-free",
            "a step's samples side by side, a row a micro batch, no padding: for kernels that know where each ends",
            function="side_by_side",
            not_expressible=f"Trainer's padding-free collator does not hold a token budget; train.py {LATER}",
        ),
        Choice(
            "packed-global",
            "an epoch's samples packed into rows, rows shuffled: fullest rows, changes the order, and a step's samples "
            "only nearly number the effective batch",
            changes_order=True,
            function="packed_globally",
            not_expressible=f"Trainer has no packing; train.py {LATER}",
        ),
    ),
)

ROWS = ("packed", "packed-global")  # rows of max_length
PACKED = (*ROWS, "padding-free")  # rows of several samples
BUDGETED = ("token-budget", "padding-free")
ACROSS_STEPS = tuple(choice.name for choice in LEVER.choices if choice.changes_order)
