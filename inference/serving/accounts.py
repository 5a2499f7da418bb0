"""What a server holds at once and for whom (bounds of requests, API keys), and what it measures of each: Prometheus
metrics, one access-log line, and OpenTelemetry's traces (an extra, nothing of which is imported without it). None of
them holds text of a request.
"""

import contextlib
import hashlib
import hmac
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from ...core.errors import WrongUse, extra

KEY_LINE = "give a text file with one key a line, and behind it if need be name=NAME priority=N places=N per_minute=N"
FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PARENT = "traceparent"  # W3C's header, by which a caller's trace goes on here
Trace = Callable[["Watch", str, int, dict[str, Any]], None]  # takes a request, its route, its status and more


@dataclass(frozen=True)
class ServerLimits:
    """What a server holds at once, and how long. Beyond `queue` waiting jobs a request is answered with 429."""

    slots: int = 8
    speculate: int = 0  # tokens of an answer that are guessed ahead
    draft: Path | None = None  # the model that guesses; None: the text so far
    queue: int = 256
    body_bytes: int = 4_000_000
    bodies_bytes: int = 64_000_000  # of all requests together
    max_tokens: int | None = None  # generated per answer; None = what fits the context
    max_n: int = 128
    request_s: float = 600.0  # from the first byte of a body to the last of the answer
    body_s: float = 30.0  # for the client to send its body
    load_s: float = 1800.0  # for a model to be opened
    hang_s: float = 60.0  # in which a model's process must say that it lives
    drain_s: float = 5.0  # between SIGTERM and the closing of the port
    share_prefixes: bool = False  # of prompts, among keys

    def check_texts(self, count: int, where: str) -> None:
        """Refuse more texts in one request than the queue holds."""
        if count > self.queue:
            what, why = "too many texts in one request", f"{count} > {self.queue}"
            raise WrongUse(what, where=where, why=why, fix="send them in parts")


LIMITS = ServerLimits()


def later(status: int, what: str, wait_s: int) -> HTTPException:
    """A refusal that says when to come back."""
    return HTTPException(status, f"{what}; try again in {wait_s} s", {"Retry-After": str(wait_s)})


class Key(msgspec.Struct, dict=True, forbid_unknown_fields=True):
    """Who asks: one API key, or everybody where none is needed."""

    name: str = ""  # for the access log
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] = 0  # the higher, the earlier
    places: Annotated[int, msgspec.Meta(ge=1)] | None = None  # for answers in work and waiting; None = all
    per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None  # requests

    def __post_init__(self) -> None:
        self.digest = b""
        self.held = 0  # answers accepted and not given
        self.free_s = 0.0  # when all requests so far are paid for

    @classmethod
    def of(cls, text: str, **settings: str) -> "Key":
        """The key of this text. Raises msgspec.ValidationError for what is no setting."""
        key = msgspec.convert(settings, cls, strict=False)
        key.digest = hashlib.sha256(text.encode()).digest()
        return key

    def begin(self) -> None:
        """Count a request. Raises HTTPException 429 beyond those of a minute."""
        if self.per_minute is not None:
            now_s = time.monotonic()
            free_s = max(self.free_s, now_s) + 60 / self.per_minute
            if free_s - now_s > 60:
                what = f"this key may send {self.per_minute} requests a minute"
                raise later(429, what, math.ceil(free_s - now_s - 60))
            self.free_s = free_s

    def take(self, answers: int) -> None:
        """Count answers that are accepted. Raises HTTPException 429 beyond the key's places, WrongUse beyond all."""
        if self.places is not None and self.held + answers > self.places:
            if answers > self.places:
                raise WrongUse(
                    "too many answers for this key in one request", why=f"{answers} > {self.places}"
                )
            raise later(429, f"{self.held} of this key's {self.places} places are taken", 1)
        self.held += answers


def find_key(keys: Sequence[Key], authorization: str) -> Key | None:
    """Whose key a header holds. All are compared, in constant time: no time tells how much was right."""
    kind, _, given = authorization.partition(" ")
    digest = hashlib.sha256(given.strip().encode()).digest()
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found and kind.lower() == "bearer" else None


