"""What a lever is. All that is said of one is data, declared in its own file, so that it can be shown and tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from service.contract.hardware import HardwareFacts

Stage = Literal[
    "data", "load", "base", "model", "compiled", "optimizer", "batching", "loading", "quantised", "evaluation"
]
# Stages of which the recipe has one function: the one lever that each belongs to.
OWN_STAGES: dict[Stage, str] = {
    "optimizer": "optimizer",
    "batching": "batching",
    "loading": "loading",
    "quantised": "quantization",
    "evaluation": "evaluation",
}


@dataclass(frozen=True)
class Need:
    """Something that the worker must have; `sentence` says what is missing and what to do about it.

    A soft need only keeps a choice out of the search: asked for by name, the choice still runs. Where such a need is
    `slow` and unmet, the choice takes longer than its effect says, by an unknown factor: it is emulated, or takes cores
    from the training. `packages` names the Python packages of which one meets the need, `device` the only kind of
    device that can ever meet it.
    """

    met: Callable[[HardwareFacts], bool]
    sentence: str
    soft: bool = False
    slow: bool = False
    packages: tuple[str, ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class Memory:
    """What a choice does to memory by its definition. Estimates begin with it; measurements replace it.

    Bytes follow from the formats. The factors on activations are chosen, about right at best: as soon as trials ran out
    of memory or told their peaks, what fits is learnt from these (docs/decisions/0035).

    `activations` is a factor on the bytes a sample takes, relative to the lever's baseline of 32 bits; `half` replaces
    it, if given, for a checkpoint whose weights have 16 bits. The others are bytes on the device: `state` of the
    optimizer for each trained parameter, `embedding_state` for those of embeddings where it differs, and `weight` for
    each quantised weight. `gradient_copies` exist at once during the optimizer's update. With
    `keeps_dequantised`, all weights stay dequantised for the backward pass, not only those of the layer at hand.
    """

    activations: float = 1.0
    half: float | None = None
    state: float = 8.0  # AdamW's two moments in fp32
    embedding_state: float | None = None
    weight: float | None = None
    gradient_copies: int = 1
    keeps_dequantised: bool = False

    def kept(self, is_half: bool) -> float:
        """The factor on the bytes a sample takes, of a checkpoint whose weights have 16 bits or not."""
        return self.half if is_half and self.half is not None else self.activations


@dataclass(frozen=True)
class Effect:
    """What a choice is expected to do to the seconds of a run: a factor on what the lever's baseline takes.

    The search begins with it, and corrects it by what it measures; `spread` is the standard deviation of its logarithm.
    Where no source is beside them, these figures are guesses from published comparisons: a wrong one costs trials, and
    not the answer, which is measured (docs/decisions/0019).
    The first of these that is given and applies replaces `factor`: `limited` where a device's own memory holds the
    micro batch smaller than the job could use, `host` on a device without memory of its own, `half` where the
    checkpoint's weights have 16 bits. `padding` is the share of all padding that the choice leaves out; the data's
    lengths tell what it costs. `once` are the seconds that the choice adds before a run's first step, as to compile.
    """

    factor: float = 1.0
    spread: float = 0.05
    limited: float | None = None
    host: float | None = None
    half: float | None = None
    padding: float = 0.0
    once: float = 0.0


@dataclass(frozen=True)
class Together:
    """What choices are expected to do to a run's seconds beyond what each does by itself: a factor.

    It counts where every entry of `when` (lever -> choices) holds.
    """

    when: Mapping[str, tuple[str, ...]]
    factor: float
    reason: str


@dataclass(frozen=True)
class Asked:
    """TrainingArguments that together ask for a choice in a user's own baseline. The user is told `note` then."""

    arguments: Mapping[str, Any]
    note: str = ""

    def holds(self, mine: Mapping[str, Any]) -> bool:
        """Whether a user's TrainingArguments say all of this; any value that is true in Python sets a flag."""
        wanted = self.arguments.items()
        return all(bool(mine.get(name)) if value is True else mine.get(name) == value for name, value in wanted)


