"""Has children replay the same optimizer steps, as the candidate and as the reference, and compares what they did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service.contract.child import EndingKind, Result, RunReplay, Workplace
from service.contract.hardware import HardwareFacts
from service.contract.job import JobSpec
from service.contract.measurement import Measurement, Outcome
from service.contract.replay import Proof, Replay
from worker.runner.measuring import outcome_of
from worker.runner.sandbox import Ending

if TYPE_CHECKING:
    from worker.plan.proof import Noise


class Prover:
    """Proofs of one verification's candidates. How far the reference is from itself is measured once."""

    def __init__(
        self,
        spec: JobSpec,
        facts: HardwareFacts,
        workplace: Workplace,
        on_progress: Callable[[str], None],
        run: Callable[[RunReplay], Ending],
    ) -> None:
        self._spec, self._facts, self._workplace = spec, facts, workplace
        self._progress, self._run = on_progress, run
        self._noise: Noise | None = None

    def proof(self, candidate: Measurement) -> Proof | str:
        """The proof, or a sentence that says why there is none."""
        from worker.plan import proof as judged  # imported here, as it imports numpy

        spec = judged.exposed(self._spec, candidate)
        asked = RunReplay(
            workplace=self._workplace,
            spec=spec,
            candidate=candidate,
            seed=spec.training.seed + 201,
            count=judged.PROOF_STEPS[spec.search.verify],
            samples_a_step=judged.samples_a_step(candidate),
            first_samples=judged.first_samples(spec, candidate),
            stirs=judged.stirs(candidate),
        )
        ours = self._replay(asked, "candidate")
        if not isinstance(ours, Replay):
            return ours
        # The reference replays three times, until it is known by how much it differs from itself.
        followed = asked.model_copy(update={"steps": ours.steps, "stays": self._noise is None})
        for name, reference in judged.references_of(candidate, self._facts):
            theirs = self._replay(followed.model_copy(update={"candidate": reference}), f"reference in {name}")
            if isinstance(theirs, Replay):
                noise = self._noise_of(followed, reference, theirs)
                return noise if isinstance(noise, str) else judged.prove(spec, candidate, ours, theirs, noise, name)
        return f"no reference to compare with ran: {theirs}"

    def _noise_of(self, followed: RunReplay, reference: Measurement, theirs: Replay) -> Noise | str:
        """How far the reference's replays are from one another at other rates and seeds; measured once."""
        from worker.plan import proof as judged

        if self._noise is not None:
            return self._noise
        followed = followed.model_copy(update={"steps": followed.steps[: len(followed.steps) // 2]})
        faster = reference.configuration.learning_rate * judged.RATE_CHANGE
        changed = reference.configuration.model_copy(update={"learning_rate": faster})
        of_rate = self._replay(
            followed.model_copy(update={"candidate": reference.model_copy(update={"configuration": changed})}),
            "reference at a 2% higher rate",
        )
        of_seed = self._replay(
            followed.model_copy(update={"candidate": reference, "seed": followed.seed + 1, "stays": False}),
            "reference under another seed",
        )
        if not isinstance(of_rate, Replay) or not isinstance(of_seed, Replay):
            return (
                f"the reference to compare with did not run again: {of_rate if isinstance(of_rate, str) else of_seed}"
            )
        self._noise = judged.noise(theirs, of_rate, of_seed)
        return self._noise

    def _replay(self, request: RunReplay, whose: str) -> Replay | str:
        self._progress(f"replaying {request.count} steps: {whose}")
        ending = self._run(request)
        if isinstance(ending.last, Result) and ending.last.replay is not None:
            return ending.last.replay
        outcome, reason = failure(ending)
        return f"its replay failed ({outcome}): {reason}"


def failure(ending: Ending) -> tuple[Outcome, str]:
    """The outcome and the reason of a child of a verification that ended without a result."""
    if ending.kind is EndingKind.out_of_memory:
        return Outcome.infeasible, f"memory ran out at a batch that had fitted: {ending.reason}"
    return outcome_of(ending), ending.reason
