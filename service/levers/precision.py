"""Precision of the arithmetic, and with it of the weights that are frozen."""

from service.levers.base import Choice, Lever, capability, cuda, native_bf16

LEVER = Lever(
    name="precision",
    summary="Number format of matmuls and activations; master weights stay as the user's method wants them.",
    baseline="checkpoint",
    source="https://docs.pytorch.org/docs/stable/amp.html",
    choices=(
        Choice(
            "checkpoint",
            "the checkpoint's own dtype, no autocast (what Trainer does unasked; fp32 for random weights)",
            searched=False,
            from_pretrained={"dtype": "auto"},
        ),
        Choice("fp32", "fp32 throughout", from_pretrained={"dtype": "float32"}),
        Choice(
            "tf32",
            "fp32 storage, matmuls on TF32 tensor cores",
            needs=(cuda(), capability(8)),
            changes_numerics=True,
            training_arguments={"tf32": True},
            from_pretrained={"dtype": "float32"},
        ),
        Choice(
            "bf16-mixed",
            "bf16 autocast over fp32 master weights; frozen weights under an adapter are kept in bf16",
            needs=(native_bf16(),),
            changes_numerics=True,
            training_arguments={"bf16": True},
            from_pretrained={"dtype": "float32"},
            adapter_from_pretrained={"dtype": "bfloat16"},
        ),
        Choice(
            "fp16-mixed",
            "fp16 autocast with a gradient scaler over fp32 master weights",
            needs=(cuda(),),
            changes_numerics=True,
            training_arguments={"fp16": True},
            from_pretrained={"dtype": "float32"},
            adapter_from_pretrained={"dtype": "float16"},
        ),
    ),
)
