"""/metrics: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from service.api.access import READS
from service.api.context import InContext

router = APIRouter(tags=["health"])


@router.get("/metrics", dependencies=READS, response_class=Response, summary="Metrics for Prometheus")
def scrape(here: InContext) -> Response:
    """The queue's state, outcomes of trials, device seconds, and the times of answers, in Prometheus' text format."""
    return Response(here.metrics(), media_type=CONTENT_TYPE_LATEST)
