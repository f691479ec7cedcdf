"""The attention kernel, by transformers' `attn_implementation`; a function sets sdpa's backend."""

from service.levers.base import (
    Asked,
    Choice,
    Effect,
    Exclusion,
    Lever,
    Memory,
    capability,
    cuda,
    hopper,
    host,
    package,
    varlen_kernel,
)
from service.levers.precision import FULL_PRECISION

# Kernels by the names of choices, for exclusions: those of sdpa, flash-attention's, and all that take a mask.
SDPA = ("sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math")
FLASH = ("flash-attention-2", "flash-attention-3")
MASKED = ("eager", *SDPA, "flex")
# transformers' names of the kernels that are told where the samples of packed rows end, the first also of padded rows.
TOLD_ALWAYS = "varlen"
TOLD = (TOLD_ALWAYS, "flash_attention_2", "flash_attention_3")
SUPPORTS_SDPA = ("_supports_sdpa",)  # attributes of a model's class that are true if it can use sdpa

LEVER = Lever(
    name="attention",
    summary="How softmax(QK)V is computed.",
    baseline="sdpa",
    source="https://huggingface.co/docs/transformers/attention_interface",
    order=30,
    stage="load",
    simulated=("eager", "sdpa"),
    families=(("sdpa", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn"), (TOLD_ALWAYS, *FLASH)),
    choices=(
        Choice(
            "eager",
            "plain matmuls with a dense mask",
            needs=(host("its kernels read and write the whole attention matrix, so that it is slower there"),),
            memory=Memory(activations=1.3),
            asked_by=(Asked({"attn_implementation": "eager"}),),
            from_pretrained={"attn_implementation": "eager"},
            effect=Effect(1.3, 0.15, host=1.0),
        ),
        Choice(
            "sdpa",
            "torch's scaled_dot_product_attention, its backend chosen by torch",
            asked_by=(Asked({"attn_implementation": "sdpa"}),),
            from_pretrained={"attn_implementation": "sdpa"},
            supported_by=SUPPORTS_SDPA,
        ),
        Choice(
            "sdpa-flash",
            "sdpa, the flash kernel or, where a mask rules it out, plain matmuls",
            needs=(cuda(), capability(8)),
            function="sdpa_backends",
            options={"flash": True},
            from_pretrained={"attn_implementation": "sdpa"},
            supported_by=SUPPORTS_SDPA,
            not_expressible="no argument of Trainer; train.py switches sdpa's other backends off",
            effect=Effect(1.0, 0.08),
        ),
        Choice(
            "sdpa-efficient",
            "sdpa, the memory-efficient kernel, which takes masks",
            needs=(cuda(),),
            function="sdpa_backends",
            options={"mem_efficient": True},
            from_pretrained={"attn_implementation": "sdpa"},
            supported_by=SUPPORTS_SDPA,
            not_expressible="no argument of Trainer; train.py switches sdpa's other backends off",
            effect=Effect(1.0, 0.08),
        ),
        Choice(
            "sdpa-cudnn",
            "sdpa, cuDNN's kernel",
            needs=(cuda(), capability(8)),
            function="sdpa_backends",
            options={"cudnn": True},
            from_pretrained={"attn_implementation": "sdpa"},
            supported_by=SUPPORTS_SDPA,
            not_expressible="no argument of Trainer; train.py switches sdpa's other backends off",
            effect=Effect(0.98, 0.1),
        ),
        Choice(
            "sdpa-math",
            "sdpa in plain matmuls: a reference",
            searched=False,
            function="sdpa_backends",
            from_pretrained={"attn_implementation": "sdpa"},
            supported_by=SUPPORTS_SDPA,
            not_expressible="no argument of Trainer; train.py switches sdpa's other backends off",
        ),
        Choice(
            "flex",
            "torch's flex_attention, compiled for the mask at hand",
            needs=(cuda(),),
            changes_numerics=True,
            drops_attention=False,
            from_pretrained={"attn_implementation": "flex_attention"},
            supported_by=("_supports_flex_attn",),
            effect=Effect(1.0, 0.15, once=20.0),
        ),
        Choice(
            "varlen",
            "torch's own variable-length kernel: no mask, so samples side by side cost their own squares only",
            needs=(varlen_kernel(),),
            changes_numerics=True,
            drops_attention=False,
            function="register_varlen",
            from_pretrained={"attn_implementation": "varlen"},
            # Like sdpa, it has neither softcapping nor sinks, for want of which some models refuse sdpa.
            supported_by=(*SUPPORTS_SDPA, "_supports_attention_backend"),
            not_expressible="an attention of our own, registered with transformers; train.py brings it",
            effect=Effect(0.93, 0.15),
        ),
        Choice(
            "flash-attention-2",
            "Dao's FlashAttention 2, from the hub where flash_attn is not installed; packed rows without a mask",
            needs=(cuda(), capability(8), package("flash_attn", "its kernels", instead="kernels")),
            from_pretrained={"attn_implementation": "flash_attention_2"},
            supported_by=("_supports_flash_attn",),
            effect=Effect(0.92, 0.12),
        ),
        Choice(
            "flash-attention-3",
            "FlashAttention 3, for Hopper, from the hub where flash_attn_interface is not installed",
            needs=(cuda(), hopper(), package("flash_attn_interface", "its kernels", instead="kernels")),
            drops_attention=False,
            from_pretrained={"attn_implementation": "flash_attention_3"},
            supported_by=("_supports_flash_attn",),
            effect=Effect(0.88, 0.15),
        ),
    ),
    exclusions=(
        Exclusion(
            {"attention": FLASH, "precision": FULL_PRECISION},
            "flash kernels compute in 16 bits only",
            "https://github.com/Dao-AILab/flash-attention",
        ),
        Exclusion(
            {"attention": ("sdpa-flash", "sdpa-cudnn"), "precision": FULL_PRECISION},
            "torch's flash kernel and cuDNN's compute in 16 bits only",
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html",
        ),
    ),
)
