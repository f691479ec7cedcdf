"""How a job's result looks on a terminal: what was recommended, what else was fast, and what was rejected."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from service.cli.display import GIB, duration
from service.cli.output import one_line
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome, Verdict
from service.contract.objective import run_seconds
from service.contract.recommendation import Evidence, Recommendation, Rejected, Winner
from service.text import money

FIGURES = ("tokens/s", "samples/s", "step s", "micro", "peak GiB")
NO_FIGURES = ("",) * len(FIGURES)


def show_result(console: Console, recommendation: Recommendation) -> None:
    """Print a recommendation: the table, whether it is stable and by what, the notes, and what the whole run takes."""
    console.print(result_table(recommendation))
    weights = f"weights: {recommendation.weights}" if recommendation.weights != "pretrained" else ""
    run = whole_run(recommendation.evidence)
    for line in (recommendation.stability.statement, weights, *recommendation.notes, run):
        if line:
            console.print(one_line(line), soft_wrap=True)


def result_table(recommendation: Recommendation) -> Table:
    """A recommendation as a table: baselines, winners, alternatives, and what was rejected.

    Where the objective is the cost of the run, that has a column.
    """
    costs = Costs.of(recommendation)
    title = f"{one_line(recommendation.job_name)}: {_device(recommendation)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("configuration", overflow="fold", min_width=24)
    for name in (*FIGURES, *(["run costs"] if costs.shown else []), "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stable", overflow="fold", min_width=12)
    for method, winner in recommendation.methods.items():
        _add_baseline(table, method, winner, costs)
        _add_winner(table, method, winner, costs)
    for one in recommendation.alternatives:
        _add_alternative(table, recommendation, one, costs)
    for rejected in recommendation.rejected:
        _add_rejected(table, recommendation, rejected, costs)
    return table


def whole_run(evidence: Evidence) -> str:
    """A sentence: how long the user's run takes with the answer, and with the baseline; and what both cost."""
    text = f"The whole run would take about {duration(evidence.run_seconds)} here"
    if evidence.baseline_run_seconds is not None:
        text += f", {duration(evidence.baseline_run_seconds)} with the baseline"
    if evidence.run_cost is not None and (evidence.objective is None or evidence.objective.name != "cost"):
        text += f"; it would cost {money(evidence.run_cost)}"
        text += f" instead of {money(evidence.baseline_run_cost)}" if evidence.baseline_run_cost is not None else ""
    return text + "."


@dataclass(frozen=True)
class Costs:
    """The column of what a run costs. `price` is that of an hour; None where the objective is another one."""

    spec: JobSpec | None = None
    price: float | None = None

    @classmethod
    def of(cls, recommendation: Recommendation) -> Costs:
        """The costs' column of a job; it is shown where its objective is the cost of the run."""
        objective = recommendation.evidence.objective
        if objective is None or objective.name != "cost":
            return cls()
        spec = JobSpec.model_validate(recommendation.spec)
        return cls(spec, spec.hardware.price_per_hour)

    @property
    def shown(self) -> bool:
        """Whether there is such a column."""
        return self.price is not None

    def cell(self, cost: float | None) -> tuple[str, ...]:
        """The cell of a row, where there is such a column."""
        return (money(cost) if cost is not None else "",) if self.shown else ()

    def of_run(self, one: Measurement, verdict: Verdict | None) -> float | None:
        """What the user's run would cost with a configuration."""
        if self.spec is None or self.price is None:
            return None
        return self.price * run_seconds(self.spec, one, verdict.timing if verdict else None) / 3600


def _device(recommendation: Recommendation) -> str:
    environment = recommendation.environment
    return f"{environment['name']}, {environment['cores']} cores, {environment['memory_gib']} GiB"


def _add_baseline(table: Table, method: str, winner: Winner, costs: Costs) -> None:
    """The row of a method's baseline, where that is not the winner itself."""
    baseline = winner.evidence.baseline
    if baseline is None or baseline.configuration == winner.evidence.measurement.configuration:
        return
    verdict = next((one for one in winner.verdicts if one.key == baseline.configuration.key), None)
    cost = costs.cell(winner.evidence.baseline_run_cost)
    table.add_row(f"{method}: baseline", *_measured(baseline, verdict), *cost, "1.00x", "")


