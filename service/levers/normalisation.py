"""The precision and the kernels of LayerNorm and RMSNorm."""

from service.levers.base import Choice, Effect, Exclusion, Lever, cuda, package
from service.levers.precision import FULL_PRECISION

LEVER = Lever(
    name="normalisation",
    summary="Precision and kernels of LayerNorm and RMSNorm.",
    baseline="as-is",
    source="https://docs.mosaicml.com/projects/composer/en/latest/method_cards/low_precision_layernorm.html",
    order=60,
    stage="base",
    simulated=(),
    choices=(
        Choice("as-is", "as the model has them: in fp32 under autocast"),
        Choice(
            "low-precision",
            "in autocast's 16-bit format (Composer's low-precision LayerNorm)",
            changes_numerics=True,
            function="low_precision_norms",
            not_expressible="Trainer leaves norms as they are; train.py runs them in autocast's format",
            effect=Effect(0.98, 0.04),
        ),
        Choice(
            "apex-fused",
            "Apex's FusedLayerNorm kernels",
            needs=(cuda(), package("apex", "its fused norms")),
            changes_numerics=True,
            function="apex_norms",
            not_expressible="Trainer leaves norms as they are; train.py puts Apex's kernels in",
            effect=Effect(0.97, 0.05),
        ),
    ),
    exclusions=(
        Exclusion(
            {"normalisation": ("low-precision",), "precision": ("checkpoint", *FULL_PRECISION, "bf16", "fp16")},
            "there is no autocast, whose format the norms would take",
            "https://docs.mosaicml.com/projects/composer/en/latest/method_cards/low_precision_layernorm.html",
        ),
        Exclusion(
            {"kernels": ("liger", "liger-rope", "liger-rms-norm"), "normalisation": ("low-precision", "apex-fused")},
            "both replace the norms",
            "https://github.com/linkedin/Liger-Kernel",
        ),
    ),
)