@dataclass(frozen=True)
class Choice:
    """One way to set a lever, how it is applied, and what the exporters write for it."""

    name: str  #: unique within its lever
    summary: str  #: what it does, for docs/levers.md and `dynotune levers`
    needs: tuple[Need, ...] = ()  #: what the worker must have
    changes_numerics: bool = False  #: results differ by rounding only
    changes_order: bool = False  #: samples come in another order
    changes_learning: bool = False  #: what is learnt may differ: searched with `search.quality: allow` only
    searched: bool = True  #: if not, it is tried only when a job fixes it, or by `searched_of_half`
    searched_of_half: bool = False  #: searched even so, where the checkpoint's weights have 16 bits
    function: str | None = None  #: one of the lever's functions, which applies it; None: `options` are read as data
    options: Mapping[str, Any] = field(default_factory=dict)  #: what `function` is called with, or data
    memory: Memory = Memory()  #: what it does to memory by its definition
    effect: Effect = Effect()  #: what the search expects it to do to the seconds, before it measures
    estimate_rank: int | None = None  #: a memory estimate takes the lowest rank that the device can have
    drops_attention: bool = True  #: whether an attention kernel can apply the model's dropout
    evades_cap: bool = False  #: whether it keeps memory that a cap on torch's memory does not limit
    supported_by: tuple[str, ...] = ()  #: attributes of transformers' model class, all true if it can have the kernel
    asked_by: tuple[Asked, ...] = ()  #: which TrainingArguments of a user's own baseline ask for it
    training_arguments: Mapping[str, Any] = field(default_factory=dict)  #: by which Trainer gets it
    from_pretrained: Mapping[str, Any] = field(default_factory=dict)  #: arguments of `from_pretrained`
    adapter_from_pretrained: Mapping[str, Any] = field(default_factory=dict)  #: more of them, for LoRA and QLoRA
    not_expressible: str | None = None  #: why Trainer has no setting for it, or what its user can do instead

    def missing(self, facts: HardwareFacts, asked: bool = False) -> str | None:
        """The sentence of the first unmet need, or None. Soft needs don't count when `asked` by name."""
        for need in self.needs:
            if not need.met(facts) and not (need.soft and asked):
                return need.sentence
        return None

    def is_slowed(self, facts: HardwareFacts) -> bool:
        """Whether an unmet need makes the choice slower than its effect says, where it is asked for by name."""
        return any(need.slow and not need.met(facts) for need in self.needs)

    def barred(self, device: str) -> bool:
        """Whether no device of that kind can ever take the choice; `auto` stands for any kind."""
        return device != "auto" and any(need.device not in (None, device) for need in self.needs)


@dataclass(frozen=True)
class Exclusion:
    """A combination that is never tried: every entry of `when` (lever or circumstance -> values) holds.

    Circumstances are what a job has beside its levers: CIRCUMSTANCES of service/levers/__init__.py, with their values.
    Where the search has to resolve an exclusion between two levers, it sets the one named last back to its baseline.
    """

    when: Mapping[str, tuple[str, ...]]
    reason: str
    reference: str

    def hits(self, point: Mapping[str, str]) -> bool:
        """Whether a point (levers and circumstances) is this combination."""
        return all(point.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True)
