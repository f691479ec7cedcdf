"""Precision of the arithmetic, and with it of the weights that are frozen.

The options are data: `weights`, `adapter_weights` (of a frozen base), `autocast`, `scaler`, `matmul`, `cache`.
"""

from service.levers.base import (
    Asked,
    Choice,
    Effect,
    Exclusion,
    Lever,
    Memory,
    capability,
    cuda,
    host,
    native_bf16,
    no_native_bf16,
)

# Matmuls of full precision, master weights and autocast over them, by the names of choices: for exclusions.
FULL_PRECISION = ("fp32", "tf32", "fp32-medium", "fp64")
AUTOCAST = ("bf16-mixed", "bf16-mixed-uncached", "fp16-mixed")
BF16 = {"weights": "float32", "adapter_weights": "bfloat16", "autocast": "bfloat16"}

HALF = Memory(activations=0.5)  # two bytes for four
HALF_MIXED = Memory(activations=0.6)  # what autocast leaves in fp32 stays

LEVER = Lever(
    name="precision",
    summary="Number format of matmuls and activations; master weights stay as the user's method wants them.",
    baseline="checkpoint",
    source="https://docs.pytorch.org/docs/stable/amp.html",
    order=10,
    reference="fp32",
    families=(AUTOCAST, ("bf16", "fp16"), ("tf32", "fp32-medium")),
    choices=(
        Choice(
            "checkpoint",
            "the checkpoint's own dtype, no autocast (what Trainer does unasked; fp32 for random weights)",
            searched=False,
            searched_of_half=True,  # where the weights have 32 bits, it is fp32 by another name
            options={"weights": "auto"},
            memory=Memory(half=0.5),  # then it is a 16-bit format
            from_pretrained={"dtype": "auto"},
        ),
        Choice(
            "fp32",
            "fp32 throughout",
            options={"weights": "float32"},
            estimate_rank=40,
            from_pretrained={"dtype": "float32"},
            effect=Effect(half=1.8, spread=0.1),
        ),
        Choice(
            "tf32",
            "fp32 storage, matmuls on TF32 tensor cores",
            needs=(cuda(), capability(8)),
            changes_numerics=True,
            options={"weights": "float32", "matmul": "high"},
            estimate_rank=30,
            asked_by=(Asked({"tf32": True}),),
            training_arguments={"tf32": True},
            from_pretrained={"dtype": "float32"},
            effect=Effect(0.55, 0.25, half=1.6),
        ),
        Choice(
            "fp32-medium",
            "fp32 storage, matmuls in bf16 pieces where the hardware has them (float32 matmul precision `medium`)",
            needs=(native_bf16(), host("it is the same as tf32 there")),
            changes_numerics=True,
            options={"weights": "float32", "matmul": "medium"},
            from_pretrained={"dtype": "float32"},
            not_expressible="Trainer has no argument for it; call torch.set_float32_matmul_precision('medium')",
            effect=Effect(0.55, 0.3, host=0.8, half=1.6),
        ),
        Choice(
            "bf16-mixed",
            "bf16 autocast over fp32 master weights; frozen weights under an adapter are kept in bf16",
            needs=(native_bf16(),),
            changes_numerics=True,
            options=BF16,
            memory=HALF_MIXED,
            estimate_rank=10,
            asked_by=(Asked({"bf16": True}),),
            training_arguments={"bf16": True},
            from_pretrained={"dtype": "float32"},
            adapter_from_pretrained={"dtype": "bfloat16"},
            effect=Effect(0.4, 0.3, host=0.7, half=1.0),
        ),
        Choice(
            "bf16-mixed-uncached",
            "bf16-mixed that casts weights anew at every use: slower, without the memory of the cast copies",
            needs=(native_bf16(),),
            changes_numerics=True,
            options={**BF16, "cache": False},
            memory=HALF_MIXED,
            training_arguments={"bf16": True},
            from_pretrained={"dtype": "float32"},
            adapter_from_pretrained={"dtype": "bfloat16"},
            not_expressible="Trainer keeps autocast's cache; train.py sets cache_enabled=False",
            effect=Effect(0.42, 0.3, host=0.75, half=1.03),
        ),
        Choice(
            "fp16-mixed",
            "fp16 autocast with a gradient scaler over fp32 master weights",
            needs=(cuda(), no_native_bf16()),
            changes_numerics=True,
            options={"weights": "float32", "adapter_weights": "float16", "autocast": "float16", "scaler": True},
            memory=HALF_MIXED,
            estimate_rank=20,
            asked_by=(Asked({"fp16": True}),),
            training_arguments={"fp16": True},
            from_pretrained={"dtype": "float32"},
            adapter_from_pretrained={"dtype": "float16"},
            effect=Effect(0.42, 0.3, half=1.02),
        ),
        Choice(
            "bf16",
            "bf16 weights and arithmetic, no fp32 master weights: small updates are lost",
            needs=(native_bf16(),),
            changes_numerics=True,
            changes_learning=True,
            options={"weights": "bfloat16"},
            memory=HALF,
            from_pretrained={"dtype": "bfloat16"},
            effect=Effect(0.36, 0.3, host=0.65, half=0.95),
        ),
        Choice(
            "fp16",
            "fp16 weights and arithmetic, no scaler: gradients may underflow",
            needs=(cuda(), no_native_bf16()),
            changes_numerics=True,
            changes_learning=True,
            options={"weights": "float16"},
            memory=HALF,
            from_pretrained={"dtype": "float16"},
            effect=Effect(0.36, 0.3, half=0.97),
        ),
        Choice(
            "fp64",
            "fp64 throughout: a reference, never fast",
            searched=False,
            options={"weights": "float64"},
            memory=Memory(activations=2.0),
            from_pretrained={"dtype": "float64"},
        ),
    ),
    exclusions=(
        Exclusion(
            {"precision": ("bf16", "fp16", "fp64"), "method": ("qlora",)},
            "the base is quantised; its compute precision is bf16-mixed's or fp16-mixed's",
            "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
        ),
    ),
)
