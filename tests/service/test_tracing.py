"""Traces: a real control plane and a real worker send what they do to a collector, where one is named."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service import tracing
from service.client import Client
from service.errors import Misconfigured
from tests.conftest import ROOT
from tests.processes import served, start_worker, until

Span = tuple[str, str, dict[str, str]]  # service, name, attributes


class Collector:
    """Takes spans as OpenTelemetry's collector does, on a port of its own."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {one.key: one.value.string_value for one in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            told = {one.key: one.value.string_value for one in span.attributes}
                            spans.append((named["service.name"], span.name, told | {"trace": span.trace_id.hex()}))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the environment names, to which spans are sent without delay."""
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_requests_and_tasks_are_spans(
    collector: Collector, tmp_path: Path, facts: Callable[..., Any], job: Callable[..., Any]
) -> None:
    """A worker's calls over HTTP belong to the trace of its task."""
    with served(tmp_path, tmp_path) as url, Client(url) as client:
        submitted = client.submit(job(dataset={"source": "org/data"}, model={"source": "org/model"}))
        worker = start_worker(tmp_path, url, facts(), "quick")
        try:
            until(lambda: any(span[1] == "trial" for span in collector.spans), 60, "the span of a trial")
            trial = next(span for span in collector.spans if span[1] == "trial")
            assert trial[0] == "dynotune-worker" and trial[2]["dynotune.job"] == submitted
            names = {(service, name) for service, name, _ in collector.spans}
            assert ("dynotune-control-plane", "POST /v1/jobs") in names

            def told() -> bool:
                inside = [one for one in collector.spans if one[2]["trace"] == trial[2]["trace"]]
                return ("dynotune-control-plane", "POST /internal/v1/trial") in {one[:2] for one in inside}

            until(told, 30, "the request by which the trial was told, in the trial's trace")
        finally:
            worker.terminate()
            assert worker.wait(30) == 0


def test_a_process_without_a_collector_imports_nothing_of_it() -> None:
    script = "import sys; from service import tracing; tracing.start('worker'); print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False" and done.returncode == 0, done.stderr


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(Misconfigured, match="http/protobuf only"):
        tracing.start("worker")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(Misconfigured, match="dynotune's extra `telemetry`"):
        tracing.start("worker")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.start("worker")
