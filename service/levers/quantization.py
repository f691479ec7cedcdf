"""The frozen base's number format under QLoRA. The options are data: arguments of transformers' configurations."""

from service.levers.base import Choice, Lever

LEVER = Lever(
    name="quantization",
    summary="How the frozen base is stored under QLoRA (Dettmers et al. 2023).",
    baseline="nf4-double",
    source="https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    methods=("qlora",),
    choices=(
        Choice(
            "nf4-double",
            "4-bit NormalFloat, its scales quantised again: 4.13 bits a weight",
            options={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        ),
        Choice(
            "nf4",
            "4-bit NormalFloat with plain scales: 4.5 bits a weight, one look-up less",
            options={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
        ),
        Choice(
            "int8",
            "8-bit integers with outliers kept in 16 bits (LLM.int8)",
            changes_numerics=True,
            changes_learning=True,
            options={"load_in_8bit": True},
        ),
    ),
)
