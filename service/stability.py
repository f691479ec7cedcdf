"""What a recommendation says of stability: how it was tried, and which configurations were rejected, and why."""

from __future__ import annotations

from typing import Literal

from service.contract.job import JobSpec
from service.contract.measurement import Outcome, Verdict, Verification
from service.contract.objective import is_too_slow, minimises_memory
from service.contract.recommendation import Rejected, Stability
from service.contract.task import TrialRecord

NOT_VERIFIED = "Not verified: loss, gradients and memory held in its own trial only."


def stability(spec: JobSpec, verdict: Verdict | None, verification: Verification | None) -> Stability:
    """Whether a configuration is stable, None where that is not known, with a sentence on how it was tried."""
    if verdict is None or verification is None:
        return Stability(stable=None, statement=NOT_VERIFIED)
    statement = f"{spec.search.verify.capitalize()} verification: {_proved(verdict, verification)}{_soaked(verdict)}."
    return Stability(
        stable=_is_stable(verdict, verification),
        reasons=verdict.reasons,
        verdict=verdict,
        statement=f"{statement} {verification.note or ''}".rstrip(),
    )


def _is_stable(verdict: Verdict, verification: Verification) -> bool | None:
    """None where nothing speaks against it, and it has neither a proof, nor both a baseline and a soak."""
    if not verdict.stable or verdict.proof:
        return verdict.stable
    return None if verification.baseline_key is None or verdict.soak is None else True


def _proved(verdict: Verdict, verification: Verification) -> str:
    """The beginning of the sentence: what the configuration was compared with."""
    proof = verdict.proof
    if proof:
        return (
            f"{proof.steps} optimizer steps of the same {proof.samples} samples compared with a reference "
            f"({proof.reference}): losses at most {proof.largest_loss_difference or 0:.2%} away, the weights moved "
            f"{proof.movement or 0:.2f} times as far"
        )
    if verification.baseline_key is None:
        return "it was compared with nothing, as no baseline ran to its end; so whether it is stable is not known"
    itself = verdict.key == verification.baseline_key
    compared = "it is the baseline itself" if itself else "it was not compared with a reference"
    if verdict.stable and verdict.soak is None:
        compared += "; it was not soaked, so that whether it is stable is not known"
    return compared


def _soaked(verdict: Verdict) -> str:
    """The rest of the sentence: what the soak ran; empty without one."""
    soak = verdict.soak
    if soak is None:
        return ""
    save = " and a save" if soak.saved_bytes != 0 else " (no save: the disk for temporary files had no room)"
    parts = [
        f"; then a soak of {soak.steps} of {soak.wanted_steps} steps at micro batch {soak.micro_batch_size}",
        f" (interrupted, so in {soak.segments} processes)" if soak.segments > 1 else "",
        f", the longest samples first ({soak.worst_case_steps} times), an evaluation{save} in the middle",
    ]
    if soak.growth_bytes is not None:
        parts.append(f"; memory held between steps grew by {soak.growth_bytes / 2**20:.1f} MiB")
    if verdict.micro_batch_size:
        parts.append("; the micro batch first measured did not hold, so this is the next smaller one")
    return "".join(parts)


def rejected(
    spec: JobSpec,
    history: tuple[TrialRecord, ...],
    verifications: dict[str, Verification | None],
    peak: int | None,
) -> tuple[Rejected, ...]:
    """The trials that failed, then the finalists that a verification ruled out; `peak` bytes the winner took."""
    fits = f"; the recommended configuration took {peak / 2**30:.2f} GiB" if peak else ""
    trials = [record.measurement for record in history]
    found = [
        Rejected(
            method=one.configuration.method,
            levers=one.configuration.levers,
            outcome=one.outcome,
            reason=one.reason + (fits if one.outcome is Outcome.infeasible else ""),
        )
        for one in trials
        if one.outcome is not Outcome.ok
    ]
    by_key = {one.configuration.key: one.configuration for one in trials}
    for verification in filter(None, verifications.values()):
        for verdict in verification.verdicts:
            why, made = _ruled_out(spec, verdict), by_key.get(verdict.key)
            if why and made:
                found.append(Rejected(method=made.method, levers=made.levers, outcome=why[0], reason=why[1]))
    return tuple(found)


def _ruled_out(spec: JobSpec, verdict: Verdict) -> tuple[Outcome | Literal["slower"], str] | None:
    """(the outcome, the reason) of a finalist that may not be recommended; None for others."""
    if not verdict.stable:
        return Outcome.unstable, "; ".join(verdict.reasons)
    if minimises_memory(spec) and is_too_slow(verdict.speedup):
        return "slower", f"it runs at {verdict.speedup:.2f} of the baseline's speed, which objective memory rules out"
    return None
