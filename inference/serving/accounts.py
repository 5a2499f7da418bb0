"""What a server holds at once, and what it measures of each request: Prometheus metrics, one access-log line, and
OpenTelemetry's traces (an extra, nothing of which is imported without it). None of them holds text of a request.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...core.artifact import version
from ...core.console import dropped_lines
from ...core.errors import WrongUse, extra
from .keys import Key

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PARENT = "traceparent"  # W3C's header, by which a caller's trace goes on here
ERROR_CHARACTERS = 200  # of an error's first sentence, in the access log
Trace = Callable[["Watch", str, int, dict[str, Any]], None]  # takes a request, its route, its status and more
Log = Callable[..., None]  # takes a level and the fields of a line, as `console.log`


@dataclass(frozen=True)
class ServerLimits:
    """What a server holds at once, and how long. Beyond `queue` waiting jobs a request is answered with 429."""

    slots: int = 8
    speculate: int = 0  # tokens of an answer that are guessed ahead
    draft: Path | None = None  # the model that guesses; None: the text so far
    queue: int = 256
    generation_config: bool = True  # a model's sampling defaults are those of its generation_config.json
    texts: int = 2048  # that an encoder reads in one request, as OpenAI allows
    body_bytes: int = 4_000_000
    bodies_bytes: int = 64_000_000  # of all requests together
    max_tokens: int | None = None  # generated per answer; None = what fits the context
    max_n: int = 128
    request_s: float = 600.0  # from the first byte of a body to the last of the answer
    body_s: float = 30.0  # for the client to send its body
    load_s: float = 1800.0  # for a model to be opened, and for one step of it
    hang_s: float = 60.0  # between two heartbeats of a model's process
    drain_s: float = 5.0  # between SIGTERM and the closing of the port
    share_prefixes: bool = False  # of prompts, among keys


LIMITS = ServerLimits()


def check_texts(count: int, where: str, most: int) -> None:
    """Refuse more texts in one request than `most`."""
    if count > most:
        what, why = "too many texts in one request", f"{count} > {most}"
        raise WrongUse(what, where=where, why=why, fix="send them in parts")


class ModelMetrics:
    """Collector of gauges and counters of the models, which are read when Prometheus asks.

    `models` returns those that are served now, `totals` has the counters of every name that was ever served.
    """

    def __init__(self, models: Callable[[], list[Any]], totals: Mapping[str, Any]) -> None:
        self._models, self._totals = models, totals

    def collect(self) -> Iterator[Metric]:
        """The values of now, by Prometheus's client."""
        models = self._models()
        for name, text, value in MODEL_GAUGES:
            gauge = GaugeMetricFamily(f"throughline_{name}", text, labels=["model"])
            for model in models:
                gauge.add_metric([model.name], value(model))
            yield gauge
        for name, text, attribute in MODEL_COUNTERS:
            counter = CounterMetricFamily(f"throughline_{name}", text, labels=["model"])
            for model_name, totals in self._totals.items():
                counter.add_metric([model_name], getattr(totals, attribute))
            yield counter
        lost = "Lines of stderr that could not be written."
        yield CounterMetricFamily("throughline_log_lines_dropped", lost, value=dropped_lines())


MODEL_GAUGES: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
    ("num_requests_waiting", "Answers accepted and not begun.", lambda model: model.count("queued")),
    ("num_requests_running", "Answers in the making.", lambda model: model.count("active")),
    ("queue_limit", "Most answers that may wait.", lambda model: model.limits.queue * len(model.remotes)),
    (
        "kv_cache_usage_perc",
        "Share of the key-value cache in use; 1 is full.",
        lambda model: model.cache_usage,
    ),
    ("max_model_len", "Tokens of the longest sequence.", lambda model: model.facts.get("context", 0)),
    ("model_ready", "1 while the model takes requests.", lambda model: float(model.ready)),
)
MODEL_COUNTERS = (
    ("worker_restarts", "Processes that ended and were started again.", "restarts"),
    ("failed_requests", "Answers that the model failed to give.", "failed"),
    ("spec_decode_draft_tokens", "Tokens that were guessed ahead.", "guessed"),
    ("spec_decode_accepted_tokens", "Of them, those that the model chose.", "right"),
    ("watch_failures", "Versions of a watched path that could not be read or opened.", "watch_failures"),
)


