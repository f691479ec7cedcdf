"""A surface whose truth is a world's physics: mechanistic and synthetic surfaces are of this class."""

from __future__ import annotations

import hashlib
import math
import re
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.surfaces import exhaustive
from benchmarks.surfaces.base import Kind, Surface, normal
from benchmarks.surfaces.lengths import Arranged, arrange
from benchmarks.surfaces.physics import Found, Interaction, Ints, World, evaluate, observed
from benchmarks.surfaces.recipes import recipes
from service.contract.configuration import Configuration
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec, Method
from service.contract.measurement import Measurement, MemoryLine, Outcome, Probe, Timing
from service.contract.task import PlanInput
from service.levers import LEVERS, circumstances, exclusions
from service.space import Space, applicable, space, without
from worker.child.timing import ENOUGH_SECONDS, MOST_PASSES, timed_enough
from worker.plan.budget import BEGIN_SECONDS
from worker.plan.proposers.baseline import baseline
from worker.plan.space import effective_choices, point
from worker.plan.view import View

UNIT_STEPS, PASSES, PROBES = 8, 2, 4
FRACTION = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")
SAMPLED = 64  # combinations whose scores are part of the fingerprint
PREDICTED = 0.01  # the standard deviation of the logarithm of what is predicted of a unit, beside the noise
START = BEGIN_SECONDS  # that a trial's process takes to begin