def _add_winner(table: Table, method: str, winner: Winner, costs: Costs) -> None:
    """The row of what is recommended for a method."""
    evidence = winner.evidence
    against = evidence.baseline.configuration if evidence.baseline else None
    speedup = "-"
    if evidence.speedup is not None:
        speedup = f"{evidence.speedup:.2f}x"
        if evidence.speedup_low is not None and evidence.speedup_high is not None:
            speedup += f" ({evidence.speedup_low:.2f}-{evidence.speedup_high:.2f})"
    unknown = "not compared" if winner.stability.verdict else "not verified"
    stable = {True: "yes", False: "no", None: unknown}[winner.stability.stable]
    table.add_row(
        f"{method}: {evidence.measurement.configuration.title(against)}",
        f"{evidence.tokens_per_second:,.0f}",
        f"{evidence.samples_per_second:.2f}",
        f"{evidence.step_seconds:.2f}",
        str(winner.configuration.micro_batch_size),
        f"{(evidence.peak_bytes or 0) / GIB:.2f}",
        *costs.cell(evidence.run_cost),
        speedup,
        "; ".join((stable, *winner.stability.reasons)),
        style="bold green",
    )


def _add_alternative(table: Table, recommendation: Recommendation, one: Measurement, costs: Costs) -> None:
    """The row of another configuration that ran; a baseline has its row already."""
    method = one.configuration.method
    winner = recommendation.methods.get(method)
    baseline = winner.evidence.baseline if winner else None
    if one == baseline:
        return
    every = (verdict for winner in recommendation.methods.values() for verdict in winner.verdicts)
    verdict = next((verdict for verdict in every if verdict.key == one.configuration.key), None)
    title = one.configuration.title(baseline.configuration if baseline else None)
    cells = (*_measured(one, verdict), *costs.cell(costs.of_run(one, verdict)), *_judged(one, verdict, winner))
    table.add_row(f"{method}: {title}", *cells, style="dim")


def _judged(one: Measurement, verdict: Verdict | None, winner: Winner | None) -> tuple[str, str]:
    """The cells of a speed-up and of what the verification says."""
    if verdict is None:
        return _ratio(one, winner), "not verified"
    ratio = f"{verdict.speedup:.2f}x" if verdict.speedup is not None else "-"
    held = "yes" if verdict.soak else "timed only"
    return ratio, "; ".join((held if verdict.stable else "no", *verdict.reasons))


def _add_rejected(table: Table, recommendation: Recommendation, rejected: Rejected, costs: Costs) -> None:
    """The row of a configuration that did not run, or not soundly: how it differs from the baseline, and why."""
    winner = recommendation.methods.get(rejected.method)
    baseline = winner.evidence.baseline if winner else None
    usual = baseline.configuration.levers if baseline else {}
    levers = " ".join(f"{name}={choice}" for name, choice in rejected.levers.items() if usual.get(name) != choice)
    reason = f"no: {rejected.outcome}: {rejected.reason}"
    name = f"{rejected.method}: {levers or 'as the baseline'}"
    table.add_row(name, *NO_FIGURES, *costs.cell(None), "", reason, style="dim")


def _measured(one: Measurement, verdict: Verdict | None) -> tuple[str, ...]:
    """A measurement's figures: of the verification's blocks where it took part in them, else of its own trial."""
    if verdict is not None and verdict.timing is not None:
        one = one.model_copy(update={"timing": verdict.timing})
    if one.outcome is not Outcome.ok or one.timing is None:
        return NO_FIGURES
    return (
        f"{one.tokens_per_second:,.0f}",
        f"{one.samples_per_second:.2f}",
        f"{one.step_seconds:.2f}",
        str(one.micro_batch_size),
        f"{(one.peak_bytes or 0) / GIB:.2f}",
    )


def _ratio(one: Measurement, winner: Winner | None) -> str:
    """An unverified trial's speed-up: the winner's, measured in blocks, times the ratio of the two trials' speeds.

    The baseline's own trial may have been minutes earlier, on a busier machine.
    """
    if winner is None or one.timing is None or winner.evidence.speedup is None:
        return "-"
    trial = winner.evidence.measurement.timing
    return f"{winner.evidence.speedup * trial.seconds / one.timing.seconds:.2f}x" if trial else "-"
