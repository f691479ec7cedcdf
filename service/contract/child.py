"""What a worker asks of a child process, and what the child answers: two discriminated unions, sent as JSON.

A child may run code that comes with a model, so the worker parses the child's messages and never unpickles them.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from service.contract.base import Contract
from service.contract.estimate import Estimate, EstimateRequest, Known
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Block, DatasetFacts, Measurement, Outcome, Probe, Soak
from service.contract.paths import Roots
from service.contract.replay import Replay
from service.contract.states import ProbePhase
from service.contract.task import TrialRequest
from service.text import storable

OUTPUT = "output.log"  # what a child prints, in its scratch folder, which is removed when it has ended


class Workplace(Contract):
    """What a child may use: the device to measure on, the folders to read and write, and what it may execute."""

    device: str
    index: int = 0
    data_roots: tuple[Path, ...]
    hub_cache: Path
    uploads: Path | None = Field(default=None, description="Data that users sent to the control plane.")
    job_cache: Path | None = Field(default=None, description="What later children of the job read: tokens, soaks.")
    quantised_weights: Path | None = Field(default=None, description="Quantised weights stored for later trials.")
    allow_pickle: bool = False
    allow_remote_code: bool = False

    @property
    def roots(self) -> Roots:
        """The folders that local models and data may come from."""
        return Roots(self.data_roots, self.hub_cache, self.uploads)


STAYS: bool = Field(default=False, description="The child may wait for another request, with its model loaded.")


class RunTrial(Contract):
    """Measure one configuration. `known` are the probes of this trial's earlier children, failed ones included."""

    kind: Literal["trial"] = "trial"
    workplace: Workplace
    spec: JobSpec
    trial: TrialRequest
    known: tuple[Probe, ...] = ()
    only_probe: bool = Field(default=False, description="Find the largest micro batch and time nothing.")
    stays: bool = Field(default=False, description="Wait for blocks in turns after the trial, with its trained model.")


class RunBlock(Contract):
    """Train the work unit with a candidate of the verification, under the block's seed.

    With `in_turns` the child trains a part of it at each `Turn` that it is told, and waits between them.
    """

    kind: Literal["block"] = "block"
    workplace: Workplace
    spec: JobSpec
    candidate: Measurement
    block: int
    seed: int
    in_turns: bool = False
    stays: bool = STAYS


class RunSoak(Contract):
    """Soak a candidate until all steps of the soak are done or `seconds` have passed.

    `state` is the file that tells how far the soak has come, so that one that was interrupted goes on from there.
    Whoever asks deletes it when the soak failed: the next one has to run what failed again.
    """

    kind: Literal["soak"] = "soak"
    workplace: Workplace
    spec: JobSpec
    candidate: Measurement
    seed: int
    seconds: float
    state: Path | None = None


FIRST_ROWS = 2  # most rows of a micro batch of a replay's step 0, where it has samples of its own


class RunReplay(Contract):
    """Train `count` optimizer steps from the first weights on, of `samples_a_step` samples or of those in `steps`.

    Step 0 has `first_samples` where that is more, in micro batches of FIRST_ROWS rows at most. The steps of a
    candidate's replay are given to the reference, which trains them one sample a row. Short rows share a micro batch,
    up to the tokens of as many longest samples as the configuration's micro batch has.
    """

    kind: Literal["replay"] = "replay"
    workplace: Workplace
    spec: JobSpec
    candidate: Measurement
    seed: int
    count: int
    samples_a_step: int
    first_samples: int = Field(default=0, description="Of step 0, where it has more than the others; else 0.")
    steps: tuple[tuple[int, ...], ...] = ()
    stirs: bool = Field(default=False, description="The adapter's matrices B, which begin at 0, are drawn.")
    stays: bool = STAYS


class RunEstimate(Contract):
    """Estimate a job's memory from shapes alone."""

    kind: Literal["estimate"] = "estimate"
    workplace: Workplace
    request: EstimateRequest
    facts: HardwareFacts
    known: tuple[Known, ...] = ()


ChildRequest = Annotated[RunTrial | RunBlock | RunSoak | RunReplay | RunEstimate, Field(discriminator="kind")]


class Progress(Contract):
    """What the child is doing, as text for the job's user."""

    kind: Literal["progress"] = "progress"
    text: str


class ProbeStarted(Contract):
    """A step of this micro batch begins. If the child runs out of memory next, this size did not fit."""

    kind: Literal["probe_started"] = "probe_started"
    micro_batch_size: int
    phase: ProbePhase = ProbePhase.training


class ProbeDone(Contract):
    """A step of this micro batch has fitted in memory; `probe` has its peaks."""

    kind: Literal["probe"] = "probe"
    probe: Probe


