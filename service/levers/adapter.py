"""The adapter's form. The options are data: arguments of peft's LoraConfig and get_peft_model."""

from service.levers.base import Choice, Effect, Exclusion, Lever
from service.levers.compile import WHOLE

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
    "out_lin",
    "c_attn",
    "Wqkv",
    "query_key_value",
    "out_proj",
)

LEVER = Lever(
    name="adapter",
    summary="Where adapters sit, how they are scaled, and in which precision they are kept.",
    baseline="as-asked",
    source="https://huggingface.co/docs/peft/developer_guides/lora",
    order=160,
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
            effect=Effect(0.96, 0.04),
        ),
        Choice(
            "attention-only",
            "adapters on the attention's projections only: fewer parameters and matmuls",
            changes_learning=True,
            options={"attention_only": True},
            effect=Effect(0.88, 0.08),
        ),
        Choice(
            "rslora",
            "scaled by alpha over the square root of r (Kalajdzievski 2023)",
            changes_learning=True,
            options={"use_rslora": True},
            effect=Effect(1.0, 0.01),
        ),
        Choice(
            "dora",
            "magnitude and direction apart (Liu et al. 2024): slower, learns more like full finetuning",
            changes_learning=True,
            searched=False,
            options={"use_dora": True},
        ),
    ),
    exclusions=(
        Exclusion(
            {"adapter": ("base-dtype",), "precision": ("fp16-mixed",)},
            "a gradient scaler cannot unscale the gradients of 16-bit weights",
            "https://docs.pytorch.org/docs/stable/amp.html",
        ),
        Exclusion(
            {"adapter": ("base-dtype",), "method": ("qlora",)},
            "a quantised base has no format that adapters could share",
            "https://huggingface.co/docs/peft/developer_guides/lora",
        ),
        Exclusion(
            {"adapter": ("dora",), "compile": ("per-layer", "per-layer-max-autotune", *WHOLE)},
            "DoRA breaks the graph in every layer",
            "https://huggingface.co/docs/peft/developer_guides/lora",
        ),
        Exclusion(
            {"adapter": ("dora",), "quantization": ("int8", "torchao-int8", "torchao-float8"), "method": ("qlora",)},
            "peft has DoRA for 4-bit bases",
            "https://huggingface.co/docs/peft/developer_guides/lora",
        ),
    ),
)
