"""What a trainer can say of the catalogue: a word for every choice of every lever, and what is lost where it has none.

A target is data: each trainer's file declares one, and everything that is said of it is made from that: the file that
is handed out, its head, the table of docs/exports.md and the list that `dynotune export JOB` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from service.contract.job import JobSpec
from service.contract.recommendation import Contribution, Recommendation
from service.exports.job_settings import on_gpu
from service.exports.merging import merged
from service.levers import LEVERS, circumstances
from service.tasks import TASKS

Verdict = Literal["says", "nearest", "cannot"]


@dataclass(frozen=True)
class Word:
    """How a target says a choice: the same (`says`), something near it (`nearest`), or nothing of it (`cannot`).

    `keys` are what is written into the target's file for it, on top of the target's neutral ones, and `environment`
    what has to be set before it starts. `note` says in what the nearest differs, or why there is nothing. A word holds
    where every entry of `when` (lever, circumstance, `dropout`, `remote_code`, the dtype of the `weights` or the data's
    `columns` -> values) does, and `otherwise` elsewhere.
    """

    verdict: Verdict
    note: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    otherwise: Word | None = None

    def only(self, when: Mapping[str, tuple[str, ...]], otherwise: Word) -> Word:
        """This word where `when` holds, another elsewhere."""
        return replace(self, when=when, otherwise=otherwise)

    def at(self, point: Mapping[str, str]) -> Word:
        """The word that holds at a point, which has levers and circumstances."""
        if self.otherwise is None or all(point.get(name) in values for name, values in self.when.items()):
            return self
        return self.otherwise.at(point)

    def every(self) -> Iterator[Word]:
        """This word and all that may hold in its place."""
        yield self
        if self.otherwise is not None:
            yield from self.otherwise.every()


def says(note: str = "", /, **keys: Any) -> Word:
    """The target does the same."""
    return Word("says", note, keys)


def nearest(note: str, /, **keys: Any) -> Word:
    """The target does something near it; the note says in what that differs."""
    return Word("nearest", note, keys)


def cannot(note: str, /, **keys: Any) -> Word:
    """The target has nothing of the kind; the note says why."""
    return Word("cannot", note, keys)


def alike(word: Word, *choices: str) -> dict[str, Word]:
    """The same word for several choices."""
    return dict.fromkeys(choices, word)


Words = Mapping[str, Mapping[str, Word]]
NOBODY = cannot("nobody has told this export how to say it")
# Trainers take all GPUs that they see, each with the measured micro batches: N GPUs, N times the effective batch.
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


@dataclass(frozen=True)
class Loss:
    """A choice that a target does not say as it was measured.

    `factor` is how many times as long the run takes with this lever back at its baseline, by the trial of that: what it
    costs to lose the choice, and the most that the nearest may cost. None where `reason` says why it is not known.
    """

    lever: str
    choice: str
    word: Word
    factor: float | None
    reason: str


def sentences(losses: Sequence[Loss]) -> list[str]:
    """What is lost and what that costs, a sentence for each cost and for all that is lost for the same reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for loss in losses:
        costs = f"without it a run takes {loss.factor:.2f} times as long" if loss.factor else loss.reason
        if loss.word.verdict == "nearest" and loss.factor:
            costs = f"at worst a run takes {loss.factor:.2f} times as long, as without it"
        found.setdefault((loss.word.verdict, loss.word.note, costs), []).append(f"{loss.lever}={loss.choice}")
    return [
        f"{', '.join(names)}{', the nearest' if verdict == 'nearest' else ''}: {note}; {costs}"
        for (verdict, note, costs), names in found.items()
    ]