class Telemetry:
    """The metrics of one server, and where its access log and its traces go (None: nowhere)."""

    def __init__(self, log: Log | None = None, trace: "Trace | None" = None) -> None:
        self.log, self.trace = log, trace
        self.registry = CollectorRegistry()
        in_registry: dict[str, Any] = {"registry": self.registry}
        by_model = in_registry | {"labelnames": ["model"]}

        def seconds(name: str, text: str, label: str = "model") -> Histogram:
            return Histogram(f"throughline_{name}_seconds", text, [label], buckets=FAST_S, **in_registry)

        text = "Requests answered, by endpoint and status."
        self.requests = Counter("throughline_requests", text, ["endpoint", "status"], **in_registry)
        text = "Seconds from a request to the end of its answer."
        self.duration = seconds("request_duration", text, "endpoint")
        self.queue = seconds("request_queue_time", "Seconds from a request to the beginning of its work.")
        self.compute = seconds("request_inference_time", "Seconds from the beginning of its work to its end.")
        self.first = seconds("time_to_first_token", "Seconds from a request to its first token.")
        self.between = seconds("inter_token_latency", "Seconds between two tokens of one answer.")
        self.batch = Histogram("throughline_batch_size", "Rows computed together.", buckets=SIZES, **by_model)
        self.prompt_tokens = Counter("throughline_prompt_tokens", "Tokens read.", **by_model)
        text = "Of the prompt tokens, those that the prefix cache held."
        self.cached_tokens = Counter("throughline_prefix_cache_hit_tokens", text, **by_model)
        self.made_tokens = Counter("throughline_generation_tokens", "Tokens generated.", **by_model)
        text = "Answers given up: the client left."
        self.gone = Counter("throughline_cancelled_requests", text, **by_model)
        build = Info("throughline_build", "Versions of this server.", **in_registry)
        build.info({"version": version(), "python": platform.python_version()})
        # A metric with its labels; remembered, because looking it up costs more than counting.
        self.of = lru_cache(None)(lambda metric, *labels: metric.labels(*labels))

    def page(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def answered(self, watch: "Watch", endpoint: str, status: int, **said: Any) -> None:
        """Count a request that has ended, and write its line of the access log."""
        now_s = time.monotonic()
        self.of(self.requests, endpoint, str(status)).inc()
        self.of(self.duration, endpoint).observe(now_s - watch.came_s)
        if watch.cached:
            watch.of(self.cached_tokens).inc(watch.cached)
        if self.trace is not None:
            self.trace(watch, endpoint, status, said)
        if self.log is None:
            return
        line = said | {"status": status, "model": watch.model, "fault": watch.fault}
        line |= {"error": watch.error, "param": watch.param, "key": watch.key.name or None}
        line |= {"prompt_tokens": watch.prompt_tokens, "generated_tokens": watch.made}
        line["cached_tokens"] = watch.cached or None
        for name, at_s in (("ms", now_s), ("first_ms", watch.first_s), ("queue_ms", watch.began_s)):
            line[name] = None if at_s is None else round(1000 * (at_s - watch.came_s), 1)
        known = {name: value for name, value in line.items() if value is not None}
        self.log("warning" if status in (500, 504) else "info", **known)


@dataclass
class Watch:
    """One request on its way; times are monotonic seconds, which the processes of one machine share."""

    telemetry: Telemetry
    key: Key = field(default_factory=Key)  # who asks
    parent: str = ""  # the trace that it belongs to
    body_read: bool = False  # to its end
    held: int = 0  # bytes of its body that the budget counts
    came_s: float = field(default_factory=time.monotonic)
    model: str | None = None
    prompt_tokens: int | None = None
    made: int | None = None
    cached: int = 0  # tokens of the prompts that were not read again
    began_s: float | None = None
    first_s: float | None = None
    fault: str | None = None  # the name of an error that is ours
    error: str | None = None  # of a refused request: the first sentence of what it was told
    param: str | None = None  # and the field that it names
    last_s: dict[int, float] = field(default_factory=dict)  # the last token of each answer

    def refused(self, error: str, param: str | None = None) -> None:
        """Note why the request is refused, for the access log."""
        self.error, self.param = error[:ERROR_CHARACTERS], param

    def of(self, metric: Any) -> Any:
        assert self.model is not None
        return self.telemetry.of(metric, self.model)

    def token(self, answer: int, at_s: float, began_s: float, batch: int, counted: bool) -> None:
        last_s = self.last_s.get(answer)
        if last_s is None:
            self.began(began_s, batch)
            self.of(self.telemetry.first).observe(at_s - self.came_s)
            self.first_s = at_s if self.first_s is None else min(self.first_s, at_s)
        else:
            self.of(self.telemetry.between).observe(at_s - last_s)
        self.last_s[answer] = at_s
        self.made = (self.made or 0) + counted
        self.of(self.telemetry.made_tokens).inc(counted)

    def finished(self) -> None:
        if self.began_s is not None and self.last_s:
            self.of(self.telemetry.compute).observe(max(self.last_s.values()) - self.began_s)

    def began(self, began_s: float, batch: int) -> None:
        self.of(self.telemetry.batch).observe(batch)
        self.of(self.telemetry.queue).observe(max(began_s - self.came_s, 0.0))
        self.began_s = began_s if self.began_s is None else min(self.began_s, began_s)


class Traces:
    """A span for each request, by the names of OpenTelemetry's conventions; no text. Raises MissingExtra."""

    def __init__(self, endpoint: str) -> None:
        def part(name: str) -> Any:
            return extra(f"opentelemetry.{name}", "traces of requests", "traces")

        exporter = part("exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint)
        resource = part("sdk.resources").Resource.create({"service.name": "throughline"})
        # It sends what is left when the process ends.
        provider = part("sdk.trace").TracerProvider(resource=resource)
        provider.add_span_processor(part("sdk.trace.export").BatchSpanProcessor(exporter))
        self._tracer = provider.get_tracer("throughline")
        self._kind = part("trace").SpanKind.SERVER
        self._context = part("trace.propagation.tracecontext").TraceContextTextMapPropagator().extract

    def note(self, watch: Watch, endpoint: str, status: int, said: dict[str, Any]) -> None:
        past_s = time.time() - time.monotonic()
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
        came_ns = int(1e9 * (past_s + watch.came_s))
        span = self._tracer.start_span(name, context, self._kind, known, start_time=came_ns)
        for event, seconds in (("began", watch.began_s), ("first token", watch.first_s)):
            if seconds is not None:
                span.add_event(event, timestamp=int(1e9 * (past_s + seconds)))
        span.end()
