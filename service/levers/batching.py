"""How an optimizer step's samples become micro batches. The options are data about the rows."""

from service.levers.attention import FLASH, MASKED, SDPA
from service.levers.base import Asked, Choice, Effect, Exclusion, Lever, Together
from service.levers.compile import GRAPHS, WHOLE
from service.levers.optimizer import WHOLE_STEP

# Steps over which `grouped` sorts, by how thorough the job's verification is: what is timed is what is exported.
GROUP_STEPS = {"quick": 2, "standard": 8, "strict": 8}
ROWS = ("packed", "packed-global")  # rows of max_length
PACKED = (*ROWS, "padding-free")  # rows of several samples
BUDGETED = ("token-budget", "padding-free")  # micro batches of a number of tokens
LATER = "packs with restarting position_ids"

LEVER = Lever(
    name="batching",
    summary="Arrangement of samples into micro batches; the loss is normalised over the step's tokens in all.",
    baseline="padded",
    source="https://huggingface.co/docs/transformers/main_classes/trainer",
    order=130,
    stage="batching",
    families=(("sorted", "token-budget", "grouped"), PACKED),
    choices=(
        Choice("padded", "samples in random order, each micro batch padded to its longest", function="padded"),
        Choice(
            "sorted",
            "the samples of a step sorted by length, then cut into micro batches: same step, less padding",
            function="sorted_within",
            not_expressible="Trainer cannot sort within a step; train.py does",
            effect=Effect(spread=0.08, padding=0.6),
        ),
        Choice(
            "token-budget",
            "the samples of a step sorted by length, in micro batches of equally many padded tokens: same step, and "
            "short samples fill the memory that long ones need",
            function="token_budget",
            not_expressible="Trainer's micro batches count samples; train.py's count padded tokens",
            effect=Effect(spread=0.1, padding=0.75),
        ),
        Choice(
            "grouped",
            "samples sorted by length across a few steps, micro batches shuffled: least padding, changes the order",
            changes_order=True,
            function="grouped",
            asked_by=(Asked({"group_by_length": True}), Asked({"train_sampling_strategy": "group_by_length"})),
            training_arguments={"train_sampling_strategy": "group_by_length"},
            not_expressible="Trainer's length groups span 50 batches, train.py's as many steps as were timed",
            effect=Effect(spread=0.08, padding=0.85),
        ),
        Choice(
            "packed",
            "samples of a step packed into rows of max_length (best-fit decreasing), position_ids restarting",
            function="packed_within",
            not_expressible=f"Trainer has no packing within a step; train.py {LATER}",
            effect=Effect(spread=0.15, padding=0.9, host=1.15),
        ),
        Choice(
            "padding-free",
            "a step's samples side by side, a row a micro batch, no padding: for kernels that know where each ends",
            function="side_by_side",
            not_expressible=f"Trainer's padding-free collator does not hold a token budget; train.py {LATER}",
            effect=Effect(spread=0.15, padding=1.0),
        ),
        Choice(
            "packed-global",
            "an epoch's samples packed into rows, rows shuffled: fullest rows, changes the order, and steps have the "
            "effective batch in the mean only",
            changes_order=True,
            function="packed_globally",
            not_expressible=f"Trainer has no packing; train.py {LATER}",
            effect=Effect(spread=0.15, padding=0.97, host=1.15),
        ),
    ),
    together=(
        Together(
            {"attention": ("varlen", *FLASH), "batching": PACKED},
            0.9,
            "these kernels are told where samples end; others compute a whole row's mask",
        ),
    ),
    exclusions=(
        Exclusion(
            {"optimizer": WHOLE_STEP, "batching": ("token-budget", *PACKED)},
            "a step is one micro batch there, and these may cut it into several",
            "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html",
        ),
        Exclusion(
            {"batching": PACKED, "labels": ("classes",)},
            "a classifier pools one label a row, so rows cannot hold several samples",
            "https://huggingface.co/docs/transformers/model_doc/bert",
        ),
        Exclusion(
            {"batching": ("padding-free",), "attention": MASKED},
            "under a mask one row of all tokens costs the square of its length: about 8 times the attention of 8 rows",
            "https://huggingface.co/docs/transformers/attention_interface",
        ),
        Exclusion(
            {"batching": PACKED, "labels": ("tokens",), "sees": ("both-ways",), "attention": MASKED},
            "encoders see both ways: only a kernel that is told where samples end keeps them apart",
            "https://huggingface.co/docs/transformers/attention_interface",
        ),
        Exclusion(
            {"batching": PACKED, "attention": SDPA, "compile": tuple(one for one in WHOLE if one not in GRAPHS)},
            "compiled as a whole, sdpa gets the dense mask of the packed rows, and no fast kernel takes it",
            "https://github.com/huggingface/transformers/issues/48925",
        ),
        Exclusion(
            {"compile": GRAPHS, "batching": BUDGETED},
            "CUDA graphs are made for one shape each, and the number of rows or their length varies",
            "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
        ),
        Exclusion(
            {"compile": GRAPHS, "batching": ROWS, "attention": FLASH},
            "CUDA graphs are made for one shape each, and these kernels take as many lengths as there are samples",
            "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
        ),
    ),
)

ACROSS_STEPS = tuple(choice.name for choice in LEVER.choices if choice.changes_order)
