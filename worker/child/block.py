"""The child's side of a verification block: a finalist trains the work unit under another seed, alone or in turns."""

from __future__ import annotations

from collections.abc import Callable

from service.contract.child import Paused, RunBlock, Turn
from service.contract.measurement import Block, Outcome
from worker.child.arrange import plan_of
from worker.child.build import Bundle
from worker.child.measure import unit_of
from worker.child.timing import Unit, time_unit
from worker.child.turns import Turns
from worker.child.warmup import warm


def run_block(request: RunBlock, bundle: Bundle, tell: Callable[[Paused], None], hear: Callable[[], Turn]) -> Block:
    """Train the work unit from the block's first weights on, and return its timing. Errors pass through."""
    spec, candidate = request.spec, request.candidate
    assert candidate.micro_batch_size is not None
    samples = unit_of(spec, bundle.data, request.seed)
    micro = candidate.micro_batch_size
    unit = Unit(bundle, micro, plan_of(bundle, samples, micro))
    warm(unit)  # what each shape's first call takes, a real run pays once
    if request.in_turns:
        unit.turns = Turns(unit.plan, bundle.data.lengths, tell, hear)
        while not unit.turns.are_over:
            unit.run()
    else:
        time_unit(unit, passes=1, extra=1)
    return Block(
        key=candidate.configuration.key,
        block=request.block,
        seed=request.seed,
        outcome=Outcome.ok,
        timing=unit.timing(),
        slices=unit.slices() if request.in_turns else (),
    )