@dataclass(frozen=True)
class Target:
    """A trainer, or a program that starts one: its version, what that pins, and what it can say.

    `neutral` are the keys of all levers with the values that change nothing. They are always written, because a trainer
    seldom does nothing where a key is unset. `run` starts the training from the exported file. `differs` are sentences
    on what the trainer does in another way whatever was chosen. `tasks` is what it trains; None is every task, where
    the file holds their code or starts a script that does. `shaped` brings the keys into the form of the file. `rest`
    is the word for all that `words` does not name, such as what a script does itself.
    """

    title: str
    package: str
    version: str
    pins: tuple[str, ...]
    run: str
    neutral: Mapping[str, Any]
    words: Words
    differs: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = ("causal-lm",)
    shaped: Callable[[dict[str, Any]], dict[str, Any]] = dict
    rest: Word | None = None

    def refuses(self, recommendation: Recommendation) -> str | None:
        """A sentence where the target has nothing for the job's task, else None."""
        task = recommendation.spec["task"]
        if self.tasks is None or task in self.tasks:
            return None
        return (
            f"{self.title} has no {task}, or none that this export knows how to ask for; train.py and trainer have it."
        )

    def word(self, lever: str, choice: str) -> Word:
        """The word for a choice. What the target does not name has the word that the catalogue's file gives it."""
        return self.words.get(lever, {}).get(choice) or self.rest or _by_catalogue(lever, choice)

    def spoken(self, recommendation: Recommendation) -> dict[str, Word]:
        """Lever -> the word that holds for the recommended choice, of all levers that have an effect."""
        spec = JobSpec.model_validate(recommendation.spec)
        chosen, data = recommendation.configuration, recommendation.dataset
        point = {
            **chosen.levers,
            **circumstances(spec, chosen.method),
            "dropout": "on" if spec.lora.dropout else "off",
            "remote_code": "on" if recommendation.evidence.measurement.remote_code else "off",
            "weights": recommendation.evidence.measurement.weights_dtype or "",
            "columns": "+".join(sorted(set(data.columns) - TASKS[spec.task].beside.keys())) if data else "",
        }
        return {
            name: self.word(name, choice).at(point)
            for name, choice in chosen.levers.items()
            if name in LEVERS and LEVERS[name].applies(chosen.method, spec.task)
        }

    def keys(self, recommendation: Recommendation) -> dict[str, Any]:
        """What is written for the levers: the neutral keys, and over them those of each word."""
        found = dict(self.neutral)
        for word in self.spoken(recommendation).values():
            found = merged(found, word.keys)
        return self.shaped(found)

    def command(self, recommendation: Recommendation) -> str:
        """What starts the training, with what has to be in its environment."""
        given = dict(ONE_GPU) if on_gpu(recommendation) else {}
        for word in self.spoken(recommendation).values():
            given |= word.environment
        return " ".join([*(f"{name}={value}" for name, value in given.items()), self.run])

    def losses(self, recommendation: Recommendation) -> list[Loss]:
        """What the target does not say as it was measured, the dearest first."""
        known = {one.lever: one for one in recommendation.contributions}
        found = []
        for name, word in self.spoken(recommendation).items():
            if word.verdict != "says":
                choice = recommendation.configuration.levers[name]
                found.append(Loss(name, choice, word, *_cost(name, choice, known.get(name))))
        return sorted(found, key=lambda loss: (loss.word.verdict != "cannot", -(loss.factor or 0.0)))

    def slower(self, recommendation: Recommendation) -> float:
        """How many times as long the run takes without what cannot be said, by the factors that are known: at least 1.

        Levers work together, so that the product of what each brings by itself is an estimate.
        """
        lost = [one.factor for one in self.losses(recommendation) if one.word.verdict == "cannot"]
        return math.prod(max(1.0, factor) for factor in lost if factor)


def _by_catalogue(name: str, choice: str) -> Word:
    """The word for a choice that a target does not name: nothing has to be said of a baseline that sets nothing.

    All else is lost, also other baselines, as each trainer has its own default optimizer and precision.
    """
    if name not in LEVERS:
        return NOBODY
    one = LEVERS[name].choice(choice)
    sets = one.function or one.options or one.training_arguments or one.from_pretrained
    if choice == LEVERS[name].baseline and not sets:
        return says()
    instead = one.not_expressible
    return cannot(f"{NOBODY.note}; for transformers' Trainer: {instead}") if instead else NOBODY


def _cost(name: str, choice: str, known: Contribution | None) -> tuple[float | None, str]:
    """(the factor of a lever's contribution, or else why there is none)."""
    if known is not None and known.factor is not None:
        return known.factor, ""
    if known is not None:
        return None, f"what it brings is not known ({known.reason})"
    if choice == LEVERS[name].baseline:
        return None, "what that costs was not measured"
    return None, "what it brings was not measured"
