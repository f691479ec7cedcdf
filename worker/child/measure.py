"""One trial, inside its child: build, probe memory, check step 0 against the baseline, and time the work unit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from service.contract.child import Built, ProbeStarted, Progress, Workplace
from service.contract.job import JobSpec
from service.contract.measurement import PREPARE, DatasetFacts, Measurement, Outcome, Probe, Timing
from service.contract.objective import evaluations, minimises_memory
from service.contract.replay import scale_over, widening
from service.contract.states import Origin, ProbePhase
from service.contract.task import TrialRequest
from service.levers import LEVERS
from service.levers.batching import GROUP_STEPS
from training.errors import TrainingError
from worker.child import arrange, curve, evaluation_time, probe, steps
from worker.child.build import Bundle, build, parameter_counts, unmatched_modules
from worker.child.data import Data, work_unit
from worker.child.lacking import lacking, lacking_kernels
from worker.child.size_search import EarlierProbes, Found, Tell
from worker.child.timing import Unit
from worker.devices import Device

CHECK_SAMPLES = 8  # of the step that is compared with the baseline's
CHECKED_AT = 4  # the micro batch of that step at most
UNIFORM = 0.9  # rows count as uniform if their mean length is at least this share of the longest
MOST_UNIFORM_TOKENS = 65_536  # of a unit of rows of one length: long rows would take a large model minutes a pass
SEARCHED_BATCH = 64  # samples of a step, for the unit's size, where the job leaves the effective batch to the search
MOST_SAMPLES = 1024  # of a work unit, where the least number of steps does not ask for more
# Relative differences between a trial's step 0 and the baseline's (of the loss, of the gradient norm) that rounding
# explains: in fp32 throughout, and where either of the two rounds to fewer bits. With these, `python -m
# benchmarks.planted` rejects no sound configuration, and half of the planted faults are found here already.
EXACT = (1e-4, 1e-3)
ROUNDED = (2e-3, 2e-2)
# The same for levers that change what is learnt, which the user allows: the loss of the untouched weights is still the
# same, but the gradients may be scaled in another way.
LEARNS_OTHERWISE = 1e-2, math.inf


@dataclass
class Spent:
    """Where a trial's time went, in seconds by phase."""

    phases: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> None:
        """Charge the time since the last call to the phase `name`."""
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._since
        self._since = now


def unit_of(spec: JobSpec, data: Data, seed: int) -> list[int]:
    """The job's work unit under a seed, as indices of training samples."""
    return work_unit(data.typical, unit_size(spec, data.facts), seed, _effective_batch(spec))


def _effective_batch(spec: JobSpec) -> int:
    return spec.training.effective_batch_size or SEARCHED_BATCH


