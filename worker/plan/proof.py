"""Judges a candidate's replay against the reference's: the same samples, the same labels, weights that move as far.

The replays run under a weight decay and a clipping that are strong enough to be seen, because at the job's own values
ten steps would not tell whether either took effect. How far a candidate may be from the reference is measured in the
job itself: by the reference once more with a learning rate 2% higher, and once more under another seed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

from service.contract.child import FIRST_ROWS
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement
from service.contract.replay import Proof, Replay, loss_scale, scale_over, widening
from service.levers import LEVERS, chosen
from service.levers.batching import BUDGETED, PACKED, ROWS
from service.levers.optimizer import WHOLE_STEP
from service.levers.precision import FULL_PRECISION

PROOF_STEPS = {"quick": 10, "standard": 20, "strict": 50}
LEAST_SAMPLES = 4  # of a step
MOST_IN_FP32 = 2e9  # parameters of a model whose reference computes in fp32
RATE_CHANGE = 1.02  # times the learning rate: what that changes in the losses is what a candidate may differ by
SHRINKAGE = 0.02  # by which the replay's weight decay makes the weights smaller over all its steps
CLIPPED_TO = 0.5  # times the norm of step 0's gradients
# Relative differences of a step's loss that rounding explains, where both compute in fp32 and where either rounds to
# fewer bits: ten times what step 0 is allowed to differ by (worker/child/measure.py), as rounding adds up over steps.
# With the limits of this file, `python -m benchmarks.planted` finds all planted faults and rejects nothing sound.
EXACT, ROUNDED = 1e-3, 2e-2
FIRST_LOSS, FIRST_NORM = {False: 1e-4, True: 5e-3}, {False: 2e-3, True: 5e-2}  # of step 0, by whether either rounds
# By how much a single matrix's gradient in step 0 may differ, as a share of its norm: rounding of what nearly cancels
# may be large, and what is wrong is larger. Gradients below NEXT_TO_NOTHING times the median matrix's are left out.
FIRST_GRADIENT, NEXT_TO_NOTHING = 0.6, 0.01
# How many times as large or as small a single matrix's gradient may be: rounding by the limit above, if orthogonal to
# the gradient, makes it 1.17 times as large.
FIRST_SIZE = 1.25
LEAST_MOVEMENT = {False: 0.05, True: 0.15}  # the narrowest limit on how far from 1 the movement is, in the same way
MOST_LOSS, MOST_MOVEMENT = 0.25, 0.5  # the widest limits, however much a job's own losses and movement differ
SEEDS = 3.0  # times the difference that another seed makes to the reference's movement
HIGHER = 0.05  # of the reference's mean loss: how much higher it may be under another optimizer or adapter
HARDLY = 0.1  # of the reference's movement: a tensor that moves less does not learn


@dataclass(frozen=True)
class Noise:
    """How far the reference is from itself: in its losses at a rate 2% higher, in its movement under another seed.

    Both were seen in `steps` steps.
    """

    loss: float
    movement: float
    steps: int

    def of_step(self, step: int) -> float:
        """How much a learning rate 2% higher may change the loss of a step, which is counted from 0.

        It moves the weights 2% further, so that later losses differ by more, in proportion to the distance.
        """
        return self.loss * max(1.0, (step + 1) / self.steps)


def precise(measurement: Measurement) -> bool:
    """Whether a measurement was computed in fp32 throughout, without rounding to fewer bits."""
    rounded = any(choice.changes_numerics for choice in chosen(measurement.configuration.levers))
    return not rounded and measurement.weights_dtype in (None, "float32")


def exposed(spec: JobSpec, candidate: Measurement) -> JobSpec:
    """The job with weight decay and clipping strong enough to be seen in a replay; what is off stays off."""
    training, steps = spec.training, PROOF_STEPS[spec.search.verify]
    changes: dict[str, float] = {}
    if training.weight_decay:
        changes["weight_decay"] = SHRINKAGE / (candidate.configuration.learning_rate * steps)
    clips = candidate.configuration.levers["optimizer"] not in WHOLE_STEP  # these drop gradients before any clipping
    if training.max_grad_norm and candidate.check_grad_norm and clips:
        changes["max_grad_norm"] = CLIPPED_TO * candidate.check_grad_norm
    return spec.model_copy(update={"training": training.model_copy(update=changes)})


def references_of(candidate: Measurement, facts: HardwareFacts) -> list[tuple[str, Measurement]]:
    """(what it is, the configuration) of the references to try, the most precise first.

    The second is tried where the first does not fit into the device's memory. Every lever is at its baseline but for
    those that say which weights are trained. The first is in fp32 throughout, unless the model is so large that this
    would take longer than it tells; the other has the candidate's precision, and checkpointing against its memory.

    Where the candidate computes in 16 bits, a GPU computes the first one's matmuls in TF32: that rounds eight times
    finer than bf16 and as fine as fp16, and fp32 takes several times as long (docs/decisions/0036).
    """
    configuration, levers = candidate.configuration, candidate.configuration.levers
    plain = {name: lever.reference or lever.baseline for name, lever in LEVERS.items()}
    if configuration.method == "qlora":  # quantising changes the weights, so the reference is quantised, too
        plain["quantization"] = levers["quantization"]
    lean = {"precision": levers["precision"], "optimizer": levers["optimizer"], "checkpointing": "full"}
    in_16_bits = not precise(candidate) and levers["precision"] not in FULL_PRECISION
    full = "tf32" if in_16_bits and LEVERS["precision"].choice("tf32").missing(facts) is None else "fp32"
    ways = [(full, plain | {"precision": full}), (f"{levers['precision']}, checkpointing", plain | lean)]
    if (candidate.parameters or 0) > MOST_IN_FP32:
        del ways[0]
    return [
        (
            f"{name}, one sample a row, every other lever at its baseline",
            candidate.model_copy(
                update={"configuration": configuration.model_copy(update={"levers": choices}), "micro_batch_size": 1}
            ),
        )
        for name, choices in ways
    ]


def stirs(candidate: Measurement) -> bool:
    """Whether replays draw LoRA's matrices B, which begin at 0: where both adapters are of the same form."""
    return candidate.configuration.method != "full" and not _learns_otherwise(candidate)


