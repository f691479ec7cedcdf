"""Traces by OpenTelemetry, where the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT) and not otherwise.

Spans are a request to the API and a task of a worker; a worker's calls over HTTP carry its span on. All settings are
OpenTelemetry's own environment variables:
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from service import __version__
from service.errors import Misconfigured

if TYPE_CHECKING:
    from fastapi import FastAPI

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
NOT_TRACED = "healthz,readyz,metrics"  # which are asked for every few seconds
_tracer: Any = None


def start(role: str) -> None:
    """Send this process's spans to the collector that the environment names; without one, do nothing.

    Misconfigured where OpenTelemetry is not installed or the protocol is another than http/protobuf.
    """
    global _tracer
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if _tracer is not None or endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    for name in PROTOCOLS:
        if os.environ.get(name, "http/protobuf") != "http/protobuf":
            raise Misconfigured(f"{name} is {os.environ[name]!r}; dynotune sends traces by http/protobuf only.")
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Misconfigured(
            f"{endpoint} is set, but OpenTelemetry is not installed: install dynotune's extra `telemetry`, or unset it."
        ) from error
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    told = {"service.version": __version__} | ({} if named else {"service.name": f"dynotune-{role}"})
    provider = TracerProvider(resource=Resource.create(told))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    HTTPXClientInstrumentor().instrument()
    _tracer = trace.get_tracer("dynotune", __version__)


def trace_requests(app: FastAPI) -> None:
    """Make a span of every request to the app where a collector is named; Misconfigured as `start`."""
    start("control-plane")
    if _tracer is not None:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

        FastAPIInstrumentor.instrument_app(app, excluded_urls=NOT_TRACED)


def span(name: str, **attributes: object) -> Any:
    """A context that is a span with these attributes, if traces are sent; an error that leaves it marks the span."""
    if _tracer is None:
        return contextlib.nullcontext()
    told = {f"dynotune.{key}": str(value) for key, value in attributes.items()}
    return _tracer.start_as_current_span(name, attributes=told)


def context() -> dict[str, str]:
    """The ids of the current trace and span for log lines; empty where no span is open."""
    if _tracer is None:
        return {}
    from opentelemetry import trace

    current = trace.get_current_span().get_span_context()
    if not current.is_valid:
        return {}
    return {"trace_id": f"{current.trace_id:032x}", "span_id": f"{current.span_id:016x}"}