def unit_size(spec: JobSpec, facts: DatasetFacts) -> int:
    """How many samples the job's work unit has: whole optimizer steps, and enough tokens for a fair comparison.

    The seed decides which samples share a micro batch, and so how much is padding: on a unit of few batches of short
    samples, the baseline was 1.5 times as fast under one seed as under another.
    """
    effective = _effective_batch(spec)
    mean = facts.tokens / facts.rows
    least, tokens = (48, 10_000) if spec.search.verify == "quick" else (64, 48_000)
    enough = min(MOST_SAMPLES, int(tokens / mean))
    if mean >= UNIFORM * facts.longest:
        # Rows are about as long as each other: no batching groups them, and one step is like the next under any seed.
        samples = min(max(least, enough), int(MOST_UNIFORM_TOKENS / mean))
        return effective * max(1, samples // effective)
    span = GROUP_STEPS[spec.search.verify]
    wanted = max(span, -(-least // effective), enough // effective)
    return effective * span * -(-wanted // span)  # whole groups, so that what is timed is what runs


def run_trial(
    spec: JobSpec,
    request: TrialRequest,
    device: Device,
    workplace: Workplace,
    tell: Tell,
    known: tuple[Probe, ...] = (),
    only_probe: bool = False,
) -> tuple[Measurement, Bundle]:
    """(what one configuration measures, its model and data, which were trained meanwhile). Errors pass through.

    After an out-of-memory error, the last message `probe_started` tells the worker which size was running. `known`
    are the probes of earlier children of this trial, those that ran out of memory included. With `only_probe` nothing
    is timed: the answer is the largest micro batch and the memory line.
    """
    spent, started = Spent(), time.perf_counter()
    bundle, facts = _loaded(spec, request, device, workplace, tell, spent)
    started += bundle.prepare_seconds  # the time limit does not count what only the first process does
    notes, unit = unmatched_modules(spec, bundle.model), unit_of(spec, bundle.data, spec.training.seed)
    learnt = EarlierProbes(known, request.memory_line)
    found, evaluation, apart = _probed(bundle, request, learnt, tell)
    assert found.largest >= 1, "a micro batch of 1 that runs out of memory ends the trial before"
    steps.replace_optimizer(bundle)
    spent.phase("probe")
    base: dict[str, Any] = {"configuration": request.configuration, "outcome": Outcome.ok, **facts.fields()}
    if only_probe:
        limits = limits_of(found) | {"largest_micro_batch": found.largest, "evaluation_batch_size": evaluation}
        return Measurement(**base | limits), bundle
    one_evaluation = _timed_evaluation(bundle, evaluation, tell)
    if one_evaluation is not None:
        spent.phase("evaluation")
    compile_seconds = 0.0
    if bundle.compiled:
        found, compile_seconds = _compiled(bundle, request, found, learnt, tell)
        spent.phase("compile")
    tell(ProbeStarted(micro_batch_size=min(CHECKED_AT, found.largest)))  # or a failure is held against the largest
    tell(Progress(text="checking against the baseline"))
    reference = check_reference(bundle, unit, request, found.largest, notes)
    spent.phase("check")
    weights = steps.trained_sum(bundle.model)
    effective, rows = request.configuration.effective_batch_size, bundle.data.facts.rows
    once = bundle.load_seconds + bundle.quantising_seconds + compile_seconds
    once += (one_evaluation or 0.0) * evaluations(spec, rows, effective)
    times = curve.Curve(bundle, unit, request, tell, started, once)
    best = times.run(found)
    spent.phase("timing")
    spent.phases |= {"warm-up": times.warm_seconds, "timing": spent.phases["timing"] - times.warm_seconds}
    if steps.trained_sum(bundle.model) == weights:
        raise TrainingError("the trained weights did not change", "numbers")
    measured = Measurement(
        **base,
        **limits_of(found),
        **_timed(bundle, times, best, found.largest),
        evaluation_batch_size=_evaluation_batch(bundle, found, evaluation, best.micro, apart),
        evaluation_seconds=one_evaluation,
        compile_seconds=compile_seconds,
        check_loss=reference.loss,
        check_grad_norm=reference.grad_norm,
        pickled_weights=bundle.recipe.pickled_weights,
        remote_code=workplace.allow_remote_code and hasattr(bundle.model.config, "auto_map"),
        **beside_the_adapter(bundle),
        notes=(*notes, *times.notes, *_notes_on(best.timing())),
        time_spent={name: round(seconds, 3) for name, seconds in spent.phases.items()},
    )
    return measured, bundle


def _timed(bundle: Bundle, times: curve.Curve, best: Unit, largest: int) -> dict[str, Any]:
    """The fields of a measurement that follow from its timings, and from `largest`, the largest probed micro batch."""
    configuration, timing, timings = bundle.configuration, best.timing(), times.timings()
    batching, effective = configuration.levers["batching"], configuration.effective_batch_size
    return {
        "micro_batch_size": best.micro,
        "largest_micro_batch": max(largest, *(one.micro_batch_size for one in timings)),
        "gradient_accumulation_steps": arrange.accumulation(batching, best.plan, best.micro, effective),
        "timing": timing,
        "curve": timings,
        "peak_bytes": timing.peak_bytes,
        "reserved_bytes": timing.reserved_bytes,
        "first_call_seconds": best.first_calls(),
        "losses": times.losses,
        "grad_norms": times.grad_norms,
    }


def _loaded(
    spec: JobSpec, request: TrialRequest, device: Device, workplace: Workplace, tell: Tell, spent: Spent
) -> tuple[Bundle, Built]:
    """The bundle, ready to train, and what is known of it, which is sent to the worker already."""
    tell(Progress(text="loading"))
    used_before = device.used_by_others()
    bundle = build(spec, request.configuration, device, workplace, spec.training.seed, tell)
    known = {"data": bundle.data_seconds, "load": bundle.load_seconds}
    if bundle.prepare_seconds:
        known[PREPARE] = bundle.prepare_seconds
    spent.phases |= known
    spent.phase("build")
    spent.phases["build"] -= sum(known.values())
    facts = built(bundle, device, used_before, is_first=request.origin is Origin.baseline)
    tell(facts)
    return bundle, facts


def _probed(bundle: Bundle, request: TrialRequest, known: EarlierProbes, tell: Tell) -> tuple[Found, int, bool]:
    """(what the search for the largest micro batch found, the evaluation's batch, whether that was probed apart).

    An evaluation may need memory that training does not: a head that trains without logits evaluates with them, and an
    evaluation may generate or copy weights. Then it has a probe of its own, which begins at one sample.
    """
    levers = request.configuration.levers
    apart = any(lever.changes_evaluation and levers[name] != lever.baseline for name, lever in LEVERS.items())
    found = probe.largest(bundle, tell, request.confirm_largest, known)
    if apart or (request.confirm_largest and found.largest and bundle.spec.search.verify != "quick"):
        first = 1 if apart else found.largest
        evaluation = probe.evaluation(bundle, tell, first, known, request.confirm_largest)
        # If it is smaller, training's largest ran out of memory in an earlier child's evaluation.
        return found, evaluation, apart or evaluation < found.largest
    return found, probe.evaluated_rows(bundle, found.largest, known.probes), False


def _timed_evaluation(bundle: Bundle, size: int, tell: Tell) -> float | None:
    """The seconds of one evaluation in batches of that size, where they count in the run's; None where they do not."""
    if not evaluation_time.counts(bundle.spec, bundle.data.facts, bundle.configuration.effective_batch_size):
        return None
    if minimises_memory(bundle.spec):
        size = 1  # as the recommended evaluation batch will be small
    tell(ProbeStarted(micro_batch_size=size, phase=ProbePhase.evaluation))
    tell(Progress(text="timing an evaluation"))
    return evaluation_time.evaluation_seconds(bundle, size)


def _compiled(
    bundle: Bundle, request: TrialRequest, found: Found, known: EarlierProbes, tell: Tell
) -> tuple[Found, float]:
    """(what the memory probe finds once the model is compiled, the seconds that compiling it took)."""
    tell(Progress(text="compiling"))
    bundle.compile()
    seconds = curve.warm_compiled(bundle, found.predicted, request.first_micro_batch, tell)
    if request.confirm_largest:
        found = probe.recompiled(bundle, tell, found, known)
    steps.replace_optimizer(bundle)
    return found, seconds


def _notes_on(timing: Timing) -> list[str]:
    """Sentences on what made a timing less sure."""
    notes = []
    if timing.clean_share is None:
        notes.append(
            "The device does not tell whether others used it meanwhile, so this timing is not known to be clean."
        )
    elif timing.is_disturbed:
        heat = f"The GPU lowered its clock meanwhile ({', '.join(timing.slowed_by)})"
        others = f"Others used up to {timing.largest_share_of_others:.0%} of the device meanwhile"
        notes.append(f"{heat if timing.slowed_by else others}; this timing is less sure than its interval says.")
    if timing.retries:
        notes.append(
            f"Memory was so full that the allocator freed its cache {timing.retries} times while this was timed."
        )
    return notes


def _evaluation_batch(bundle: Bundle, probed: Found, evaluation: int, micro: int, apart: bool) -> int:
    """The evaluation's batch: `evaluation` if that was probed `apart`, else as large as training had fit.

    With the objective memory no more than the micro batch, or the evaluation would take what training saves.
    """
    found = evaluation if apart else probe.evaluated_rows(bundle, max(probed.largest, micro), probed.probes)
    return min(found, micro) if minimises_memory(bundle.spec) else found


def built(bundle: Bundle, device: Device, used_before: int, is_first: bool) -> Built:
    """What a trial can tell once its model and data are there. Only a job's first asks what takes long to find out."""
    every, trained = parameter_counts(bundle.model)
    return Built(
        dataset=bundle.data.facts,
        capacity_bytes=device.capacity(),
        used_before_bytes=used_before,
        load_seconds=bundle.load_seconds + bundle.quantising_seconds,
        load_peak_bytes=bundle.load_peak_bytes,
        unread_bytes=len(bundle.unread),
        weights_dtype=weights_dtype(bundle),
        parameters=every,
        trainable_parameters=trained,
        model_revision=bundle.model_revision,
        prepare_seconds=bundle.prepare_seconds,
        lacks=lacking(bundle.model, bundle.recipe.task)
        | (lacking_kernels(bundle.model.config.model_type) if is_first else {}),
    )


def limits_of(found: Found) -> dict[str, Any]:
    """The measurement's fields that the memory probe fills."""
    return {
        "predicted_micro_batch": found.predicted or None,
        "limited_by": found.limited_by,
        "memory_line": found.line,
        "probes": tuple(found.probes),
    }


def beside_the_adapter(bundle: Bundle) -> dict[str, Any]:
    """The measurement's fields for modules that the adapter leaves out, and for those that are trained whole."""
    if bundle.configuration.method == "full":
        return {}
    adapter, drawn = bundle.model.peft_config["default"], getattr(bundle.model.get_base_model(), "drawn", ())
    return {"adapter_excludes": tuple(sorted(adapter.exclude_modules or ())), "adapter_saves": tuple(drawn)}


def weights_dtype(bundle: Bundle) -> str:
    """The name of the dtype that most of the model's weights have, adapters not counted."""
    kinds = [one.dtype for name, one in bundle.model.named_parameters() if "lora_" not in name]
    return str(max((kind for kind in set(kinds) if kind.is_floating_point), key=kinds.count)).removeprefix("torch.")


def check_reference(
    bundle: Bundle, unit: list[int], request: TrialRequest, largest: int, notes: list[str]
) -> steps.StepResult:
    """Compare step 0 on the untouched weights with the baseline's; TrainingError when they differ too much.

    The samples differ in length, and a packed row takes several of them where they are short enough: a kernel that
    mixes samples or ignores the mask then gives another loss or gradient norm.
    """
    half = bundle.spec.dataset.max_length // 2
    lengths = bundle.data.lengths
    short = [sample for sample in unit if lengths[sample] <= half][:CHECK_SAMPLES]
    samples = short if len(short) == CHECK_SAMPLES else unit[:CHECK_SAMPLES]
    micro = len(samples) if bundle.recipe.steps_in_backward else min(CHECKED_AT, largest)
    (step,) = arrange.plan_of(bundle, samples, micro=micro, effective=len(samples))
    result = steps.reference_step(bundle, step)
    steps.check(bundle, result, 0)
    if request.reference_loss is None or request.reference_grad_norm is None:
        if request.origin != Origin.baseline:
            notes.append("There is no baseline to compare step 0 with.")
        return result
    levers = request.configuration.levers
    rounded = request.reference_rounded or weights_dtype(bundle) != "float32"
    choices = [LEVERS[name].choice(choice) for name, choice in levers.items()]
    rounded |= any(choice.changes_numerics for choice in choices)
    allowed = ROUNDED if rounded else EXACT
    if any(choice.changes_learning for choice in choices):
        allowed = LEARNS_OTHERWISE
    loss = max(request.reference_loss, 1e-9)
    for what, ours, theirs, most in (
        ("loss", result.loss, loss, allowed[0] * scale_over(loss)),
        ("gradient norm", result.grad_norm, request.reference_grad_norm, allowed[1] * widening(loss)),
    ):
        away = abs(ours - theirs) / max(abs(theirs), 1e-12)
        if away > most:
            raise TrainingError(
                f"step 0's {what} is {ours:.6g} where the baseline's is {theirs:.6g} on the same weights and samples: "
                f"{away:.1e} away, {most:.0e} allowed",
                "numbers",
            )
    return result
