"""Traces of requests in OpenTelemetry's form, sent to a collector by OTLP: an extra, nothing of which is imported
without it.
"""

import time
from typing import Any

from ...core.errors import extra
from .telemetry import Watch

PARENT = "traceparent"  # W3C's header, by which a caller's trace goes on here


class Traces:
    """A span for each request, by the names of OpenTelemetry's conventions; no text. It has an event when work began
    and one when the first token was made. Raises MissingExtra.
    """

    def __init__(self, endpoint: str) -> None:
        def part(name: str) -> Any:
            return extra(f"opentelemetry.{name}", "traces of requests", "traces")

        exporter = part("exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint)
        resource = part("sdk.resources").Resource.create({"service.name": "throughline"})
        provider = part("sdk.trace").TracerProvider(
            resource=resource
        )  # sends what is left when the process ends
        provider.add_span_processor(part("sdk.trace.export").BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("throughline")
        self._kind = part("trace").SpanKind.SERVER
        self._context = part("trace.propagation.tracecontext").TraceContextTextMapPropagator().extract

    def note(self, watch: Watch, endpoint: str, status: int, said: dict[str, Any]) -> None:
        """The span of a request that has been answered."""
        past_ns = time.time_ns() - time.monotonic_ns()

        def at_ns(seconds: float) -> int:
            return past_ns + int(1e9 * seconds)

        attributes = {
            "http.request.method": said["method"],
            "http.route": endpoint,
            "http.response.status_code": status,
            "gen_ai.request.model": watch.model,
            "gen_ai.response.id": said["id"],
            "gen_ai.usage.input_tokens": watch.prompt_tokens,
            "gen_ai.usage.output_tokens": watch.made,
            "error.type": watch.fault or (str(status) if status >= 500 else None),
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        name, context = f"{said['method']} {endpoint}", self._context({PARENT: watch.parent})
        span = self._tracer.start_span(name, context, self._kind, known, start_time=at_ns(watch.came_s))
        for event, seconds in (("began", watch.began_s), ("first token", watch.first_s)):
            if seconds is not None:
                span.add_event(event, timestamp=at_ns(seconds))
        span.end()
