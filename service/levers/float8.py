"""Matrix multiplications of linear layers in 8-bit floating point."""

from service.levers.base import Choice, Effect, Exclusion, Lever, capability, cuda, package
from service.levers.precision import FULL_PRECISION

NEEDS = (cuda(), capability(8, 9), package("torchao", "its float8 training"))
LATER = "Trainer takes fp8 through accelerate's configuration only; train.py converts the layers itself"
FLOAT8 = ("tensorwise", "rowwise", "rowwise-high-precision-gradients")


def scaled(name: str, summary: str, scaling: str) -> Choice:
    """The choice of one of torchao's scaling recipes, by its name there."""
    return Choice(
        name,
        summary,
        needs=NEEDS,
        changes_numerics=True,
        changes_learning=True,
        function="float8_linear",
        options={"scaling": scaling},
        effect=Effect(0.85, 0.15),
        not_expressible=LATER,
    )


LEVER = Lever(
    name="float8",
    summary="Matmuls of linear layers in fp8, weights and gradients scaled as they come (torchao.float8).",
    baseline="off",
    source="https://github.com/pytorch/ao/tree/main/torchao/float8",
    order=20,
    stage="base",
    methods=("full",),
    simulated=(),
    families=(("tensorwise", "rowwise", "rowwise-high-precision-gradients"),),
    choices=(
        Choice("off", "in the precision lever's format"),
        scaled("tensorwise", "one scale a tensor: the fastest", "tensorwise"),
        scaled("rowwise", "one scale a row: more exact", "rowwise"),
        scaled(
            "rowwise-high-precision-gradients",
            "one scale a row, the gradient of the weights in 16 bits",
            "rowwise_with_gw_hp",
        ),
    ),
    exclusions=(
        Exclusion(
            {"float8": FLOAT8, "precision": ("checkpoint", *FULL_PRECISION, "fp16-mixed", "fp16")},
            "its matmuls take and give bf16",
            "https://github.com/pytorch/ao/tree/main/torchao/float8",
        ),
        Exclusion(
            {"padding": ("longest", "multiple-8"), "float8": FLOAT8},
            "its matmuls need a multiple of 16 tokens in every micro batch",
            "https://github.com/pytorch/ao/tree/main/torchao/float8",
        ),
        Exclusion(
            {"max_length": ("other",), "float8": FLOAT8},
            "its matmuls need a multiple of 16 tokens in every micro batch, and full rows have max_length",
            "https://github.com/pytorch/ao/tree/main/torchao/float8",
        ),
    ),
)