class Analytic(Surface):
    """A surface that computes its scores. `world.names` is filled in from the job's search space.

    A trial times `unit_samples` in `passes` passes; by default UNIT_STEPS optimizer steps, whatever their size. Before
    that it runs one micro batch of each shape.
    """

    unit_samples: int | None = None
    passes: int = PASSES

    def __init__(self, kind: Kind, name: str, spec: JobSpec, facts: HardwareFacts, world: World) -> None:
        super().__init__()
        self.kind, self.name, self.spec, self.facts = kind, name, spec, facts
        self.method: Method = spec.method[0]
        self.lacks = dict(world.lacks)
        everything = applicable(space(spec, facts), self.method, spec.task)
        self.options: Space = without(everything, self.lacks)
        names = {
            lever: choices if LEVERS[lever].baseline in choices else (*choices, LEVERS[lever].baseline)
            for lever, choices in everything.items()
        }
        self.world = World(**{**vars(world), "names": names, "method": self.method})
        self.effectives = effective_choices(spec, world.lengths.rows)
        self.start = baseline(spec, self.method, {})[0]
        self.circumstances = circumstances(spec, self.method)
        self.dataset = world.lengths.facts()

    @property
    def rows(self) -> int:
        """The rows of the training split."""
        return self.world.lengths.rows

    @cached_property
    def arranged(self) -> Arranged:
        """How steps are arranged, for the effective batches of the search and of the baseline."""
        return arrange(self.world.lengths, tuple(sorted({*self.effectives, self.start.effective_batch_size})))

    @cached_property
    def found(self) -> tuple[float, dict[str, str], int]:
        """(the best score of all that a search can come to, its choices, its effective batch)."""
        return exhaustive.best(
            self.world, arrange(self.world.lengths, self.effectives), self.reachable, self.circumstances
        )

    @cached_property
    def reachable(self) -> Space:
        """The space with the baseline's own choices, which ablations take back though the search does not vary them."""
        free = self.options.keys() - self.spec.search.fixed.keys()
        return {
            name: choices
            if name not in free or self.start.levers[name] in choices
            else (*choices, self.start.levers[name])
            for name, choices in self.options.items()
        }

    @cached_property
    def best(self) -> float:  # type: ignore[override]
        """The best true score; the baseline, which need not be in the space, counts too."""
        return min(self.found[0], self.true_score(self.start))

    @cached_property
    def switches(self) -> int:  # type: ignore[override]
        """How far the best is from the baseline and the recipes."""
        view = View(PlanInput(spec=self.spec, facts=self.facts), self.method)
        starts = [self.start, *recipes(view, self.effectives[min(1, len(self.effectives) - 1)])]
        levers = [one.levers for one in starts]
        return exhaustive.switches(self.world, self.arranged, self.found, levers, self.circumstances)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Sixteen hex digits over the search space, its exclusions, the world, and some combinations' scores."""
        rng = np.random.default_rng(0)
        levers = {name: rng.integers(0, len(choices), SAMPLED) for name, choices in self.world.names.items()}
        sizes = rng.integers(0, len(self.arranged.effectives), SAMPLED)
        scores = ",".join(f"{one:.6g}" for one in evaluate(self.world, self.arranged, levers, sizes, None).score)
        rules = exhaustive.relevant(self.reachable, self.circumstances)
        # Digits beyond the sixth are left out: numpy's exponential differs in its last one from processor to processor.
        world = FRACTION.sub(lambda found: f"{float(found[0]):.6g}", repr(self.world))
        text = "|".join([repr(self.reachable), repr(rules), repr(self.effectives), world, scores])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def indices(self, configuration: Configuration) -> tuple[dict[str, Ints], Ints]:
        """A configuration as the physics takes it: its choices and its effective batch by index, in arrays of one."""
        levers = {
            name: np.array([choices.index(configuration.levers[name])]) for name, choices in self.world.names.items()
        }
        return levers, np.array([self.arranged.effectives.index(configuration.effective_batch_size)])

    def evaluated(self, configuration: Configuration) -> Found:
        """One configuration's figures, each an array of one."""
        return evaluate(self.world, self.arranged, *self.indices(configuration), configuration.micro_batch_size)

    def corner(self, configuration: Configuration) -> tuple[Outcome, str] | None:
        """The outcome and the reason where certain choices cannot be together, or None."""

        def holds(one: Interaction) -> bool:
            return all(configuration.levers[name] in choices for name, choices in one.when.items())

        for outcome, corners in ((Outcome.infeasible, self.world.infeasible), (Outcome.unstable, self.world.unstable)):
            for one in corners:
                if holds(one):
                    return outcome, one.reason
        return None

    def lacked(self, configuration: Configuration) -> str | None:
        """Why the model cannot have one of the choices, or None."""
        named = (f"{name}={choice}" for name, choice in configuration.levers.items())
        return next((f"{one}: {self.lacks[one]}" for one in named if one in self.lacks), None)

    def valid(self, configuration: Configuration) -> bool:
        """Whether no exclusion forbids a configuration."""
        return not any(rule.hits(point(configuration, self.spec)) for rule in exclusions())

    def _true_score(self, configuration: Configuration) -> float:
        return math.inf if self.lacked(configuration) else float(self.evaluated(configuration).score[0])

    def _measure(self, configuration: Configuration, seed: int) -> Measurement:
        corner, found = self.corner(configuration), self.evaluated(configuration)
        rest, slope = float(found.rest[0]), float(found.slope[0])
        model, capacity = self.world.model, int(self.world.device.capacity)
        values: dict[str, Any] = {
            "configuration": configuration,
            "capacity_bytes": capacity,
            "parameters": int(model.parameters),
            "trainable_parameters": int(model.trained),
            "dataset": self.dataset,
            "weights_dtype": self._dtype(configuration),
            "lacks": self.lacks,
        }
        load = {"start": START, "load": self._load_seconds(configuration)}
        if lacked := self.lacked(configuration):
            values |= {"outcome": Outcome.invalid, "reason": lacked}
            return Measurement(**values, time_spent={"start": START})
        if corner is not None:
            values |= {"outcome": corner[0], "reason": corner[1], "time_spent": {**load, "probe": 2.0}}
            return Measurement(**values)
        tried = configuration.micro_batch_size or 1
        if not math.isfinite(found.step[0]):
            reason = f"out of memory at a micro batch of {tried}"
            probes = (Probe(micro_batch_size=tried, peak_bytes=None),)
            values |= {"outcome": Outcome.infeasible, "reason": reason, "probes": probes}
            return Measurement(**values, time_spent={**load, "probe": 3.0})
        line = MemoryLine(rest_bytes=rest, slope_bytes=slope, residual=0.01)
        return self._measured_well(configuration, seed, found, values, line)

    def _measured_well(
        self, configuration: Configuration, seed: int, found: Found, values: dict[str, Any], line: MemoryLine
    ) -> Measurement:
        """The measurement of a configuration that runs."""
        micro, step = int(found.micro[0]), float(found.step[0])
        effective = configuration.effective_batch_size
        timed_share = self._timed_share(configuration, step)
        unsure = (1 - timed_share) * PREDICTED * normal(self.name, configuration.key, seed, "the rest")
        seconds = step * self._steps(configuration) * self.noise(configuration, seed) * math.exp(unsure)
        peak = int(line.at(micro))
        loading = self._load_seconds(configuration)
        compiling = float(found.once[0]) - loading
        *_, warmed, micro_batches = observed(self.world, self.arranged, *self.indices(configuration), micro)
        timing = self._timing(configuration, seconds, micro, peak).model_copy(update={"timed_share": timed_share})
        probes = tuple(
            Probe(micro_batch_size=one, peak_bytes=int(line.at(one)), seconds=step) for one in sorted({1, micro})
        )
        spent = {
            "start": START,
            "load": loading,
            "probe": step * PROBES / max(1, effective // max(1, micro)) + 1.0,
            "compile": compiling,
            "warm-up": seconds * warmed * timed_share if self.facts.has_own_memory else 0.0,
            "timing": seconds * timed_share * self._trained(seconds * timed_share, self._steps(configuration)),
        }
        values |= {
            "outcome": Outcome.ok,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": micro_batches,
            "largest_micro_batch": int(found.largest[0]),
            "predicted_micro_batch": line.largest(self.world.device.capacity * 0.95),
            "limited_by": "memory" if int(found.largest[0]) < effective else "the effective batch",
            "memory_line": line,
            "timing": timing,
            "probes": probes,
            "peak_bytes": peak,
            "reserved_bytes": int(peak * 1.03),
            "used_before_bytes": 0,
            "evaluation_batch_size": micro,
            "load_seconds": loading,
            "compile_seconds": compiling,
            "check_loss": 2.5,
            "check_grad_norm": 1.0,
            "losses": (2.5, 2.4),
            "grad_norms": (1.0, 1.0),
            "time_spent": spent,
        }
        return Measurement(**values)

    def _trained(self, seconds: float, steps: int) -> int:
        """How many passes of so many seconds and steps a trial times: on a GPU until they tell enough."""
        if not self.facts.has_own_memory:
            return self.passes
        passes = range(self.passes, MOST_PASSES)
        return next((count for count in passes if timed_enough(count * seconds, count * steps)), MOST_PASSES)

    def _timed_share(self, configuration: Configuration, step: float) -> float:
        """The share of the unit that a trial times, in whole steps: on a GPU no more than tells the rest."""
        if not self.facts.has_own_memory or self.unit_samples is None:
            return 1.0
        steps = self._steps(configuration)
        return min(steps, math.ceil(ENOUGH_SECONDS / step)) / steps

    def _timing(self, configuration: Configuration, seconds: float, micro: int, peak: int) -> Timing:
        """The timing of the whole unit."""
        tokens, waiting, _, _ = observed(self.world, self.arranged, *self.indices(configuration), micro)
        effective = configuration.effective_batch_size
        steps = self._steps(configuration)
        real = int(self.dataset.tokens / self.dataset.rows * effective * steps)
        return Timing(
            micro_batch_size=micro,
            seconds=seconds,
            low=seconds * 0.99,
            high=seconds * 1.01,
            samples=effective * steps,
            tokens=real,
            padded_tokens=max(real, int(tokens * steps)),
            waiting_seconds=min(seconds, waiting * steps),
            steps=steps,
            passes=self.passes,
            peak_bytes=peak,
            clean_share=1.0,
            largest_share_of_others=0.0,
        )

    def _steps(self, configuration: Configuration) -> int:
        """The optimizer steps of the work unit."""
        if self.unit_samples is None:
            return UNIT_STEPS
        return max(1, self.unit_samples // configuration.effective_batch_size)

    def _load_seconds(self, configuration: Configuration) -> float:
        """The seconds of loading the model, and of quantising it where that is chosen."""
        costs = self.world.costs
        quantising = sum(costs[name][choice].get("loading", 0.0) for name, choice in configuration.levers.items())
        return self.world.model.load_seconds * (1 + quantising)

    def _dtype(self, configuration: Configuration) -> str:
        choice = configuration.levers["precision"]
        if choice == "checkpoint":
            return "float32" if self.spec.model.weights == "random" else "bfloat16"
        options = LEVERS["precision"].choice(choice).options
        frozen = None if self.method == "full" else options.get("adapter_weights")
        return str(frozen or options.get("weights", "float32"))
