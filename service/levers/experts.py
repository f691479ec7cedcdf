"""The implementation of mixture-of-experts layers."""

from service.levers.base import Choice, Effect, Lever


def computed(name: str, summary: str, implementation: str) -> Choice:
    """The choice of one of transformers' implementations, by its name there."""
    return Choice(
        name,
        summary,
        function="set_experts",
        options={"implementation": implementation},
        effect=Effect(1.0, 0.1),
        from_pretrained={"experts_implementation": implementation},
    )


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
        computed("eager", "one expert after another", "eager"),
        computed("batched", "all experts' matmuls as one batched matmul, weights gathered a token", "batched_mm"),
        computed("grouped", "tokens sorted by expert, one grouped matmul", "grouped_mm"),
    ),
)