def _learns_otherwise(candidate: Measurement) -> bool:
    """Whether one of the candidate's choices changes what is learnt, which the user has allowed."""
    return any(choice.changes_learning for choice in chosen(candidate.configuration.levers))


def samples_a_step(candidate: Measurement) -> int:
    """How many samples a step has: two micro batches at least, where effective batch and data hold them."""
    micro, most = candidate.micro_batch_size or 1, candidate.configuration.effective_batch_size
    most = min(most, candidate.dataset.rows) if candidate.dataset else most
    return min(most, max(2 * micro, LEAST_SAMPLES // micro * micro))


def first_samples(spec: JobSpec, candidate: Measurement) -> int:
    """How many samples step 0 has where a micro batch holds more samples than its size says; 0 where it does not.

    Where rows are packed, or micro batches have a number of tokens, one row may hold all of a step's samples. Then no
    step would accumulate gradients over micro batches, or have a second row. So step 0, which is compared most exactly,
    has samples for three micro batches of two rows, as far as effective batch and data hold them.
    """
    levers, facts = candidate.configuration.levers, candidate.dataset
    if levers["batching"] not in (*PACKED, *BUDGETED) or levers["optimizer"] in WHOLE_STEP or facts is None:
        return 0
    rows = 3 * min(candidate.micro_batch_size or 1, FIRST_ROWS)
    length = spec.dataset.max_length if levers["batching"] in ROWS else facts.longest
    wanted = math.ceil(rows * length * facts.rows / facts.tokens)
    return min(wanted, facts.rows, candidate.configuration.effective_batch_size)


def samples_of_a_replay(spec: JobSpec, candidate: Measurement) -> int:
    """How many samples a replay trains, those that it trains again counted again."""
    size = samples_a_step(candidate)
    return PROOF_STEPS[spec.search.verify] * size + max(0, first_samples(spec, candidate) - size)


def noise(reference: Replay, faster: Replay, other_seed: Replay) -> Noise:
    """How much the reference's own losses and movement differ where nothing is wrong.

    `faster` and `other_seed` have equally many steps, which may be fewer than the reference's. `faster` trained at a
    learning rate 2% higher, by which its weights move 2% further.
    """
    return Noise(
        loss=max(_differences(faster, reference), default=0.0),
        movement=abs(_movement(other_seed, faster) * RATE_CHANGE - 1),
        steps=len(faster.losses),
    )


def prove(
    spec: JobSpec, candidate: Measurement, ours: Replay, reference: Replay, noise: Noise, name: str = "fp32"
) -> Proof:
    """Compare a candidate's replay with the reference's, which is called `name`; both ran under the exposed `spec`."""
    rounds = not precise(candidate)
    largest, allowed_loss = _furthest(ours, reference, noise, ROUNDED if rounds else EXACT)
    allowed_movement = min(max(LEAST_MOVEMENT[rounds], SEEDS * noise.movement), MOST_MOVEMENT)
    movement = _movement(ours, reference)
    learns_otherwise = _learns_otherwise(candidate)
    reasons = _counted(spec, candidate, ours, reference) or _stood_still(ours, reference)
    reasons = reasons or _first_step(ours, reference, rounds, learns_otherwise)
    if learns_otherwise:
        reasons = reasons or _not_higher(ours, reference, allowed_loss)
    else:
        if candidate.configuration.method != "qlora":  # quantised from another format, the weights are others
            reasons = reasons or _gradients(ours, reference)
        reasons = reasons or _as_far(movement, allowed_movement, len(ours.steps))
        reasons += [*_decay(spec, ours, reference), *_clipping(spec, ours)]
        reasons = reasons or _as_low(largest, allowed_loss)
    return Proof(
        reasons=tuple(reasons),
        steps=len(ours.steps),
        samples=len(set(ours.given)),
        terms=sum(ours.terms),
        largest_loss_difference=largest,
        allowed_loss_difference=allowed_loss,
        movement=movement,
        allowed_movement=allowed_movement,
        reference=name,
    )


def _differences(ours: Replay, theirs: Replay) -> list[float]:
    """Of each step, how far its loss is from theirs, as a share of its `loss_scale`; infinite if not finite."""
    pairs = zip(ours.losses, theirs.losses, strict=False)
    shares = [abs(one - other) / loss_scale(abs(other)) for one, other in pairs]
    return [share if math.isfinite(share) else math.inf for share in shares]


def _furthest(ours: Replay, reference: Replay, noise: Noise, least: float) -> tuple[float, float]:
    """(a step's difference of losses, the allowed one), of the step where the former is largest beside the latter.

    Both are shares of the reference's loss in that step.
    """
    found = []
    for step, (away, loss) in enumerate(zip(_differences(ours, reference), reference.losses, strict=False)):
        allowed = min(max(noise.of_step(step), least), MOST_LOSS)
        found.append((away / allowed, away * scale_over(loss), allowed * scale_over(loss)))
    return max(found, default=(0.0, 0.0, least))[1:]


def _movement(ours: Replay, theirs: Replay) -> float:
    """How far our replay moved the tensors that both replays train, over how far theirs moved them.

    How far is the 2-norm of `Replay.moved` over these tensors; the result is 1.0 if theirs moved none.
    """
    both = ours.moved.keys() & theirs.moved.keys()
    mine, other = (sum(one.moved[name] ** 2 for name in both) ** 0.5 for one in (ours, theirs))
    return mine / other if other else 1.0


def _counted(spec: JobSpec, candidate: Measurement, ours: Replay, reference: Replay) -> list[str]:
    """What is wrong with the samples, steps and labels: every sample has to be there once, with all its labels."""
    given, trained = Counter(ours.given), Counter(sample for step in ours.steps for sample in step)
    left_out, twice = (given - trained).total(), (trained - given).total()
    if left_out or twice:
        return [f"its batching leaves out {left_out} of {given.total()} samples and trains {twice} too often"]
    first, size = first_samples(spec, candidate), samples_a_step(candidate)
    wanted = 1 + -(-(given.total() - first) // size) if first > size else -(-given.total() // size)
    if len(ours.steps) != wanted:
        return [f"it takes {len(ours.steps)} optimizer steps for {given.total()} samples, not {wanted}"]
    wrong = [at for at, (one, other) in enumerate(zip(ours.terms, reference.terms, strict=True)) if one != other]
    if wrong:
        at = wrong[0]
        return [f"step {at} learns {ours.terms[at]} labels, where its samples have {reference.terms[at]}"]
    return []


def _first_step(ours: Replay, reference: Replay, rounds: bool, learns_otherwise: bool) -> list[str]:
    """What is wrong with step 0, whose weights nothing has touched yet: its loss, or its gradients' norm."""
    away, first = _differences(ours, reference)[0], reference.losses[0]
    if away > FIRST_LOSS[rounds]:
        shares = (
            f"{away * scale_over(first):.2%} away from the reference's, {FIRST_LOSS[rounds] * scale_over(first):.2%}"
        )
        return [f"step 0's loss on the untouched weights is {shares} allowed: it computes another loss"]
    mine, other = ours.grad_norms[0], reference.grad_norms[0]
    if mine is None or other is None or learns_otherwise:
        return []
    if abs(mine / other - 1) <= FIRST_NORM[rounds] * widening(first):
        return []
    return [f"step 0's gradients have norm {mine:.4g} where the reference's have {other:.4g}: wrong gradients"]


def _gradients(ours: Replay, reference: Replay) -> list[str]:
    """What is wrong with step 0's gradients of single matrices, which hardly show in the norm of all.

    Gradients that are next to nothing beside most are rounding alone, as those of keys' biases always are.
    """
    away = gradients_away(ours, reference)
    wrong = [name for name, far in away.items() if far > FIRST_GRADIENT]
    if wrong:
        worst = max(wrong, key=lambda name: away[name])
        share = f"{away[worst]:.0%} away from the reference's, {FIRST_GRADIENT:.0%} allowed"
        return [f"step 0's gradient of {worst} is {share} ({len(wrong)} of {len(away)} matrices): wrong gradients"]
    sizes = gradient_sizes(ours, reference)
    wrong = [name for name, size in sizes.items() if not 1 / FIRST_SIZE <= size <= FIRST_SIZE]
    if not wrong:
        return []
    worst = max(wrong, key=lambda name: abs(math.log(max(sizes[name], 1e-9))))
    size = f"{sizes[worst]:.2f} times as large as the reference's"
    return [f"step 0's gradient of {worst} is {size} ({len(wrong)} of {len(away)} matrices): wrong gradients"]


def gradients_away(ours: Replay, reference: Replay) -> dict[str, float]:
    """Matrix -> how far step 0's gradient is from the reference's, as a share of that; small ones are left out."""
    mine, theirs = ours.gradients, reference.gradients
    norms = {name: math.hypot(*values) for name, values in theirs.items() if len(mine.get(name, ())) == len(values)}
    sizes = {name: norm / len(theirs[name]) ** 0.5 for name, norm in norms.items()}
    least = NEXT_TO_NOTHING * statistics.median(sizes.values()) if sizes else 0.0
    return {name: math.dist(mine[name], theirs[name]) / norms[name] for name, size in sizes.items() if size > least}


def gradient_sizes(ours: Replay, reference: Replay) -> dict[str, float]:
    """Matrix -> how many times as large step 0's gradient is as the reference's, of those that `gradients_away` has."""
    mine, theirs = ours.gradients, reference.gradients
    return {name: math.hypot(*mine[name]) / math.hypot(*theirs[name]) for name in gradients_away(ours, reference)}


def _stood_still(ours: Replay, reference: Replay) -> list[str]:
    """What does not move although the reference's weights do: whole steps, or single tensors."""
    still = [step for step in ours.still if step not in reference.still]
    if still:
        some = ", ".join(map(str, still[:5])) + (", ..." if len(still) > 5 else "")
        return [f"in {len(still)} of {len(ours.steps)} steps (from 0: {some}) no trained weight changed"]
    both = ours.moved.keys() & reference.moved.keys()
    stuck = sorted(name for name in both if ours.moved[name] < HARDLY * reference.moved[name])
    if stuck:
        return [f"{len(stuck)} of {len(both)} trained tensors hardly move, {stuck[0]} among them"]
    return []


def _as_far(movement: float, allowed: float, steps: int) -> list[str]:
    if abs(movement - 1) <= allowed:
        return []
    sentence = f"its weights moved {movement:.2f} times as far as the reference's in {steps} steps of the same samples"
    return [
        f"{sentence} ({1 - allowed:.2f} to {1 + allowed:.2f} allowed): it does not train at the learning rate asked for"
    ]


def _as_low(largest: float, allowed: float) -> list[str]:
    if largest <= allowed:
        return []
    sentence = f"a step's loss is {largest:.1%} away from the reference's on the same samples; {allowed:.1%} allowed"
    return [f"{sentence}, by rounding and by what a learning rate 2% higher changes"]


def _not_higher(ours: Replay, reference: Replay, allowed: float) -> list[str]:
    """All that is asked of a choice that changes what is learnt, which the user has allowed."""
    mean = statistics.fmean(reference.losses)
    higher = statistics.fmean(ours.losses) > mean + loss_scale(mean) * max(allowed, HIGHER)
    return ["its losses are higher than the reference's on the same samples"] if higher else []


def _decay(spec: JobSpec, ours: Replay, reference: Replay) -> list[str]:
    if not spec.training.weight_decay or ours.shrunk is None or reference.shrunk is None:
        return []
    if abs(ours.shrunk - reference.shrunk) <= SHRINKAGE / 4:
        return []
    sentence = f"its weights shrank by {ours.shrunk:.2%} where the reference's shrank by {reference.shrunk:.2%}"
    return [f"{sentence}: the weight decay that was asked for did not take effect"]


def _clipping(spec: JobSpec, ours: Replay) -> list[str]:
    most = spec.training.max_grad_norm
    above = [norm for norm in ours.applied_norms if most and norm is not None and norm > 1.05 * most]
    if not above:
        return []
    return [f"the optimizer was given gradients of norm {max(above):.3g} where they are to be clipped to {most:.3g}"]
