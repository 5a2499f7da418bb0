"""Traces of requests for an OpenTelemetry collector, and nothing of them without it."""

import asyncio
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from throughline.core.errors import MissingExtra
from throughline.inference.serving.accounts import Traces


def test_a_collector_gets_a_span_per_request(
    gpt_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By OTLP to a server of the test's own; in the caller's trace, with numbers and no text."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    come: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            come.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    async def body(found) -> None:
        traces = Traces(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        found.server.telemetry.trace = traces.note
        trace = "0af7651916cd43dd8448eb211c80319c"
        head = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        asked = {"model": "gpt", "prompt": "secret", "max_tokens": 3, "ignore_eos": True}
        assert (await found.client.post("/v1/completions", json=asked, headers=head)).status_code == 200
        await found.client.post("/v1/completions", json={"model": "none", "prompt": "secret"})
        await asyncio.to_thread(traces._tracer.span_processor.force_flush)
        spans = [
            span
            for data in come
            for resource in service.ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        (good, bad) = sorted(spans, key=lambda span: span.start_time_unix_nano)
        assert good.name == "POST /v1/completions" and good.trace_id.hex() == trace != bad.trace_id.hex()
        said = {one.key: one.value for one in good.attributes}
        assert said["gen_ai.usage.output_tokens"].int_value == 3
        assert said["gen_ai.request.model"].string_value == "gpt"
        times = [good.start_time_unix_nano, *(event.time_unix_nano for event in good.events)]
        assert len(times) == 3 and times == sorted(times) and times[-1] < good.end_time_unix_nano
        assert 0 <= time.time_ns() - good.start_time_unix_nano < 60e9
        assert {one.key: one.value.int_value for one in bad.attributes}["http.response.status_code"] == 404
        assert b"secret" not in b"".join(come)

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body)
        collector.shutdown()


def test_without_traces_nothing_of_them_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, throughline.inference.serving.accounts as _; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "throughline.inference.serving.accounts" in loaded and "opentelemetry" not in loaded
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match="traces"):
        Traces("http://127.0.0.1:9")
