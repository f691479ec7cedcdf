"""Hand-written kernels for a model's own operations."""

from service.levers.base import Choice, Lever, cuda, package

NEEDS = (cuda(), package("liger_kernel", "its kernels"))
PARTLY = "Trainer's use_liger_kernel takes no choice of kernels here; train.py applies these"

LEVER = Lever(
    name="kernels",
    summary="Liger's Triton kernels in place of the model's operations (Hsu et al. 2024, arXiv 2410.10989).",
    baseline="off",
    source="https://github.com/linkedin/Liger-Kernel",
    order=40,
    stage="base",
    simulated=(),
    choices=(
        Choice("off", "the model's own operations"),
        Choice(
            "liger",
            "rotary embedding, RMSNorm and SwiGLU",
            needs=NEEDS,
            changes_numerics=True,
            function="liger_kernels",
            options={"operations": ["rope", "rms_norm", "swiglu"]},
            change_rank=20,
            not_expressible=PARTLY,
        ),
        Choice(
            "liger-rope",
            "the rotary embedding only",
            needs=NEEDS,
            changes_numerics=True,
            searched=False,
            function="liger_kernels",
            options={"operations": ["rope"]},
            not_expressible=PARTLY,
        ),
        Choice(
            "liger-rms-norm",
            "RMSNorm only",
            needs=NEEDS,
            changes_numerics=True,
            searched=False,
            function="liger_kernels",
            options={"operations": ["rms_norm"]},
            not_expressible=PARTLY,
        ),
        Choice(
            "liger-swiglu",
            "SwiGLU only",
            needs=NEEDS,
            changes_numerics=True,
            searched=False,
            function="liger_kernels",
            options={"operations": ["swiglu"]},
            not_expressible=PARTLY,
        ),
    ),
)
