"""One trial, inside its child: build, check against the reference, probe, time, and say what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.contract.job import JobSpec
from service.contract.measurement import DatasetFacts, Measurement, Outcome, Probe, Timing
from service.contract.task import TrialRequest
from service.levers import LEVERS
from worker.devices import Device
from worker.trial import arrange, loop, probe, sizes
from worker.trial.build import Bundle, Limits, build, parameter_counts
from worker.trial.data import work_unit
from worker.trial.problem import Unstable
from worker.trial.timing import Unit, time_unit

CHECK_SAMPLES = 8
MOST_SAMPLES = 1024
CLEARLY_SLOWER = 1.25
WORTH_TRYING = 0.98
MOST_SIZES = 3
# Relative differences of step 0 (loss, gradient norm) that rounding explains; mixed samples and wrong kernels
# are far outside.
EXACT = (1e-4, 1e-3)
ROUNDED = (2e-3, 2e-2)

Send = Callable[[dict[str, Any]], None]


@dataclass
class Spent:
    """Where a trial's time went, in seconds by phase."""

    phases: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> None:
        """What has passed since the last call went to `name`."""
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._since
        self._since = now


def unit_size(spec: JobSpec, facts: DatasetFacts) -> int:
    """Samples of the job's work unit: whole optimizer steps, and enough tokens that chance does not decide.

    Which samples share a micro batch is chance, and padding follows it: with few batches of short samples, one seed
    made the baseline half as fast again as another.
    """
    effective = spec.training.effective_batch_size or 64
    steps, tokens = (2, 12_000) if spec.search.verify == "quick" else (4, 48_000)
    enough = min(MOST_SAMPLES, tokens * facts.rows // facts.tokens)
    return effective * max(steps, -(-64 // effective), enough // effective)


def run_trial(
    spec: JobSpec, request: TrialRequest, device: Device, limits: Limits, send: Send, failed_at: int | None
) -> Measurement:
    """Measure one configuration. Errors pass through; out of memory is told by `probe_started` before it."""
    spent, started = Spent(), time.perf_counter()
    send({"kind": "progress", "text": "loading"})
    used_before = device.used_by_others()
    bundle = build(spec, request.configuration, device, limits, spec.training.seed)
    spent.phases |= {"data": bundle.data_seconds, "load": bundle.load_seconds}
    spent.phase("build")
    spent.phases["build"] -= bundle.data_seconds + bundle.load_seconds
    notes: list[str] = []
    unit = work_unit(bundle.data.lengths, unit_size(spec, bundle.data.facts), spec.training.seed)
    reference = None
    if not bundle.compiled():
        send({"kind": "progress", "text": "checking against the baseline"})
        reference = check_reference(bundle, unit, request, notes)
        spent.phase("check")
    found = probe.largest(
        bundle,
        lambda micro: send({"kind": "probe_started", "micro_batch_size": micro}),
        lambda seen: send({"kind": "probe", "probe": seen.model_dump(mode="json")}),
        confirm=request.confirm_largest,
        failed_at=failed_at,
    )
    bundle.new_optimizer()
    spent.phase("probe")
    base: dict[str, Any] = {
        "configuration": request.configuration,
        "predicted_micro_batch": found.predicted or None,
        "limited_by": found.limited_by,
        "probes": tuple(found.probes),
        "capacity_bytes": device.capacity(),
        "used_before_bytes": used_before,
        "load_seconds": bundle.load_seconds,
        "dataset": bundle.data.facts,
    }
    if found.largest < 1:
        return Measurement(**base, outcome=Outcome.infeasible, reason=no_room(device, found.probes, used_before))
    compile_seconds = 0.0
    if bundle.compiled():
        send({"kind": "progress", "text": "compiling"})
        bundle.compile()
        reference = check_reference(bundle, unit, request, notes)
        compile_seconds = warm_compiled(bundle, unit, found.predicted)
        spent.phase("compile")
    weights = loop.trained_sum(bundle.model)
    device.reset_peak()
    best, curve, losses, norms = time_sizes(bundle, unit, found.predicted, request, send, notes, started)
    spent.phase("timing")
    if loop.trained_sum(bundle.model) == weights:
        raise Unstable("the trained weights did not change")
    every, trained = parameter_counts(bundle.model)
    assert reference is not None
    timing = best.timing()
    if timing.clean_share < 0.5:
        share = f"{timing.largest_share_of_others:.0%}"
        notes.append(
            f"Others used up to {share} of the device meanwhile; this timing is less sure than its interval says."
        )
    return Measurement(
        **base,
        outcome=Outcome.ok,
        micro_batch_size=best.micro,
        largest_micro_batch=max(found.largest, *(one.micro_batch_size for one in curve)),
        gradient_accumulation_steps=arrange.accumulation(best.plan),
        timing=timing,
        curve=tuple(curve),
        peak_bytes=device.peak(),
        reserved_bytes=device.reserved(),
        evaluation_batch_size=max(found.largest, best.micro),
        compile_seconds=compile_seconds,
        check_loss=reference.loss,
        check_grad_norm=reference.grad_norm,
        losses=tuple(losses),
        grad_norms=tuple(norms),
        parameters=every,
        trainable_parameters=trained,
        notes=tuple(notes),
        time_spent={name: round(seconds, 3) for name, seconds in spent.phases.items()},
    )


def no_room(device: Device, probes: list[Probe], others: int) -> str:
    """Why not even one sample fits."""
    text = f"not even a micro batch of 1 fits into {device.capacity() / 2**30:.2f} GiB"
    if device.torch.type == "cuda" and others > 1 << 30:
        text += f"; other processes hold {others / 2**30:.1f} GiB of this GPU"
    return text


def plan_of(bundle: Bundle, samples: list[int], micro: int, effective: int | None = None) -> list[arrange.Step]:
    """The samples arranged as the configuration says."""
    return arrange.arrange(
        bundle.configuration.levers["batching"],
        samples,
        bundle.data.lengths,
        effective or bundle.configuration.effective_batch_size,
        micro,
        bundle.spec.dataset.max_length,
        bundle.spec.training.seed,
    )


def check_reference(bundle: Bundle, unit: list[int], request: TrialRequest, notes: list[str]) -> loop.StepResult:
    """Step 0 on the untouched weights, ragged and with several samples a row, against the baseline's."""
    half = bundle.spec.dataset.max_length // 2
    lengths = bundle.data.lengths
    short = [sample for sample in unit if lengths[sample] <= half][:CHECK_SAMPLES]
    samples = short if len(short) == CHECK_SAMPLES else unit[:CHECK_SAMPLES]
    (step,) = plan_of(bundle, samples, micro=4, effective=len(samples))
    result = loop.reference_step(bundle, step)
    loop.check(bundle, result, 0)
    if request.reference_loss is None or request.reference_grad_norm is None:
        if request.origin != "baseline":
            notes.append("There is no baseline to compare step 0 with.")
        return result
    rounded = any(LEVERS[name].choice(choice).changes_numerics for name, choice in request.configuration.levers.items())
    for what, ours, theirs, most in zip(
        ("loss", "gradient norm"),
        (result.loss, result.grad_norm),
        (request.reference_loss, request.reference_grad_norm),
        ROUNDED if rounded else EXACT,
        strict=True,
    ):
        away = abs(ours - theirs) / max(abs(theirs), 1e-12)
        if away > most:
            raise Unstable(
                f"step 0's {what} is {ours:.6g} where the baseline's is {theirs:.6g} on the same weights and samples: "
                f"{away:.1e} away, {most:.0e} allowed"
            )
    return result


def first_size(bundle: Bundle, candidates: list[int]) -> int:
    """Where to begin: on a GPU the largest; on a CPU about 2,000 tokens, past which larger batches gain little."""
    if bundle.device.torch.type == "cuda":
        return candidates[-1]
    typical = (
        bundle.data.facts.p50 if bundle.configuration.levers["batching"] != "packed" else bundle.spec.dataset.max_length
    )
    fitting = [size for size in candidates if size * typical <= 2048]
    return fitting[-1] if fitting else candidates[0]


def time_sizes(
    bundle: Bundle,
    samples: list[int],
    largest: int,
    request: TrialRequest,
    send: Send,
    notes: list[str],
    started: float,
) -> tuple[Unit, list[Timing], list[float], list[float]]:
    """Time the unit at a few micro batches, the next one chosen by what the last ones cost; the fastest again."""
    configuration, lengths = bundle.configuration, bundle.data.lengths
    batching = configuration.levers["batching"]
    candidates = arrange.micro_candidates(batching, configuration.effective_batch_size, largest)
    fixed = configuration.micro_batch_size
    if fixed is not None:
        fitting = [size for size in candidates if size <= fixed]
        if fitting[-1] != fixed:
            notes.append(f"A micro batch of {fixed} does not fit or divide the effective batch; {fitting[-1]} is used.")
        candidates = fitting[-1:]
    # Cold caches and kernel selection must not be timed: the worst case runs first, at each size.
    deadline = started + request.seconds_limit * 0.8
    timed: dict[int, Unit] = {}
    shapes: list[sizes.Shape] = []
    size: int | None = first_size(bundle, candidates) if fixed is None else candidates[-1]
    while size is not None:
        send({"kind": "progress", "text": f"timing micro batch {size}"})
        probe.fits(bundle, size, lambda micro: send({"kind": "probe_started", "micro_batch_size": micro}))
        if not timed:
            bundle.new_optimizer()
        timed[size] = Unit(bundle, size, plan_of(bundle, samples, size))
        complete = timed[size].run(deadline)
        if not complete:
            del timed[size]
            if not timed:
                raise TimeoutError(f"one pass over {len(samples)} samples did not end in time")
            break
        shapes += timed[size].shapes()
        size = _next_size(bundle, samples, candidates, timed, sizes.cost_model(shapes), lengths)
    first = next(iter(timed.values()))
    losses, norms = list(first.losses), list(first.grad_norms)
    best = min(timed.values(), key=lambda unit: unit.timing().seconds)
    hopeless = request.best_seconds is not None and best.timing().seconds > CLEARLY_SLOWER * request.best_seconds
    if hopeless:
        notes.append("Clearly slower than the best so far, so it was timed once only.")
    elif best.passes < request.passes:
        send({"kind": "progress", "text": f"timing micro batch {best.micro} again"})
        time_unit(best, passes=request.passes, extra=1, deadline=deadline)
    return best, [timed[one].timing() for one in sorted(timed)], losses, norms


def _next_size(
    bundle: Bundle, samples: list[int], candidates: list[int], timed: dict[int, Unit], model: Any, lengths: list[int]
) -> int | None:
    """The untimed size that promises at least 2% over the best timed one, or None."""
    if len(timed) >= MOST_SIZES:
        return None
    best = min(unit.timing().seconds for unit in timed.values())
    updates = min(
        sum(sum(times) / len(times) for (_, at), times in unit.pieces.best().items() if at == len(unit.plan[0]))
        for unit in timed.values()
    )
    promised = {
        size: sizes.predict(model, plan_of(bundle, samples, size), lengths) + updates
        for size in candidates
        if size not in timed
    }
    if not promised:
        return None
    size = min(promised, key=lambda one: promised[one])
    return size if promised[size] < best * WORTH_TRYING else None


def warm_compiled(bundle: Bundle, unit: list[int], largest: int) -> float:
    """Compile and settle on the unit's shapes; the seconds that compiling took beyond running."""
    candidates = arrange.micro_candidates(
        bundle.configuration.levers["batching"], bundle.configuration.effective_batch_size, largest
    )
    size = first_size(bundle, candidates)
    cold = time.perf_counter()
    probe.fits(bundle, size, lambda _: None)
    probe.fits(bundle, candidates[0], lambda _: None)
    warm = time.perf_counter()
    probe.fits(bundle, size, lambda _: None)
    probe.fits(bundle, candidates[0], lambda _: None)
    again = time.perf_counter()
    return max(0.0, (warm - cold) - (again - warm))
