"""What this process counts for Prometheus while it works."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

OWN = CollectorRegistry()
HTTP_SECONDS = Histogram(
    "dynotune_http_request_seconds", "Time until an answer was sent.", ("method", "route", "status"), registry=OWN
)
STALE_WRITES = Counter(
    "dynotune_stale_writes_refused", "Writes of workers that had lost their lease, through this process.", registry=OWN
)
