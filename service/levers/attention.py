"""The attention kernel."""

from service.levers.base import Choice, Lever

LEVER = Lever(
    name="attention",
    summary="How softmax(QK)V is computed.",
    baseline="sdpa",
    source="https://huggingface.co/docs/transformers/attention_interface",
    choices=(
        Choice("eager", "plain matmuls with a dense mask", from_pretrained={"attn_implementation": "eager"}),
        Choice(
            "sdpa",
            "torch's scaled_dot_product_attention, its backend chosen by torch",
            from_pretrained={"attn_implementation": "sdpa"},
        ),
    ),
)
