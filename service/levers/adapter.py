"""The adapter's form. The options are data: arguments of peft's LoraConfig and get_peft_model."""

from service.levers.base import Choice, Lever

# The attention's projections in the families' names; peft takes those that the model has.
ATTENTION: tuple[str, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "query",
    "key",
    "value",
    "q_lin",
    "k_lin",
    "v_lin",
)
ATTENTION += ("out_lin", "c_attn", "Wqkv", "query_key_value", "out_proj")

LEVER = Lever(
    name="adapter",
    summary="Where adapters sit, how they are scaled, and in which precision they are kept.",
    baseline="as-asked",
    source="https://huggingface.co/docs/peft/developer_guides/lora",
    methods=("lora", "qlora"),
    choices=(
        Choice("as-asked", "the job's target modules; A and B in fp32 over a 16-bit base"),
        Choice(
            "base-dtype",
            "A and B in the base's format: no casts between, small updates are lost in 16 bits",
            changes_numerics=True,
            changes_learning=True,
            options={"autocast_adapter_dtype": False},
            not_expressible="an argument of get_peft_model: autocast_adapter_dtype=False; train.py passes it",
        ),
        Choice(
            "attention-only",
            "adapters on the attention's projections only: fewer parameters and matmuls",
            changes_learning=True,
            options={"attention_only": True},
        ),
        Choice(
            "rslora",
            "scaled by alpha over the square root of r (Kalajdzievski 2023)",
            changes_learning=True,
            options={"use_rslora": True},
        ),
        Choice(
            "dora",
            "magnitude and direction apart (Liu et al. 2024): slower, learns more like full finetuning",
            changes_learning=True,
            searched=False,
            options={"use_dora": True},
        ),
    ),
)
