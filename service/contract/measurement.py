"""Measurement: the figures and the outcome of one trial, however it ended; and those of a verification."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from service.contract.base import Contract, without_former
from service.contract.configuration import Configuration
from service.contract.form import DataForm
from service.contract.replay import Proof
from service.contract.states import ProbePhase

# A timing with a smaller share of clean timings counts as disturbed: chosen, not measured, as what holds for most of
# them. If it is far larger, nearly all is disturbed on a shared machine: trials are repeated, and no block tells that a
# finalist is slower. If it is far smaller, what others did to the machine counts as the candidate's own.
LEAST_CLEAN = 0.5
NORMAL = 1.96  # standard errors to each side that hold 95%
# Standard deviation of the logarithm of a ratio from one pair of processes to the next, which no spread within a
# process shows. `python -m benchmarks.noise` tells whether intervals that are made with it hold beside a neighbour.
PROCESS_SPREAD = 0.02
DRIFT = 1.25  # by how much a shared machine's pace may differ between two trials (docs/decisions/0013)
PREPARE = "prepare"  # the phase of what only a job's first process does: download, tokenise, read the weights once


class Outcome(StrEnum):
    """How a trial ended. Only `ok` can be recommended; each of the others carries a reason.

    `infeasible` ran out of memory, `unstable` failed a check of its numbers or its memory, and `invalid` cannot be with
    this model, data or hardware.
    """

    ok = "ok"
    infeasible = "infeasible"
    unstable = "unstable"
    invalid = "invalid"
    crashed = "crashed"
    timed_out = "timed_out"


class Probe(Contract):
    """A micro batch size at which a full step was started. `peak_bytes` is None when the step ran out of memory.

    `update_bytes` is the peak of clipping and the optimizer step alone, which hardly depends on the batch size, and
    `unfreeable_bytes` about the part of `peak_bytes` that would remain if the caching allocator freed its cache.
    """

    micro_batch_size: int
    peak_bytes: int | None
    update_bytes: int | None = None
    unfreeable_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int = Field(default=0, description="How often the allocator had to free its cache and retry.")
    thrashes: bool = Field(
        default=False,
        description="The allocator freed its cache in the last of several steps, too: it is too large.",
    )
    seconds: float | None = None
    phase: ProbePhase = ProbePhase.training

    @property
    def fits(self) -> bool:
        """Whether the size can be trained: it had enough memory, and did not thrash."""
        return self.peak_bytes is not None and not self.thrashes


class MemoryLine(Contract):
    """Peak bytes of a worst-case step: `rest_bytes + slope_bytes x micro batch`, at least `update_bytes`.

    `residual` is the largest error of the line's predictions that were run, as a share of the device's capacity; None
    when none was run.
    """

    rest_bytes: float
    slope_bytes: float = Field(gt=0)
    update_bytes: float = 0.0
    residual: float | None = None

    def at(self, micro: int) -> float:
        """The peak bytes that the line predicts for a micro batch."""
        return max(self.update_bytes, self.rest_bytes + self.slope_bytes * micro)

    def largest(self, capacity: float) -> int:
        """The largest micro batch whose peak is within `capacity` bytes; 0 when not even the optimizer step's is."""
        if self.update_bytes > capacity:
            return 0
        return max(0, math.floor((capacity - self.rest_bytes) / self.slope_bytes))


class DatasetFacts(Contract):
    """The tokenised training split: rows, lengths in tokens after cutting, and a fingerprint of ids and labels.

    Where only a sample was tokenised, the numbers of rows and tokens are estimates for the whole dataset.
    """

    fingerprint: str
    rows: int
    validation_rows: int
    tokens: int
    at_max_length: int = Field(description="Rows of max_length tokens: cut, or exactly that long.")
    p50: int
    p90: int
    p99: int
    longest: int
    histogram: dict[str, int] = Field(description="Upper edge in tokens -> rows.")
    sampled_rows: int | None = Field(
        default=None, description="Training rows that were tokenised, where the dataset is so large that not all were."
    )
    columns: dict[str, str] = Field(default_factory=dict, description="Kind of column -> its name in the data.")
    formats: tuple[str, ...] = Field(default=(), description="Endings of the files that were read.")
    is_folder: bool = False
    is_local: bool = Field(default=True, description="A path, not a hub id.")
    revision: str | None = Field(default=None, description="The commit that was read from the hub.")
    form: DataForm = DataForm()
    notes: tuple[str, ...] = Field(default=(), description="What was assumed to read the data, and what was left out.")


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # that something took


