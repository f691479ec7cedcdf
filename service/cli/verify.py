"""`dynotune verify` and `dynotune compare`: does a recommendation still hold, and in what do two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json
from rich.console import Console

from service import stored
from service.cli.output import console as new_console
from service.cli.tune import run
from service.contract.base import Contract
from service.contract.job import JobSpec, RepeatedSearch
from service.contract.objective import minimises_memory
from service.contract.recommendation import Recommendation
from service.errors import Misconfigured

# Share of the older speed-up or memory peak: a smaller loss counts as none. Chosen, not measured: twice the 5% within
# which a verification knows each of the two speed-ups.
WITHIN = 0.10
SHOWN = ("name", "memory_gib", "cores", "driver", "capability")


class Comparison(Contract):
    """In what a newer recommendation differs from an older one, and whether the older one's promise is kept."""

    holds: bool
    reasons: tuple[str, ...]
    speedup: tuple[float | None, float | None]
    tokens_per_second: tuple[float, float]
    micro_batch_size: tuple[int, int]
    peak_bytes: tuple[int | None, int | None] = (None, None)
    levers: dict[str, tuple[str | None, str | None]]
    environment: dict[str, tuple[Any, Any]]

    def lines(self) -> list[str]:
        """The comparison as lines of text."""
        old, new = (f"{one:.2f}x" if one else "none" for one in self.speedup)
        found = [
            f"speed-up: {old} then, {new} now",
            f"tokens/s: {self.tokens_per_second[0]:,.0f} then, {self.tokens_per_second[1]:,.0f} now",
        ]
        if self.micro_batch_size[0] != self.micro_batch_size[1]:
            found.append("micro batch: {} then, {} now".format(*self.micro_batch_size))
        if all(self.peak_bytes):
            found.append("peak GiB: {:.2f} then, {:.2f} now".format(*((one or 0) / 2**30 for one in self.peak_bytes)))
        for name, (before, now) in (*self.levers.items(), *self.environment.items()):
            found.append(f"{name}: {before} then, {now} now")
        return [*found, *self.reasons, "It holds." if self.holds else "It does not hold."]


def read(path: Path) -> Recommendation:
    """A recommendation.json; Misconfigured when the file holds none."""
    try:
        text = path.read_bytes()
        return stored.recommendation(from_json(text))
    except OSError as error:
        raise Misconfigured(f"{path}: {error.strerror}") from error
    except ValueError as error:
        which = " of this version" if b'"schema_version"' in text else ""
        how = "" if which else "; `dynotune export JOB -f json -o recommendation.json` writes one"
        raise Misconfigured(f"{path} is no recommendation.json{which} ({_what(error)}){how}") from error


def _what(error: ValueError) -> str:
    """What is wrong with a file, and where in it."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def verify(path: Path, minutes: float, as_json: bool, console: Console) -> int:
    """Measure a recommendation again and say whether it holds; the exit code: 0 if so, 1 if not, 130 interrupted."""
    old = read(path)
    done = run(job_of(old, minutes), new_console(quiet=True) if as_json else console)
    if done.best is None or done.interrupted:
        return done.code
    return show(compare(old, done.best), as_json, console)


def show(found: Comparison, as_json: bool, console: Console) -> int:
    """Print a comparison; 0 if the older recommendation holds, else 1."""
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        for line in found.lines():
            console.print(line, soft_wrap=True)
    return 0 if found.holds else 1


def job_of(found: Recommendation, minutes: float) -> dict[str, Any]:
    """The job that measures two configurations again: the recommended one at its own sizes, and its baseline."""
    made, spec = found.configuration, JobSpec.model_validate(found.spec)
    search = spec.search.model_copy(
        update={
            "fixed": dict(made.levers),
            "levers": None,
            "trials": 2,
            "minutes": minutes,
            # The level also says how many steps `grouped` sorts at a time, which is part of what was measured.
            "verify": "quick" if spec.search.verify == "quick" else "standard",
            "quality": "allow",  # a choice that the user had allowed then
            "again": RepeatedSearch(
                effective_batch_size=made.effective_batch_size,
                micro_batch_size=made.micro_batch_size,
                learning_rate=made.learning_rate,
            ),
        }
    )
    job = spec.model_copy(update={"method": (made.method,), "search": search})
    return job.model_dump(mode="json", exclude_none=True)


def compare(old: Recommendation, new: Recommendation) -> Comparison:
    """Compare two recommendations for the same job; the newer one may come from another machine.

    Misconfigured where their jobs differ in task, methods or objective. Which method is the best may change.
    """
    others = differences(_kind(old), _kind(new))
    if others:
        told = "; ".join(f"{name} {before} then, {now} now" for name, (before, now) in others.items())
        raise Misconfigured(f"These answer different jobs ({told}), so there is nothing to compare.")
    reasons = []
    before, now = old.evidence.speedup, new.evidence.speedup
    if new.stability.stable is False:
        reasons.append(f"It is not stable any more: {'; '.join(new.stability.reasons)}.")
    if before and now and now < before * (1 - WITHIN) and now < (old.evidence.speedup_low or before):
        reasons.append(f"The speed-up is {now / before - 1:+.0%} away, and below the older interval.")
    if before and now is None:
        reasons.append("There is no baseline to compare with any more.")
    had, has = old.evidence.peak_bytes, new.evidence.peak_bytes
    if minimises_memory(JobSpec.model_validate(old.spec)) and had and has and has > had * (1 + WITHIN):
        reasons.append(f"The peak of its memory is {has / had - 1:+.0%} away.")
    ours, theirs = old.configuration, new.configuration
    return Comparison(
        holds=not reasons,
        reasons=tuple(reasons),
        speedup=(before, now),
        tokens_per_second=(old.evidence.tokens_per_second, new.evidence.tokens_per_second),
        micro_batch_size=(ours.micro_batch_size, theirs.micro_batch_size),
        peak_bytes=(had, has),
        levers=differences(ours.levers, theirs.levers),
        environment=differences(surroundings(old), surroundings(new)),
    )


def _kind(found: Recommendation) -> dict[str, Any]:
    """What has to be the same for speed-ups to be compared at all."""
    spec = JobSpec.model_validate(found.spec)
    return {"task": spec.task, "method": ", ".join(sorted(spec.method)), "objective": spec.search.objective}


def surroundings(found: Recommendation) -> dict[str, Any]:
    """What of the environment may change a speed: the device, and the versions of what computes."""
    environment = found.environment
    versions, packages = environment.get("versions") or {}, environment.get("packages") or {}
    return {name: environment.get(name) for name in SHOWN} | dict(versions) | dict(packages)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (older value, newer value) where they differ."""
    names = dict.fromkeys((*old, *new))
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