class Lever:
    """One dimension of the search. `baseline` is what a user of Trainer gets by default.

    `stage` is when its functions are called: before the model is loaded (`load`), on the loaded model (`base`), on
    the model with its adapter (`model`), after the probe (`compiled`), to make the `optimizer`, the steps (`batching`),
    their batches (`loading`) or the configuration of the `quantised` base, around an `evaluation`, or never, where
    choices are data. `order` is the lever's place in the catalogue, and among the levers of its stage.

    `simulated` lists the choices that an estimate can run on fake tensors (None: all); it takes the baseline for the
    others. `reference` is the choice that stable numerics are judged against. `families` are groups of choices that
    are expected to change the seconds by nearly the same factor, so that one that was measured tells of the rest;
    `together` is what choices of several levers are expected to do beyond what each does by itself. With
    `changes_evaluation`, the choices make an evaluation take another amount of memory than training does; without
    `touches_memory`, they do next to nothing to a step's peak. With `may_do_nothing`, a choice that a model lacks is no
    mistake where a job asks for it: it is the same as the baseline there.
    """

    name: str
    summary: str
    choices: tuple[Choice, ...]
    baseline: str
    source: str
    order: int = 1000
    stage: Stage = "data"
    methods: tuple[str, ...] = ("lora", "qlora", "full")
    tasks: tuple[str, ...] | None = None
    exclusions: tuple[Exclusion, ...] = ()
    families: tuple[tuple[str, ...], ...] = ()
    together: tuple[Together, ...] = ()
    simulated: tuple[str, ...] | None = None
    reference: str | None = None
    changes_evaluation: bool = False
    touches_memory: bool = True
    may_do_nothing: bool = False

    def applies(self, method: str, task: str) -> bool:
        """Whether the lever has an effect with that method and task; where it has none, it stays at its baseline."""
        return method in self.methods and (self.tasks is None or task in self.tasks)

    def choice(self, name: str) -> Choice:
        """The choice of that name; KeyError when there is none."""
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all choices."""
        return tuple(choice.name for choice in self.choices)

    def simulation(self, choice: str) -> str:
        """The choice that an estimate computes with: the given one, or the baseline where that cannot be simulated."""
        return choice if self.simulated is None or choice in self.simulated else self.baseline

    def ranked(self, facts: HardwareFacts) -> tuple[str, ...]:
        """The names of the choices with an `estimate_rank` that this hardware has, best first."""
        ranks = {one.name: one.estimate_rank for one in self.choices if one.missing(facts) is None}
        return tuple(sorted((name for name in ranks if ranks[name] is not None), key=lambda name: ranks[name] or 0))


CUDA = Need(
    lambda facts: facts.capability is not None, "needs an NVIDIA GPU with CUDA; this worker has none", device="cuda"
)


def cuda() -> Need:
    """An NVIDIA GPU."""
    return CUDA


def host(why: str) -> Need:
    """Any device but an NVIDIA GPU: there a choice is not searched because of `why`, but runs if asked for by name."""
    return Need(lambda facts: facts.capability is None, f"is not searched on an NVIDIA GPU: {why}", soft=True)


def package(name: str, why: str, instead: str | None = None) -> Need:
    """A package that imports on the worker; another one will do in its place where `instead` names it."""
    sentence = f"needs {name} ({why}): pip install {name}{f' or {instead}' if instead else ''} on the worker"
    names = (name, instead) if instead else (name,)
    return Need(lambda facts: any(map(facts.has, names)), sentence, packages=names)


def native_bf16() -> Need:
    """bf16 in hardware; emulated it runs, but slower than fp32, so it is not searched."""
    return Need(
        lambda facts: facts.bf16_native,
        "needs bf16 in hardware (avx512_bf16, amx_bf16 or compute capability 8.0 or newer); emulated it is slower than "
        "fp32: name it under search.fixed or search.levers to try it all the same",
        soft=True,
        slow=True,
    )


def no_native_bf16() -> Need:
    """Hardware without bf16. With it, bf16 is as fast as fp16 and needs no gradient scaler.

    On an H200 it was 1.2 times as fast (`benchmarks/results/nvidia-h200-2026-11-26/tune-1b.json`).
    """
    return Need(
        lambda facts: not facts.bf16_native,
        "is not searched where bf16 is in hardware: bf16 is as fast there and needs no gradient scaler",
        soft=True,
    )


def varlen_kernel() -> Need:
    """A GPU that torch's variable-length attention runs on; elsewhere it is exact and slow, so it is not searched."""
    return Need(
        lambda facts: facts.capability is not None and facts.capability >= (8, 0),
        "needs a GPU of compute capability 8.0 or newer; elsewhere it runs sample by sample, exact and slow: name it "
        "under search.fixed or search.levers to try it all the same",
        soft=True,
        slow=True,
    )


def hopper() -> Need:
    """A GPU of the Hopper generation: newer ones cannot run what was written for it."""
    return Need(
        lambda facts: facts.capability is not None and facts.capability[0] == 9,
        "needs a Hopper GPU (compute capability 9.0), which it is written for",
    )


def capability(major: int, minor: int = 0) -> Need:
    """A CUDA compute capability of at least that much."""
    return Need(
        lambda facts: facts.capability is not None and facts.capability >= (major, minor),
        f"needs a GPU of compute capability {major}.{minor} or newer",
    )
