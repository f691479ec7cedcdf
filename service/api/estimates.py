"""/v1/estimates: the memory a job would need, without running it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service import estimates
from service.api.context import InContext, Reading
from service.api.problems import responses
from service.contract.estimate import EstimateRequest
from service.contract.views import EstimateState, EstimateView
from service.errors import InvalidJob, NotFound
from service.validate import validate_model

router = APIRouter(prefix="/v1/estimates", tags=["estimates"])


@router.post("", status_code=202, responses=responses(InvalidJob), summary="Ask for a memory estimate")
def submit(request: EstimateRequest, response: Response, here: InContext) -> EstimateState:
    """Queue an estimate of the memory that LoRA, QLoRA and full finetuning need, and of their largest batches."""
    validate_model(request.spec, here.settings)
    estimate_id = here.queue.submit_estimate(request)
    response.headers["Location"] = f"/v1/estimates/{estimate_id}"
    return EstimateState(id=estimate_id, state="queued")


@router.get("/{estimate_id}", responses=responses(NotFound), summary="One estimate")
def show(estimate_id: str, session: Reading) -> EstimateView:
    """The estimate's state; `result` when a worker has answered, `error` when it could not."""
    return EstimateView.model_validate(estimates.view(session, estimate_id))


@router.post("/{estimate_id}/cancel", status_code=202, responses=responses(NotFound), summary="Cancel an estimate")
def cancel(estimate_id: str, here: InContext) -> EstimateState:
    """End an estimate that nobody waits for any more; one that has been answered stays answered."""
    here.queue.cancel_estimate(estimate_id)
    return EstimateState(id=estimate_id, state="cancelled")