def read_keys(file: Path | None, variable: str | None, places: int) -> list[Key]:
    """API keys of a file (a line each, # begins a comment) and a variable (commas between). Raises WrongUse."""
    keys = [Key.of(text.strip()) for text in (variable or "").split(",") if text.strip()]
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file else []
        found = [line.split() for line in lines if line.strip() and not line.startswith("#")]
        keys += [Key.of(text, **dict(one.partition("=")[::2] for one in rest)) for text, *rest in found]
    except (OSError, UnicodeDecodeError, msgspec.ValidationError, TypeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WrongUse("the API keys cannot be read", where=file or "", why=why, fix=KEY_LINE) from error
    if file and not found:
        raise WrongUse("there is no API key in the file", where=file, fix=KEY_LINE)
    for key in keys if len(keys) > 1 else ():
        key.places = key.places or max(1, places // 2)  # none fills more unless its line says so
    return keys


class Telemetry:
    """The metrics of one server, and where its access log and its traces go (None: nowhere)."""

    def __init__(self, log: TextIO | None = None, trace: "Trace | None" = None) -> None:
        self._log, self.trace = log, trace
        self.registry = CollectorRegistry()
        in_registry: dict[str, Any] = {"registry": self.registry}
        by_model = in_registry | {"labelnames": ["model"]}

        def seconds(name: str, text: str, label: str = "model") -> Histogram:
            return Histogram(f"throughline_{name}_seconds", text, [label], buckets=FAST_S, **in_registry)

        text = "Requests answered, by endpoint and status."
        self.requests = Counter("throughline_requests", text, ["endpoint", "status"], **in_registry)
        self.duration = seconds("request", "Seconds from a request to the end of its answer.", "endpoint")
        self.queue = seconds("queue", "Seconds from a request to the beginning of its work.")
        self.compute = seconds("compute", "Seconds from the beginning of a request's work to its end.")
        self.first = seconds("time_to_first_token", "Seconds from a request to its first token.")
        self.between = seconds("inter_token", "Seconds between two tokens of one answer.")
        self.batch = Histogram("throughline_batch_size", "Rows computed together.", buckets=SIZES, **by_model)
        self.prompt_tokens = Counter("throughline_prompt_tokens", "Tokens read.", **by_model)
        self.cached_tokens = Counter("throughline_cached_tokens", "Of them, those known before.", **by_model)
        self.made_tokens = Counter("throughline_generated_tokens", "Tokens generated.", **by_model)
        self.gone = Counter("throughline_cancelled", "Answers given up: the client left.", **by_model)
        self.states = {
            Gauge("throughline_queued", "Answers accepted and not begun.", **by_model): "queued",
            Gauge("throughline_active", "Answers in the making.", **by_model): "active",
            Gauge("throughline_restarts_total", "Starts of dead processes.", **by_model): "restarts",
            Gauge("throughline_failed_total", "Answers that the model failed to give.", **by_model): "failed",
            Gauge("throughline_guessed_total", "Tokens that were guessed ahead.", **by_model): "guessed",
            Gauge("throughline_guessed_right_total", "Of them, those taken.", **by_model): "right",
        }
        # A metric with its labels; remembered, because looking it up costs more than counting.
        self.of = lru_cache(None)(lambda metric, *labels: metric.labels(*labels))

    def page(self, models: list[Any]) -> bytes:
        for metric, value in self.states.items():
            metric.clear()  # of models that are served no more
            for model in models:
                metric.labels(model.name).set(model.count(value))
        return generate_latest(self.registry)

    def answered(self, watch: "Watch", endpoint: str, status: int, **said: Any) -> None:
        now_s = time.monotonic()
        self.of(self.requests, endpoint, str(status)).inc()
        self.of(self.duration, endpoint).observe(now_s - watch.came_s)
        if watch.cached:
            watch.of(self.cached_tokens).inc(watch.cached)
        if self.trace is not None:
            self.trace(watch, endpoint, status, said)
        if self._log is None:
            return
        line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | said
        line |= {"status": status, "model": watch.model, "fault": watch.fault, "key": watch.key.name or None}
        line |= {"prompt_tokens": watch.prompt_tokens, "generated_tokens": watch.made}
        line["cached_tokens"] = watch.cached or None
        for name, at_s in (("ms", now_s), ("first_ms", watch.first_s), ("queue_ms", watch.began_s)):
            line[name] = None if at_s is None else round(1000 * (at_s - watch.came_s), 1)
        known = {name: value for name, value in line.items() if value is not None}
        with contextlib.suppress(BrokenPipeError):  # nobody reads the log: the requests go on
            print(json.dumps(known), file=self._log, flush=True)


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
    last_s: dict[int, float] = field(default_factory=dict)  # the last token of each answer

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
