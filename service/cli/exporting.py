"""What to do with a recommendation: which export is for whom, the command for it, and what is lost there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from service.contract.recommendation import Recommendation, Winner
from service.errors import DynotuneError, Misconfigured
from service.exports import EXPORTS, Export
from service.exports.words import Target, sentences

EVERYTHING = "nothing"
# Of the TrainingArguments, those that are as the job has them, whatever is measured.
OF_THE_JOB = {
    *("num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "seed"),
    *("logging_nan_inf_filter", "save_total_limit"),
}


def trains(recommendation: Recommendation) -> list[Export]:
    """The exports that are made to train with, those that lose least first."""
    found = [export for export in EXPORTS.values() if export.fits]
    return sorted(found, key=lambda export: _rank(export, recommendation))


def _rank(export: Export, recommendation: Recommendation) -> tuple[bool, float, int, str]:
    target = export.target
    if target is None:
        return False, 0.0, 0, export.name
    lost = target.losses(recommendation)
    return target.refuses(recommendation) is not None, target.slower(recommendation), len(lost), export.name


def command(export: Export, place: str) -> str:
    """The command that writes the export; `place` is a job's id or a recommendation.json."""
    return f"dynotune export {place} -f {export.name} -o {export.file}"


def table(recommendation: Recommendation) -> Table:
    """One line an export: its name, who it is for, and in short what it loses."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="What to train with", title_justify="left")
    found.add_column("export", no_wrap=True)
    for name in ("for", "loses there"):
        found.add_column(name, overflow="fold")
    for export in trains(recommendation):
        found.add_row(export.name, export.fits, in_short(export.target, recommendation))
    return found


def in_short(target: Target | None, recommendation: Recommendation) -> str:
    """The levers that are lost or nearly said, and how many times as long the run takes without the lost ones."""
    if target is None:
        return EVERYTHING
    if target.refuses(recommendation):
        return f"this export writes no {recommendation.spec['task']}"
    losses = target.losses(recommendation)
    slower = target.slower(recommendation)
    parts = []
    if lost := [one.lever for one in losses if one.word.verdict == "cannot"]:
        parts.append(", ".join(lost) + (f" (about {slower:.2f} times as long)" if slower > 1 else ""))
    if nearly := [one.lever for one in losses if one.word.verdict == "nearest"]:
        parts.append(f"nearly: {', '.join(nearly)}")
    return "; ".join(parts) or EVERYTHING


def listing(recommendation: Recommendation, place: str) -> list[str]:
    """Lines: each export with its command, how its file is started, and what it loses and what that costs."""
    lines = []
    for export in trains(recommendation):
        target = export.target
        lines.append(f"{export.name}: for {export.fits}")
        if target is not None and (why := target.refuses(recommendation)):
            lines += [f"    {why}", ""]
            continue
        run = target.command(recommendation) if target else f"python {export.file}"
        lines += [f"    {command(export, place)}", f"    {run}"]
        lost = sentences(target.losses(recommendation)) if target else []
        lines += [f"    - {one}" for one in lost] or ["    It says every lever as it was measured."]
        if target is not None and (slower := target.slower(recommendation)) > 1:
            lines.append(f"    Without what it cannot say a run takes about {slower:.2f} times as long.")
        lines.append("")
    others = ", ".join(f"{export.name} ({export.summary})" for export in EXPORTS.values() if not export.fits)
    return [*lines, f"Not to train with: {others}."]


def as_data(recommendation: Recommendation, place: str) -> list[dict[str, Any]]:
    """The listing for programs."""
    return [
        {
            "export": export.name,
            "for": export.fits,
            "command": command(export, place),
            "refused": export.target.refuses(recommendation) if export.target else None,
            "slower": export.target.slower(recommendation) if export.target else 1.0,
            "losses": sentences(export.target.losses(recommendation)) if export.target else [],
        }
        for export in trains(recommendation)
    ]


def to_copy(best: Winner) -> list[str]:
    """Lines for code of the user's own: the arguments that set the configuration up, and what these do not say."""
    arguments = {name: value for name, value in best.TrainingArguments.items() if name not in OF_THE_JOB}
    calls = {
        "TrainingArguments": arguments,
        "from_pretrained": best.from_pretrained,
        "BitsAndBytesConfig": best.BitsAndBytesConfig,
        "LoraConfig": best.LoraConfig,
    }
    lines = [_call(name, given) for name, given in calls.items() if given]
    lost = [f"Not said by these: {one}." for one in best.not_expressible]
    return [f"For code of your own: {lines[0]}", *lines[1:], *lost]


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def next_steps(place: str) -> list[str]:
    """Two lines under the table: the command for each export, and the one that says more."""
    return [
        f"Write one: dynotune export {place} -f EXPORT -o FILE",
        f"What each loses, in sentences, and what that costs: dynotune export {place}",
    ]


def show_next(console: Console, best: Recommendation, place: str) -> None:
    """Print what to do with a recommendation: arguments to copy, the exports, and the commands for them."""
    for line in to_copy(best):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(table(best))
    for line in next_steps(place):
        console.print(line, soft_wrap=True)


def written(path: Path, name: str) -> str:
    """An export of the recommendation in a file; Misconfigured where there is no such export, or not of this job."""
    from service.cli.verify import read

    if name not in EXPORTS:
        raise Misconfigured(f"There is no export {name!r}; there are: {', '.join(EXPORTS)}.")
    try:
        return EXPORTS[name].write(read(path))
    except Misconfigured:
        raise
    except DynotuneError as error:
        raise Misconfigured(error.detail) from error
