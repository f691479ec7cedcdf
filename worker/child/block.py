"""The child's side of a verification block: a finalist trains the work unit under another seed, alone or in turns."""

from __future__ import annotations

import math
from collections.abc import Callable

from service.contract.child import ChildMessage, RunBlock, Turn
from service.contract.measurement import Block, Outcome
from worker.child import probe, steps
from worker.child.arrange import padded_tokens, plan_of
from worker.child.build import build
from worker.child.data import work_unit
from worker.child.measure import unit_size
from worker.child.timing import Unit, time_unit
from worker.child.turns import Turns
from worker.devices import Device


def run_block(
    request: RunBlock, device: Device, tell: Callable[[ChildMessage], None], hear: Callable[[], Turn]
) -> Block:
    """Train the work unit under the block's seed, and return its timing. Errors pass through."""
    spec, candidate = request.spec, request.candidate
    assert candidate.micro_batch_size is not None
    bundle = build(spec, candidate.configuration, device, request.workplace, request.seed)
    if bundle.compiled:
        bundle.compile()
    samples = work_unit(bundle.data.lengths, unit_size(spec, bundle.data.facts), request.seed)
    micro = candidate.micro_batch_size
    unit = Unit(bundle, micro, plan_of(bundle, samples, micro))
    if device.first_call_per_shape or bundle.compiled:
        unit.run()  # each shape's first call selects or compiles kernels, which a real run pays for once
        unit.forget_timings()
    else:
        touch(unit)
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


def touch(unit: Unit) -> None:
    """Take a step of the largest micro batch at learning rate 0: no timing then holds the first use of memory."""
    lengths = unit.bundle.data.lengths
    micro_batches = [micro for step in unit.plan for micro in step]
    largest = max(micro_batches, key=lambda one: math.prod(padded_tokens(one, lengths)))
    batches, terms, _ = steps.prepare(unit.bundle, [largest])
    with probe.without_learning(unit.bundle):
        steps.optimizer_step(unit.bundle, batches, terms)
    steps.forget(unit.bundle)
