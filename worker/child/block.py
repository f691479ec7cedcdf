"""The child's side of a verification block: one candidate on the work unit under another seed."""

from __future__ import annotations

from service.contract.child import Workplace
from service.contract.job import JobSpec
from service.contract.measurement import Block, Measurement, Outcome
from worker.child import loop, probe
from worker.child.build import Bundle, build
from worker.child.curve import plan_of
from worker.child.data import work_unit
from worker.child.measure import unit_size
from worker.child.timing import Unit, time_unit
from worker.devices import Device


def run_block(
    spec: JobSpec, candidate: Measurement, block: int, seed: int, device: Device, workplace: Workplace
) -> Block:
    """Train the unit once under another seed; losses and timing. Unstable passes through."""
    bundle, micro = ready(spec, candidate, seed, device, workplace)
    samples = work_unit(bundle.data.lengths, unit_size(spec, bundle.data.facts), seed)
    unit = Unit(bundle, micro, plan_of(bundle, samples, micro))
    with loop.without_dropout(bundle.model) as dropout:
        pass  # only asked: what is timed has it, as the user's run will
    time_unit(unit, passes=1, extra=1)
    steps = len(unit.plan)
    return Block(
        key=candidate.configuration.key,
        block=block,
        seed=seed,
        outcome=Outcome.ok,
        dropout=dropout,
        timing=unit.timing(),
        losses=tuple(unit.losses[:steps]),
        grad_norms=tuple(unit.grad_norms[:steps]),
    )


def ready(spec: JobSpec, candidate: Measurement, seed: int, device: Device, workplace: Workplace) -> tuple[Bundle, int]:
    """The candidate built under a seed, compiled if it is."""
    assert candidate.micro_batch_size is not None
    bundle = build(spec, candidate.configuration, device, workplace, seed)
    if bundle.compiled():
        bundle.compile()
    # Neither compiling nor cold caches nor making the optimizer's state is timed: all sizes of batch run first.
    probe.fits(bundle, candidate.micro_batch_size)
    if bundle.compiled() or bundle.device.torch.type == "cuda":
        probe.fits(bundle, 1)
    loop.forget(bundle)
    return bundle, candidate.micro_batch_size
