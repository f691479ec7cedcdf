"""Whether the allocator gives GPU memory that it holds but does not use back to the driver."""

from service.levers.base import Choice, Effect, Lever, cuda

LEVER = Lever(
    name="cache",
    summary="Whether the allocator's unused memory is given back to the driver. The options are data: steps between.",
    baseline="kept",
    source="https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html",
    order=190,
    choices=(
        Choice("kept", "never given back"),
        Choice(
            "emptied",
            "after every optimizer step: less fragmentation, every step asks the driver again",
            needs=(cuda(),),
            options={"interval": 1},
            training_arguments={"torch_empty_cache_steps": 1},
            effect=Effect(1.04, 0.04, limited=1.02),
        ),
    ),
)
