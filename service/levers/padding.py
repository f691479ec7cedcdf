"""How far rows are padded. The options are data: the multiple, or 0 for max_length."""

from service.levers.base import Choice, Effect, Exclusion, Lever
from service.levers.compile import GRAPHS

LEVER = Lever(
    name="padding",
    summary="The length that the rows of a micro batch are padded to.",
    baseline="longest",
    source="https://huggingface.co/docs/transformers/main_classes/data_collator",
    order=140,
    touches_memory=False,
    families=(("multiple-8", "multiple-64"),),
    choices=(
        Choice("longest", "the longest row of the micro batch", options={"multiple": 1}),
        Choice(
            "multiple-8",
            "the next multiple of 8: tensor cores like it",
            options={"multiple": 8},
            not_expressible="an argument of the data collator: pad_to_multiple_of=8; train.py pads so",
            effect=Effect(0.99, 0.04, host=1.02),
        ),
        Choice(
            "multiple-64",
            "the next multiple of 64: few shapes, so that compiled code is made for few",
            options={"multiple": 64},
            not_expressible="an argument of the data collator: pad_to_multiple_of=64; train.py pads so",
            effect=Effect(1.04, 0.06),
        ),
        Choice(
            "max",
            "always max_length: one shape, as CUDA graphs want it, and the most padding",
            searched=False,
            options={"multiple": 0},
            not_expressible="an argument of the data collator: padding='max_length'; train.py pads so",
        ),
    ),
    exclusions=(
        Exclusion(
            {"compile": GRAPHS, "padding": ("longest", "multiple-8")},
            "CUDA graphs are made for one shape each, and lengths vary: pad to multiple-64 or max",
            "https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html",
        ),
        Exclusion(
            {"padding": ("multiple-8", "multiple-64", "max"), "batching": ("token-budget",)},
            "the budget counts tokens before rows are padded further, so that the batch would outgrow it",
            "https://huggingface.co/docs/transformers/main_classes/data_collator",
        ),
    ),
)
