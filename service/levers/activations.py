"""How many activations compiled code keeps for the backward pass instead of computing them again."""

from service.levers.base import Choice, Effect, Exclusion, Lever
from service.levers.compile import WITHOUT_CODE

BUDGET = "Trainer has no argument for it; train.py sets torch._functorch.config.activation_memory_budget"

LEVER = Lever(
    name="activations",
    summary="The share of activations that compiled code may keep; the rest it computes again, the cheapest first.",
    baseline="all",
    source="https://pytorch.org/blog/activation-checkpointing-techniques/",
    order=120,
    stage="load",
    simulated=(),
    families=(("half", "fifth"),),
    choices=(
        Choice("all", "as the compiler decides by itself"),
        Choice(
            "half",
            "half of them",
            changes_numerics=True,
            function="activation_budget",
            options={"share": 0.5},
            not_expressible=BUDGET,
            effect=Effect(1.05, 0.06, limited=0.97),
        ),
        Choice(
            "fifth",
            "a fifth of them",
            changes_numerics=True,
            function="activation_budget",
            options={"share": 0.2},
            not_expressible=BUDGET,
            effect=Effect(1.12, 0.08, limited=0.98),
        ),
    ),
    exclusions=(
        Exclusion(
            {"activations": ("half", "fifth"), "compile": WITHOUT_CODE},
            "the budget is the compiler's, and nothing is generated there",
            "https://pytorch.org/blog/activation-checkpointing-techniques/",
        ),
    ),
)
