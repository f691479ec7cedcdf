"""How torch's caching allocator takes GPU memory from the driver."""

from service.levers.base import Choice, Effect, Lever, cuda

LEVER = Lever(
    name="allocator",
    summary="How torch's caching allocator takes memory from the driver.",
    baseline="default",
    source="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
    order=180,
    stage="load",
    simulated=(),
    choices=(
        Choice("default", "segments of fixed size"),
        Choice(
            "expandable",
            "segments that grow (expandable_segments): less fragmentation where lengths vary",
            needs=(cuda(),),
            function="expandable_segments",
            not_expressible="set PYTORCH_ALLOC_CONF=expandable_segments:True; train.py sets it itself",
            effect=Effect(1.0, 0.03, limited=0.98),
        ),
    ),
)
