"""Replays: a candidate and a reference train the same samples step by step, and what each of them did is compared."""

from __future__ import annotations

from pydantic import Field

from service.contract.base import Contract

# In nats. A tolerance is a share of the loss where that is SURE or more. Of a smaller loss it is up to MOST_WIDER times
# as large a share, and it is never less than the same share of LEAST_LOSS. Before there were these, sound candidates in
# 16 bits were refused where the model knew its data already (docs/decisions/0041). The values are chosen, not measured:
# with far larger ones wrong gradients of such a model pass, with far smaller ones its rounding is refused again.
SURE, MOST_WIDER, LEAST_LOSS = 1.0, 5.0, 0.1


def loss_scale(loss: float) -> float:
    """The nats of which a tolerance is a share, where a mean loss is compared with another way of computing it.

    A model that is sure of its data has large logits, and 16 bits round a logit of 8 by up to 0.03: that changes what
    is left of the loss, and its gradients, by 3%, however small they are.
    """
    return max(loss, min(SURE, MOST_WIDER * loss), LEAST_LOSS)


def scale_over(loss: float) -> float:
    """`loss_scale` over the loss: a share of `loss_scale` is so many times as large a share of the loss itself."""
    return loss_scale(loss) / max(loss, 1e-9)


def widening(loss: float) -> float:
    """How many times as far from one another rounding may put two gradients' norms where the mean loss is `loss`."""
    return min(MOST_WIDER, scale_over(loss))


class Replay(Contract):
    """What a configuration did over some optimizer steps from its first weights on, without dropout."""

    given: tuple[int, ...] = Field(description="The samples that it was given, as indices into the training split.")
    steps: tuple[tuple[int, ...], ...] = Field(description="The samples of each optimizer step that it took.")
    terms: tuple[int, ...] = Field(description="Labels in each step's batches: tokens that are learnt, or classes.")
    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...] = Field(description="Before clipping. Null where a scaler skipped the step.")
    applied_norms: tuple[float | None, ...] = Field(
        default=(), description="Of the gradients with which the optimizer was called, so after clipping."
    )
    gradients: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="Trained matrix -> some values of its gradient with which step 0 was made."
    )
    still: tuple[int, ...] = Field(default=(), description="Steps, from 0, after which no trained weight had changed.")
    moved: dict[str, float] = Field(
        description="Trained tensor -> root mean square of how far its weights are from where they began."
    )
    shrunk: float | None = Field(
        default=None, description="By what share the matrices became smaller along their first values: weight decay."
    )


class Proof(Contract):
    """What the comparison of a candidate's replay with the reference's came to. Shares are of the reference's value."""

    reasons: tuple[str, ...] = Field(default=(), description="What is wrong with the candidate; none if it passed.")
    steps: int = 0
    samples: int = 0
    terms: int = Field(default=0, description="Labels that were learnt, as many as in the reference's batches.")
    largest_loss_difference: float | None = None
    allowed_loss_difference: float | None = None
    movement: float | None = Field(
        default=None, description="How far the weights moved, over how far the reference's moved."
    )
    allowed_movement: float | None = Field(default=None, description="How far from 1 `movement` may be.")
    reference: str = Field(default="", description="The reference's configuration.")
