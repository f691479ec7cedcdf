"""The output layer and the loss: logits of a large vocabulary are the largest tensor of a step."""

from service.levers.base import Choice, Effect, Exclusion, Lever, Memory, capability, cuda, package
from service.levers.kernels import switched_on
from service.levers.precision import FULL_PRECISION

# What computes logits itself, a part at a time, and so never has all of them in memory.
WITHOUT_LOGITS = ("chunked", "cut-cross-entropy", "liger")
IN_PARTS = Memory(activations=0.4)

LEVER = Lever(
    name="head",
    summary="How logits and cross-entropy are computed.",
    baseline="logits",
    source="https://github.com/apple/ml-cross-entropy",
    order=70,
    stage="model",
    tasks=("causal-lm",),
    simulated=(),
    changes_evaluation=True,
    families=(("chunked", "cut-cross-entropy", "liger"),),
    choices=(
        Choice("logits", "all logits at once, then cross-entropy in fp32"),
        Choice(
            "chunked",
            "labelled positions only, a chunk at a time, each chunk's logits computed again in the backward pass",
            function="chunked_cross_entropy",
            memory=IN_PARTS,
            not_expressible="Trainer computes all logits at once; train.py computes them in chunks",
            effect=Effect(1.0, 0.08, limited=0.9),
        ),
        Choice(
            "cut-cross-entropy",
            "Apple's kernel, which never writes logits to memory (Wijmans et al. 2024)",
            needs=(cuda(), capability(8), package("cut_cross_entropy", "its kernel")),
            changes_numerics=True,
            function="cut_cross_entropy",
            memory=IN_PARTS,
            not_expressible="no argument of Trainer; train.py calls the kernel",
            effect=Effect(0.96, 0.08, limited=0.85),
        ),
        Choice(
            "liger",
            "Liger's fused linear cross-entropy (Hsu et al. 2024)",
            needs=(cuda(), package("liger_kernel", "its kernels")),
            changes_numerics=True,
            function="liger_cross_entropy",
            memory=IN_PARTS,
            training_arguments=switched_on("fused_linear_cross_entropy"),
            effect=Effect(0.97, 0.08, limited=0.85),
        ),
    ),
    exclusions=(
        Exclusion(
            {"precision": FULL_PRECISION, "head": ("cut-cross-entropy",)},
            "the kernel's backward pass takes 16-bit hidden states only",
            "https://github.com/apple/ml-cross-entropy/blob/main/cut_cross_entropy/cce_backward.py",
        ),
    ),
)
