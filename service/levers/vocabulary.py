"""The size of the output layer's matrix multiplication."""

from service.levers.base import Choice, Effect, Exclusion, Lever
from service.levers.head import WITHOUT_LOGITS

LATER = "train.py pads the output layer's matmul and cuts the extra columns off, which no argument of Trainer does"

LEVER = Lever(
    name="vocabulary",
    summary="Pad the output layer's matmul to a multiple that tensor cores like; the extra columns are cut off again.",
    baseline="as-is",
    source="https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
    order=80,
    touches_memory=False,
    may_do_nothing=True,
    stage="base",
    tasks=("causal-lm", "masked-lm"),
    families=(("multiple-8", "multiple-64"),),
    choices=(
        Choice("as-is", "the checkpoint's vocabulary"),
        Choice(
            "multiple-8",
            "padded to a multiple of 8",
            function="pad_head",
            options={"multiple": 8},
            not_expressible=LATER,
            effect=Effect(0.99, 0.03, host=1.01),
        ),
        Choice(
            "multiple-64",
            "padded to a multiple of 64",
            function="pad_head",
            options={"multiple": 64},
            not_expressible=LATER,
            effect=Effect(0.99, 0.03, host=1.01),
        ),
    ),
    exclusions=(
        Exclusion(
            {"vocabulary": ("multiple-8", "multiple-64"), "head": WITHOUT_LOGITS},
            "these compute logits themselves, past the padded output layer",
            "https://github.com/apple/ml-cross-entropy",
        ),
    ),
)
