"""How the projections that carry an adapter are computed."""

from service.levers.base import Choice, Effect, Exclusion, Lever
from service.levers.compile import GENERATED, WHOLE
from service.levers.precision import FULL_PRECISION

LATER = "Trainer computes peft's layers as they are; train.py changes them"

LEVER = Lever(
    name="projections",
    summary="How the linear layers that carry an adapter are computed.",
    baseline="peft",
    source="https://arxiv.org/abs/2106.09685",
    order=165,
    stage="model",
    methods=("lora", "qlora"),
    simulated=("peft", "without-cast"),
    choices=(
        Choice("peft", "each by itself, its input cast to the adapter's format, which autocast casts back"),
        Choice(
            "without-cast",
            "the same without that cast under autocast: two copies of every input less, and the same numbers",
            function="without_cast",
            not_expressible=LATER,
            effect=Effect(0.95, 0.04),
        ),
        Choice(
            "fused",
            "those that share their input in one function: the small products of all in one, results added in place, "
            "a quantised weight dequantised once",
            changes_numerics=True,
            function="fused_projections",
            not_expressible=LATER,
            effect=Effect(0.9, 0.07),
        ),
    ),
    exclusions=(
        Exclusion(
            {"precision": ("checkpoint", *FULL_PRECISION, "bf16", "fp16"), "projections": ("without-cast",)},
            "without autocast nothing casts the input back, so the cast is needed",
            "https://docs.pytorch.org/docs/stable/amp.html",
        ),
        Exclusion(
            {"adapter": ("base-dtype",), "projections": ("without-cast",)},
            "an adapter in the base's format casts nothing",
            "https://huggingface.co/docs/peft/main/en/package_reference/peft_model",
        ),
        Exclusion(
            {"compile": (*GENERATED, *WHOLE, "per-layer-aot-eager"), "projections": ("fused",)},
            "what it keeps from one projection for the next breaks the graph",
            "https://docs.pytorch.org/docs/stable/torch.compiler_faq.html",
        ),
        Exclusion(
            {"checkpointing": ("selective",), "projections": ("fused",)},
            "it adds to results of matmuls in place, which selective checkpointing keeps",
            "https://docs.pytorch.org/docs/stable/checkpoint.html",
        ),
        Exclusion(
            {"adapter": ("dora",), "projections": ("fused",)},
            "DoRA scales what base and adapter give together",
            "https://huggingface.co/docs/peft/developer_guides/lora",
        ),
        Exclusion(
            {
                "method": ("qlora",),
                "quantization": ("int8", "torchao-int8", "torchao-float8"),
                "projections": ("fused",),
            },
            "it dequantises 4-bit weights only",
            "https://huggingface.co/docs/bitsandbytes/main/en/reference/functional",
        ),
    ),
)
