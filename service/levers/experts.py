"""Mixture-of-experts layers."""

from service.levers.base import Choice, Lever

LEVER = Lever(
    name="experts",
    summary="How the experts of a mixture-of-experts model are computed; other models have nothing to choose.",
    baseline="as-is",
    source="https://huggingface.co/docs/transformers/experts_interface",
    order=50,
    stage="base",
    simulated=(),
    choices=(
        Choice("as-is", "transformers' own choice for the model"),
        Choice(
            "eager",
            "one expert after another",
            function="set_experts",
            options={"implementation": "eager"},
            from_pretrained={"experts_implementation": "eager"},
        ),
        Choice(
            "batched",
            "all experts' matmuls as one batched matmul, weights gathered a token",
            function="set_experts",
            options={"implementation": "batched_mm"},
            from_pretrained={"experts_implementation": "batched_mm"},
        ),
        Choice(
            "grouped",
            "tokens sorted by expert, one grouped matmul",
            function="set_experts",
            options={"implementation": "grouped_mm"},
            from_pretrained={"experts_implementation": "grouped_mm"},
        ),
    ),
)