class Timing(Contract):
    """The job's work unit, timed at one micro batch size.

    `seconds` is the sum over the unit's micro batches of the median of their clean timings, of the mean where
    candidates take turns, or, where `timed_share` is below 1, of what their shapes predict; `low` and `high` are the
    ends of its 95% bootstrap interval. `padded_tokens` counts what the device computed, `tokens` leaves padding out.
    """

    micro_batch_size: int
    seconds: Seconds
    low: Seconds
    high: Seconds
    samples: int
    tokens: int
    padded_tokens: int
    steps: int
    passes: int = Field(
        description="Passes over what was timed of the unit; none where a clearly slower trial was given up."
    )
    token_factor: float = Field(
        default=1.0,
        description="How much longer a token takes in a run than in the unit, whose few samples make other batches. "
        "The seconds contain it.",
    )
    timed_share: float = Field(
        default=1.0, description="Share of the unit that was timed; the rest of `seconds` is predicted by its shapes."
    )
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    waiting_seconds: float = Field(default=0.0, description="The part of `seconds` spent waiting for data.")
    update_seconds: float | None = Field(
        default=None, description="The part of `seconds` in which the optimizer clipped gradients and changed weights."
    )
    retries: int = Field(default=0, description="How often the allocator freed its cache and retried meanwhile.")
    clean_share: float | None = Field(
        description="Share of timings known to be undisturbed by others; null where the device cannot tell."
    )
    largest_share_of_others: float | None
    clock_mhz: tuple[int, int] | None = Field(
        default=None, description="Lowest and highest clock of the GPU's multiprocessors during the timing."
    )
    slowed_by: tuple[str, ...] = Field(default=(), description="Why the GPU lowered its clock, a power cap aside.")

    @property
    def is_disturbed(self) -> bool:
        """Whether most of the timings were taken while other processes used the device, as far as it can tell."""
        return self.clean_share is not None and self.clean_share < LEAST_CLEAN

    def scaled(self, factor: float) -> Timing:
        """The timing on a machine where all of it takes so many times as long."""
        names = ("seconds", "low", "high", "waiting_seconds", "update_seconds")
        told = {name: value for name in names if (value := getattr(self, name)) is not None}
        return self.model_copy(update={name: value * factor for name, value in told.items()})

    @property
    def log_error(self) -> float:
        """The standard error of the logarithm of `seconds`, by the interval's width."""
        return math.log(self.high / self.low) / (2 * NORMAL)


class Measurement(Contract):
    """One trial's outcome, its reason, and its figures, in bytes and seconds; losses are means over tokens."""

    configuration: Configuration
    outcome: Outcome
    reason: str = ""
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    largest_micro_batch: int | None = Field(default=None, description="The largest that was run and fitted.")
    predicted_micro_batch: int | None = Field(default=None, description="The largest that should fit, run or not.")
    limited_by: str | None = Field(default=None, description="What stopped the largest micro batch from growing.")
    memory_line: MemoryLine | None = None
    timing: Timing | None = None
    curve: tuple[Timing, ...] = ()
    probes: tuple[Probe, ...] = ()
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    used_before_bytes: int | None = None
    evaluation_batch_size: int | None = None
    evaluation_seconds: float | None = Field(
        default=None, description="Of one evaluation, where the run's evaluations take a share of it that counts."
    )
    load_seconds: float = Field(default=0.0, description="Of a run that has to quantise its weights itself.")
    load_peak_bytes: int | None = None
    unread_bytes: int = Field(
        default=0, description="Of the peak and the memory line: what rows take that a run holds and no trial reads."
    )
    compile_seconds: float = 0.0
    first_call_seconds: float = Field(
        default=0.0,
        description="What the first step of each shape took beyond the next: kernels chosen, memory asked for.",
    )
    check_loss: float | None = None
    check_grad_norm: float | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float | None, ...] = Field(default=(), description="Null where a scaler skipped the step.")
    adapter_excludes: tuple[str, ...] = ()
    adapter_saves: tuple[str, ...] = Field(
        default=(), description="Layers that the checkpoint lacks: drawn, trained whole, and saved with the adapter."
    )
    remote_code: bool = Field(default=False, description="The model runs code of its own.")
    pickled_weights: bool = Field(default=False, description="The model's weights are in pickles only.")
    model_revision: str | None = Field(default=None, description="The commit that was loaded from the hub.")
    weights_dtype: str | None = Field(default=None, description="Of most of the model's weights, without adapters.")
    parameters: int | None = None
    trainable_parameters: int | None = None
    dataset: DatasetFacts | None = None
    lacks: dict[str, str] = Field(
        default_factory=dict, description="lever=choice -> why this model cannot have it, so that it is not tried."
    )
    notes: tuple[str, ...] = ()
    time_spent: dict[str, float] = Field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """Non-padding tokens a second over the work unit."""
        return self.timing.tokens / self.timing.seconds if self.timing else None

    @property
    def once_seconds(self) -> float:
        """What a run takes beside its steps: loading, compiling, and the first call of each shape."""
        return self.load_seconds + self.compile_seconds + self.first_call_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Samples a second over the work unit."""
        return self.timing.samples / self.timing.seconds if self.timing else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds an optimizer step, accumulation included."""
        return self.timing.seconds / self.timing.steps if self.timing else None


