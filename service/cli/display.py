"""How jobs look on a terminal: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from service.cli.output import one_line
from service.contract.configuration import Configuration
from service.contract.measurement import Outcome
from service.contract.states import JobStatus, Origin
from service.contract.views import EventView, JobSummary, JobView, ListedTrial

GIB = 2**30
MOST_LETTERS = 40  # of a lever with its choice, which a table does not break in two


def duration(seconds: float | None) -> str:
    """Seconds in a form for people, such as 45s, 3m20s or 2h05m."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def ago(at: float) -> str:
    """How long ago a time was, in a form for people."""
    return duration(time.time() - at)


def moment(at: float | None) -> str:
    """A time by this machine's clock, for people."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def event_line(event: EventView) -> str:
    """An event in one line: when, what, and the values that it carries."""
    values = ", ".join(f"{name} {value}" for name, value in event.data.items() if value not in (None, ""))
    return one_line(f"{moment(event.at)}  {event.kind}  {values}")


def job_table(jobs: Sequence[JobSummary]) -> Table:
    """Jobs as a table."""
    table = Table("id", "name", "status", "phase", "age", "elapsed", "labels", box=None, pad_edge=False)
    for job in jobs:
        labels = one_line(" ".join(f"{key}={value}" for key, value in job.labels.items()))
        times = (ago(job.created_at), duration(job.elapsed_seconds))
        table.add_row(job.id, one_line(job.name), job.status, job.phase, *times, labels)
    return table


def titles(trials: Sequence[ListedTrial]) -> dict[str, str]:
    """By trial id: how the trial's configuration differs from its method's baseline, in one line."""
    baselines: dict[str, Configuration] = {}
    lines = {}
    for trial in trials:
        configuration = trial.configuration
        if trial.origin is Origin.baseline:
            baselines[configuration.method] = configuration
            lines[trial.id] = f"{configuration.method}: baseline"
        else:
            against = baselines.get(configuration.method)
            lines[trial.id] = f"{configuration.method}: {configuration.title(against)}"
    return lines


def trial_cells(trial: ListedTrial, title: str) -> tuple[str, ...]:
    """The cells of a trial's row: number, configuration, outcome, tokens/s, micro batch, peak GiB, note."""
    number, measurement = str(trial.number), trial.measurement
    if measurement is None:
        return number, title, trial.state, "", "", "", trial.progress or ""
    speed = f"{measurement.tokens_per_second:,.0f}" if measurement.tokens_per_second else ""
    peak = f"{measurement.peak_bytes / GIB:.2f}" if measurement.peak_bytes else ""
    note = "best so far" if trial.fastest else measurement.reason
    return number, title, measurement.outcome, speed, str(measurement.micro_batch_size or ""), peak, one_line(note)


def trial_table(trials: Sequence[ListedTrial], names: dict[str, str] | None = None) -> Table:
    """The trials as a table; `names` are their titles where the baselines are not all among them."""
    names = titles(trials) if names is None else names
    longest = max((len(word) for name in names.values() for word in name.split()), default=0)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("configuration", overflow="fold", min_width=min(longest, MOST_LETTERS))
    table.add_column("outcome", overflow="fold")
    for name in ("tokens/s", "micro", "peak GiB"):
        table.add_column(name, justify="right")
    for trial in trials:
        style = "green" if trial.fastest else "dim" if trial.outcome not in (None, Outcome.ok) else None
        number, title, *cells, note = trial_cells(trial, names[trial.id])
        table.add_row(number, f"{title}\n{note}" if note else title, *cells, style=style)
    return table


def status_line(job: JobView) -> str:
    """Phase, or how the job ended; elapsed and remaining time, and what is done now."""
    if job.status is JobStatus.queued:
        return f"queued: {job.waiting_for or 'waiting for a worker'}"
    now = job.waiting_for or job.progress.now
    text = f"{job.status if job.status.ended else job.phase} · {duration(job.elapsed_seconds)} elapsed"
    if job.estimated_finish_at and job.status is JobStatus.running:
        left = job.estimated_finish_at - time.time()
        text += f" · about {duration(left)} left" if left >= 1 else " · it takes longer than expected"
    return text + (f" · {now}" if now else "")


class Trials:
    """A job's trials, which are asked for again only where the job tells of something new."""

    def __init__(self, ask: Callable[[], Sequence[ListedTrial]]) -> None:
        self._ask = ask
        self._told: object = None
        self._found: Sequence[ListedTrial] = ()

    def of(self, job: JobView) -> Sequence[ListedTrial]:
        """The trials as they were when the job began to look as it does."""
        told = (job.version, job.progress)
        if told != self._told:
            self._found, self._told = self._ask(), told
        return self._found


class Progress:
    """Shows a job while it runs: a table that is redrawn on a terminal, else a line for whatever is new."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said: set[str] = set()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, job: JobView, trials: Sequence[ListedTrial]) -> None:
        """Show the job and its trials as they are now."""
        if self._live:
            self._live.update(self.screenful(job, trials), refresh=True)
            return
        names = titles(trials)
        for trial in trials:
            if trial.measurement is not None:
                number, title, outcome, speed, micro, peak, _ = trial_cells(trial, names[trial.id])
                measured = f"{speed} tokens/s, micro batch {micro}, peak {peak} GiB" if speed else ""
                self._say(f"trial {number}  {title}  {outcome}  {measured or trial.measurement.reason}")
        phase = f"{job.status}, {job.phase}, {job.waiting_for}"
        self._say(phase, f"[{duration(job.elapsed_seconds)}] {status_line(job)}")

    def screenful(self, job: JobView, trials: Sequence[ListedTrial]) -> Group:
        """As many trials as the screen has lines for: the fastest, and of the others the newest."""
        names, height = titles(trials), self._console.size.height - 1
        ordered = sorted(trials, key=lambda trial: (trial.fastest, trial.number), reverse=True)
        for count in range(len(ordered), -1, -1):
            shown = sorted(ordered[:count], key=lambda trial: trial.number)
            left_out = len(trials) - count
            parts: list[Text | Table] = [Text(f"{one_line(job.name)}: {status_line(job)}"), trial_table(shown, names)]
            if left_out:
                parts.insert(1, Text(f"{left_out} earlier trials: dynotune trials {job.id}", style="dim"))
            group = Group(*parts)
            if len(self._console.render_lines(group)) <= height:
                return group
        return group

    def _say(self, key: str, text: str | None = None) -> None:
        if key not in self._said:
            self._said.add(key)
            self._console.print(one_line(text or key), soft_wrap=True)
