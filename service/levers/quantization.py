"""The number format of the frozen base model under QLoRA. The worker keeps quantised weights for later trials."""

from service.levers.base import Choice, Effect, Lever, Memory, package

TORCHAO = package("torchao", "weight-only formats")
# Autograd sees the operation that dequantises a weight, and keeps each result for the backward pass.
TORCHAO_MEMORY = Memory(weight=1.0, keeps_dequantised=True)
OBJECT = "torchao's formats are objects, which JSON cannot hold; train.py makes them"

LEVER = Lever(
    name="quantization",
    summary="How the frozen base is stored under QLoRA (Dettmers et al. 2023).",
    baseline="nf4-double",
    source="https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    order=150,
    methods=("qlora",),
    stage="quantised",
    families=(("nf4-double", "nf4"), ("torchao-int8", "torchao-float8")),
    choices=(
        Choice(
            "nf4-double",
            "4-bit NormalFloat, its scales quantised again: 4.13 bits a weight",
            function="quantised_by_bitsandbytes",
            options={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            memory=Memory(weight=0.5 + 1 / 64 + 4 / (64 * 256)),  # 4 bits and a scale per 64, quantised again
        ),
        Choice(
            "nf4",
            "4-bit NormalFloat with plain scales: 4.5 bits a weight, one look-up less",
            function="quantised_by_bitsandbytes",
            options={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
            memory=Memory(weight=0.5 + 4 / 64),  # 4 bits and a scale of 4 bytes per 64
            effect=Effect(0.98, 0.03),
        ),
        Choice(
            "int8",
            "8-bit integers with outliers kept in 16 bits (LLM.int8)",
            changes_numerics=True,
            changes_learning=True,
            function="quantised_by_bitsandbytes",
            options={"load_in_8bit": True},
            memory=Memory(weight=1.0),
            effect=Effect(1.3, 0.2),
        ),
        Choice(
            "torchao-int8",
            "8-bit integers, a scale a row, dequantised as they are used (torchao, weight-only)",
            needs=(TORCHAO,),
            changes_numerics=True,
            changes_learning=True,
            function="quantised_by_torchao",
            options={"name": "Int8WeightOnlyConfig"},
            memory=TORCHAO_MEMORY,
            not_expressible=OBJECT,
            effect=Effect(0.95, 0.15),
        ),
        Choice(
            "torchao-float8",
            "8-bit floats (e4m3), a scale a row, dequantised as they are used (torchao, weight-only)",
            needs=(TORCHAO,),
            changes_numerics=True,
            changes_learning=True,
            function="quantised_by_torchao",
            options={"name": "Float8WeightOnlyConfig"},
            memory=TORCHAO_MEMORY,
            not_expressible=OBJECT,
            effect=Effect(0.95, 0.15),
        ),
    ),
)