class Slice(Contract):
    """A turn of a candidate that was compared in turns with others: the seconds that it took.

    `expected` seconds it would have taken at the candidate's own mean pace, by the shapes of its batches. A neighbour
    that slows the machine slows the slices of all candidates that take turns then.
    """

    turn: int
    seconds: float
    expected: float


class Block(Contract):
    """One candidate's run of the work unit in a block of the verification, in which all candidates take turns."""

    key: str
    block: int
    seed: int
    outcome: Outcome
    reason: str = ""
    timing: Timing | None = None
    slices: tuple[Slice, ...] = Field(default=(), description="Its turns, when the candidates were alive together.")
    process: int | None = Field(
        default=None, description="The block that its process was started for, where that is another one."
    )
    _former = model_validator(mode="before")(without_former("dropout", "losses", "grad_norms"))


def timings_of(blocks: Iterable[Block], key: str) -> list[Timing]:
    """The timings of the configuration with this key in the blocks."""
    return [block.timing for block in blocks if block.key == key and block.timing]


class Soak(Contract):
    """The result of a soak: many real steps of a candidate in a row, with an evaluation and a save."""

    micro_batch_size: int | None = None
    steps: int = 0
    wanted_steps: int = 0
    segments: int = Field(default=1, description="Processes that it ran in: more than one if it was interrupted.")
    retries: int = 0
    growth_bytes: float | None = Field(
        default=None, description="Growth of memory between steps: the last third's median less the first third's."
    )
    worst_case_steps: int = 0
    evaluation_loss: float | None = None
    evaluation_accuracy: float | None = None
    evaluation_scores: dict[str, float] = Field(
        default_factory=dict, description="BLEU and ROUGE-L in percent, where the evaluation generates."
    )
    evaluation_rows: int | None = Field(default=None, description="Validation rows that were evaluated.")
    evaluation_batch_size: int | None = Field(default=None, description="Of them, how many at a time.")
    evaluation_seconds: float | None = Field(default=None, description="Of the evaluation, with generation.")
    generation_seconds: float | None = Field(default=None, description="Of these, for generating and scoring.")
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    last_loss: float | None = Field(default=None, description="The median loss of the last fifth of its steps.")
    lowest_loss: float | None = Field(
        default=None, description="The least median loss of a fifth of its steps, where there are 40 or more."
    )


class Verdict(Contract):
    """A finalist after verification: stable or not, why not, and its speed-up within the blocks."""

    key: str
    stable: bool
    reasons: tuple[str, ...] = ()
    micro_batch_size: int | None = Field(default=None, description="Set when the soak had to lower it.")
    timing: Timing | None = Field(default=None, description="The median of its blocks, the slower if there are two.")
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    slowdown: float | None = Field(
        default=None, description="Its seconds over those of the first of the ranking, in the blocks that both ran in."
    )
    slowdown_low: float | None = Field(default=None, description="The low end of the slowdown's 95% interval.")
    slowdown_high: float | None = None
    _former = model_validator(mode="before")(without_former("largest_loss_difference", "loss_steps"))
    proof: Proof | None = Field(default=None, description="The comparison with a reference, step by step.")
    soak: Soak | None = None


class Verification(Contract):
    """The result of a verification: all blocks, a verdict for each candidate, and the stable ones' keys, best first."""

    baseline_key: str | None
    blocks: tuple[Block, ...]
    verdicts: tuple[Verdict, ...]
    ranking: tuple[str, ...]
    tied: bool = False
    note: str = ""
    seconds: float = 0.0
