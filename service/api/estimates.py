"""/v1/estimates: the memory a job would need, without running it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from service import estimates
from service.access import Caller
from service.api.access import READS, SUBMITS, Called
from service.api.bodies import body_of
from service.api.context import Context, InContext, Reading
from service.api.problems import responses
from service.contract.estimate import EstimateRequest
from service.contract.states import EstimateStatus
from service.contract.views import EstimateState, EstimateView
from service.errors import InvalidJob, MalformedBody, NotFound
from service.validate import parse, validate_model

router = APIRouter(prefix="/v1/estimates", tags=["estimates"])

EXAMPLE = {
    "spec": {"model": {"source": "Qwen/Qwen3-0.6B"}, "dataset": {"source": "data/chats.jsonl", "max_length": 2048}},
    "memory_gib": 24,
}


@router.post(
    "",
    status_code=202,
    openapi_extra=body_of(EstimateRequest, EXAMPLE),
    responses=responses(InvalidJob, MalformedBody),
    dependencies=SUBMITS,
    summary="Ask for a memory estimate",
)
async def submit(request: Request, response: Response, here: InContext, who: Called) -> EstimateState:
    """Queue an estimate of the memory that LoRA, QLoRA and full finetuning need, and of their largest batches."""
    estimate_id = await run_in_threadpool(_submit, await request.body(), here, who)
    response.headers["Location"] = f"/v1/estimates/{estimate_id}"
    return EstimateState(id=estimate_id, state=EstimateStatus.queued)


def _submit(body: bytes, here: Context, who: Caller) -> str:
    """Validate and queue the estimate. Runs in a thread, because it reads files and waits for the database."""
    asked = parse(body, EstimateRequest)
    validate_model(asked.spec, here.settings)
    return here.queue.submit_estimate(asked, who)


@router.get("/{estimate_id}", responses=responses(NotFound), dependencies=READS, summary="One estimate")
def show(estimate_id: str, session: Reading, who: Called) -> EstimateView:
    """The estimate's state; `result` when a worker has answered, `error` when it could not."""
    return estimates.view(session, estimate_id, who.sees)


@router.post(
    "/{estimate_id}/cancel",
    status_code=202,
    responses=responses(NotFound),
    dependencies=SUBMITS,
    summary="Cancel an estimate",
)
def cancel(estimate_id: str, here: InContext, who: Called) -> EstimateState:
    """End an estimate that nobody waits for any more; one that has been answered stays answered."""
    return EstimateState(id=estimate_id, state=here.queue.cancel_estimate(estimate_id, who))
