"""What a proof says of replays whose numbers are made up: how far losses may be apart, and what is no number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.contract.job import JobSpec
from service.contract.replay import Proof, Replay, loss_scale, widening
from tests.factory import configuration, measured, replay
from worker.plan import proof

CANDIDATE = measured(configuration("lora", 8, precision="bf16-mixed"), micro_batch_size=2, weights_dtype="float32")
STEADY = proof.Noise(loss=0.01, movement=0.01, steps=5)


def proved(spec: JobSpec, ours: Replay, theirs: Replay, noise: proof.Noise = STEADY) -> Proof:
    return proof.prove(spec, CANDIDATE, ours, theirs, noise)


def losses(theirs: Replay, *values: float) -> Replay:
    return theirs.model_copy(update={"losses": values})


@pytest.fixture
def theirs() -> Replay:
    return replay(proof.samples_a_step(CANDIDATE))


@pytest.mark.parametrize("loss", [0.3, 0.06, 0.01, 0.001])
def test_a_model_that_is_sure_of_its_data_may_be_rounded(
    spec: Callable[..., JobSpec], theirs: Replay, loss: float
) -> None:
    """A logit of 8 is rounded by up to 0.03 in bf16, which changes a small loss and its gradients by 2% and more."""
    reference = losses(theirs, *[loss] * 10)
    ours = losses(theirs, *[loss * 1.015] * 10).model_copy(update={"grad_norms": (1.06, *theirs.grad_norms[1:])})
    assert proved(spec(), ours, reference).reasons == ()
    another = losses(theirs, *[loss + 0.03] * 10)
    assert "another loss" in proved(spec(), another, reference).reasons[0]


def test_losses_of_a_nat_and_more_are_held_to_their_share() -> None:
    assert [loss_scale(loss) for loss in (9.0, 1.0, 0.5, 0.1, 0.01)] == [9.0, 1.0, 1.0, 0.5, 0.1]
    assert [widening(loss) for loss in (9.0, 1.0, 0.5, 0.1, 0.001)] == [1.0, 1.0, 2.0, 5.0, 5.0]


def test_later_steps_may_differ_by_more_as_a_higher_rate_goes_further(
    spec: Callable[..., JobSpec], theirs: Replay
) -> None:
    """The noise was seen in five steps; at the tenth the weights are twice as far."""
    noise = proof.Noise(loss=0.04, movement=0.01, steps=5)
    late = losses(theirs, *theirs.losses[:9], theirs.losses[9] * 1.07)
    assert proved(spec(), late, theirs, noise).reasons == ()
    early = losses(theirs, *theirs.losses[:4], theirs.losses[4] * 1.07, *theirs.losses[5:])
    found = proved(spec(), early, theirs, noise)
    assert "7.0% away from the reference's on the same samples; 4.0% allowed" in found.reasons[0]
    assert (found.largest_loss_difference, found.allowed_loss_difference) == pytest.approx((0.07, 0.04))


def test_a_loss_that_is_no_number_is_no_proof(spec: Callable[..., JobSpec], theirs: Replay) -> None:
    lost = losses(theirs, *theirs.losses[:9], float("nan"))
    assert proved(spec(), lost, theirs).reasons