class Built(Contract):
    """The model and the data of a trial are there. These are fields of its Measurement, however it ends.

    `prepare_seconds`, which a job's first process spends for all later ones, is no field there but a phase.
    """

    kind: Literal["built"] = "built"
    dataset: DatasetFacts
    capacity_bytes: int
    used_before_bytes: int
    load_seconds: float
    load_peak_bytes: int | None
    unread_bytes: int
    weights_dtype: str
    parameters: int
    trainable_parameters: int
    lacks: dict[str, str]
    model_revision: str | None = None
    prepare_seconds: float = 0.0

    def fields(self) -> dict[str, Any]:
        """The Measurement's fields by their names."""
        others = ("kind", "prepare_seconds")
        return {name: getattr(self, name) for name in type(self).model_fields if name not in others}


class Result(Contract):
    """The message of a child that carried out its request; the request's kind decides which field is set.

    It is the child's last one, unless the child `stays`: then it keeps its model and waits for `RunAgain`.
    """

    kind: Literal["result"] = "result"
    measurement: Measurement | None = None
    block: Block | None = None
    soak: Soak | None = None
    replay: Replay | None = None
    estimate: Estimate | None = None
    stays: bool = False


class OutOfMemory(Contract):
    """The last message of a child that ran out of memory.

    `used_bytes` is the child's own peak, and `others_bytes` what other processes use of a GPU.
    """

    kind: Literal["out_of_memory"] = "out_of_memory"
    reason: Annotated[str, BeforeValidator(storable)]
    used_bytes: int | None = None
    others_bytes: int = 0


class ChildFailed(Contract):
    """The last message of a child that could not carry out its request."""

    kind: Literal["failed"] = "failed"
    outcome: Outcome
    reason: Annotated[str, BeforeValidator(storable)]
    whole_job: bool = Field(default=False, description="No configuration of this job can run; its user has to act.")
    unsafe: bool = Field(default=False, description="Memory would not last at this size; a smaller one may fit.")
    lacks: dict[str, str] = Field(default_factory=dict, description="As in a Measurement.")


class Preparing(Contract):
    """A job's first child on a worker begins with what no later one does: to download model and data, and tokenise.

    Until `Prepared` the clock of its time limit stands still: how long that takes says nothing of a configuration.
    """

    kind: Literal["preparing"] = "preparing"


class Prepared(Contract):
    """What `Preparing` announced is done."""

    kind: Literal["prepared"] = "prepared"


class Paused(Contract):
    """A child that trains in turns is ready for its first turn, or has ended the one that it was given."""

    kind: Literal["paused"] = "paused"


class Turn(Contract):
    """An order to a child that trains in turns: train until so many passes over the unit are done, then pause.

    A turn that is `last` is answered with the result.
    """

    kind: Literal["turn"] = "turn"
    passes: float = Field(gt=0)
    last: bool = False


class RunAgain(Contract):
    """An order to a child that stays: carry out another request, which trains the same model from its beginning.

    It differs from the one before only in the seed, the learning rate, and which block or steps are trained. A trial's
    child is asked only for blocks in turns, and goes on training its model as it is.
    """

    kind: Literal["again"] = "again"
    request: Annotated[RunBlock | RunReplay, Field(discriminator="kind")]


Order = Annotated[Turn | RunAgain, Field(discriminator="kind")]

ChildMessage = Annotated[
    Progress | Preparing | Prepared | Built | Paused | ProbeStarted | ProbeDone | Result | OutOfMemory | ChildFailed,
    Field(discriminator="kind"),
]
REQUEST: TypeAdapter[ChildRequest] = TypeAdapter(ChildRequest)
MESSAGE: TypeAdapter[ChildMessage] = TypeAdapter(ChildMessage)
ORDER: TypeAdapter[Order] = TypeAdapter(Order)


def doing(message: ChildMessage) -> str | None:
    """What the child is doing now, as text for the job's user, or None where the message does not say."""
    if isinstance(message, Progress):
        return message.text
    if isinstance(message, Preparing):
        return "downloading and reading the model and the data"
    if isinstance(message, Prepared):
        return "loading"
    return f"probing micro batch {message.micro_batch_size}" if isinstance(message, ProbeStarted) else None


class EndingKind(StrEnum):
    """How a child ended: by its own last message (the first three), or as its worker saw from outside.

    `ended` means that the worker killed it because its task was cancelled, stopped or lost.
    """

    result = "result"
    out_of_memory = "out_of_memory"
    failed = "failed"
    signal = "signal"
    exit = "exit"
    timed_out = "timed_out"
    malformed = "malformed"
    out_of_disk = "out_of_disk"
    ended = "ended"
