"""What a lever is: choices, needs and exclusions as data, so that they can be shown, checked and tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from service.contract.hardware import HardwareFacts

Stage = Literal[
    "data", "load", "base", "model", "compiled", "optimizer", "batching", "loading", "quantised", "evaluation"
]


@dataclass(frozen=True)
class Need:
    """Something the worker must have; `sentence` says what is missing and what to do.

    A soft need only keeps a choice out of the search: asked for by name, it still runs.
    """

    met: Callable[[HardwareFacts], bool]
    sentence: str
    soft: bool = False


@dataclass(frozen=True)
class Choice:
    """One way to set a lever, how it is applied, and what the exporters write for it.

    `function` is one of service/exports/templates/levers/<lever>.py, called with `options`; where there is none, the
    options are data for the code that asks. `adapter_from_pretrained` comes on top of `from_pretrained` where the
    base is frozen (LoRA, QLoRA). What `changes_learning` is searched with `search.quality: allow` only.
    """

    name: str
    summary: str
    needs: tuple[Need, ...] = ()
    changes_numerics: bool = False
    changes_order: bool = False
    changes_learning: bool = False
    searched: bool = True
    function: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    from_pretrained: Mapping[str, Any] = field(default_factory=dict)
    adapter_from_pretrained: Mapping[str, Any] = field(default_factory=dict)
    not_expressible: str | None = None

    def missing(self, facts: HardwareFacts, asked: bool = False) -> str | None:
        """The sentence of the first unmet need, or None. Soft needs don't count when `asked` by name."""
        for need in self.needs:
            if not need.met(facts) and not (need.soft and asked):
                return need.sentence
        return None


@dataclass(frozen=True)
class Lever:
    """One dimension of the search. `baseline` is what a Trainer user gets without thinking.

    `stage` is when its functions are called: before the model is loaded (`load`), on the loaded model (`base`), on
    the model with its adapter (`model`), after the probe (`compiled`), to make the `optimizer`, the steps (`batching`),
    their batches (`loading`) or the configuration of the `quantised` base, around an `evaluation`, or never, where
    choices are data.
    """

    name: str
    summary: str
    choices: tuple[Choice, ...]
    baseline: str
    source: str
    stage: Stage = "data"
    methods: tuple[str, ...] = ("lora", "qlora", "full")
    tasks: tuple[str, ...] = ("causal-lm", "sequence-classification", "masked-lm")

    def applies(self, method: str, task: str) -> bool:
        """Whether the lever means anything there; elsewhere it stays at its baseline."""
        return method in self.methods and task in self.tasks

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


@dataclass(frozen=True)
class Exclusion:
    """A combination that is never tried, when every entry of `when` holds: lever or circumstance -> values.

    Circumstances are `task`, `method`, `clipping` (on or off) and `loss_on`.
    """

    when: Mapping[str, tuple[str, ...]]
    reason: str
    reference: str

    def hits(self, point: Mapping[str, str]) -> bool:
        """Whether a point (levers and circumstances) is this combination."""
        return all(point.get(name) in values for name, values in self.when.items())


CUDA = Need(lambda facts: facts.device == "cuda", "needs an NVIDIA GPU with CUDA; this worker measures on a CPU")


def cuda() -> Need:
    """An NVIDIA GPU."""
    return CUDA


def needs_cuda(choice: Choice) -> bool:
    """Whether no CPU can ever take the choice."""
    return CUDA in choice.needs


def package(name: str, why: str) -> Need:
    """A package that imports on the worker."""
    return Need(lambda facts: facts.has(name), f"needs {name} ({why}): pip install {name} on the worker")


def native_bf16() -> Need:
    """bf16 in hardware; emulated it runs, but slower than fp32, so it is not searched."""
    return Need(
        lambda facts: facts.bf16_native,
        "bf16 is emulated on this device (no avx512_bf16, amx_bf16 or compute capability 8.0) and slower than "
        "fp32; name it under search.fixed or search.levers to try it all the same",
        soft=True,
    )


def varlen_kernel() -> Need:
    """A GPU that torch's variable-length attention runs on; elsewhere it is exact and slow, so it is not searched."""
    return Need(
        lambda facts: facts.device == "cuda" and facts.capability is not None and facts.capability >= (8, 0),
        "needs a GPU of compute capability 8.0; elsewhere it runs sample by sample, exact and slow: name it under "
        "search.fixed or search.levers to try it all the same",
        soft=True,
    )


def capability(major: int, minor: int = 0) -> Need:
    """A CUDA compute capability of at least that much."""
    return Need(
        lambda facts: facts.capability is not None and facts.capability >= (major, minor),
        f"needs a GPU of compute capability {major}.{minor} or newer",
    )
