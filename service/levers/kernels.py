"""Hand-written kernels for a model's own operations."""

from typing import Any

from service.levers.base import Choice, Effect, Exclusion, Lever, cuda, package

NEEDS = (cuda(), package("liger_kernel", "its kernels"))
# The kernels that Liger's patches may switch, all of which Trainer has to be told: those not named are on.
SWITCHES = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm", "cross_entropy", "fused_linear_cross_entropy")


def switched_on(*operations: str) -> dict[str, Any]:
    """TrainingArguments that switch these of Liger's kernels on, and all others off."""
    return {"use_liger_kernel": True, "liger_kernel_config": {one: one in operations for one in SWITCHES}}


def liger(name: str, summary: str, *operations: str) -> Choice:
    """The choice of some of Liger's kernels. The search tries all of them at once; single ones have to be asked for."""
    return Choice(
        name,
        summary,
        needs=NEEDS,
        changes_numerics=True,
        searched=len(operations) > 1,
        function="liger_kernels",
        options={"operations": list(operations)},
        effect=Effect(0.92, 0.07),
        training_arguments=switched_on(*operations),
    )


LEVER = Lever(
    name="kernels",
    summary="Liger's Triton kernels (Hsu et al. 2024, arXiv 2410.10989) or the hub's, for the model's operations.",
    baseline="off",
    source="https://github.com/linkedin/Liger-Kernel",
    order=40,
    stage="base",
    simulated=(),
    choices=(
        Choice("off", "the model's own operations"),
        # Of the two kinds of gated MLP, a model has one.
        liger("liger", "rotary embedding, RMSNorm and SwiGLU or GeGLU", "rope", "rms_norm", "swiglu", "geglu"),
        liger("liger-rope", "the rotary embedding only", "rope"),
        liger("liger-rms-norm", "RMSNorm only", "rms_norm"),
        liger("liger-swiglu", "SwiGLU only", "swiglu"),
        Choice(
            "hub",
            "the hub's kernels for the layers that have one; compiled code is loaded, so it is not searched",
            needs=(cuda(), package("kernels", "which loads them")),
            changes_numerics=True,
            searched=False,
            function="hub_kernels",
            effect=Effect(0.94, 0.07),
            not_expressible="TrainingArguments do not load the model; train.py asks for the kernels",
        ),
    ),
    exclusions=(
        Exclusion(
            {"kernels": ("liger", "liger-rope", "hub"), "checkpointing": ("selective",)},
            "the rotary kernel writes over results of matmuls, which selective checkpointing keeps and which would be "
            "rotated twice",
            "https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/ops/rope.py",
        ),
    ),
)
