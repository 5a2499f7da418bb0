"""What the server measures of itself: Prometheus metrics, and one access-log line per request.

No line and no metric holds text of a request. `Watch` follows one request; its times are monotonic seconds,
which the processes of one machine share.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .limits import Key

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


Trace = Callable[["Watch", str, int, dict[str, Any]], None]  # takes a request, its route, its status and more


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
        self.made_tokens = Counter("throughline_generated_tokens", "Tokens generated.", **by_model)
        self.gone = Counter("throughline_cancelled", "Answers given up: the client left.", **by_model)
        self.states = {
            Gauge("throughline_queued", "Answers accepted and not begun.", **by_model): "queued",
            Gauge("throughline_active", "Answers in the making.", **by_model): "active",
            Gauge(
                "throughline_restarts_total", "Starts after a death of the process.", **by_model
            ): "restarts",
            Gauge("throughline_failed_total", "Answers that the model failed to give.", **by_model): "failed",
        }
        # A metric with its labels; remembered, because looking it up costs more than counting.
        self.of = lru_cache(None)(lambda metric, *labels: metric.labels(*labels))

    def page(self, models: list[Any]) -> bytes:
        """The text of /metrics."""
        for metric, value in self.states.items():
            metric.clear()  # of models that are served no more
            for model in models:
                metric.labels(model.name).set(model.count(value))
        return generate_latest(self.registry)

    def answered(self, watch: "Watch", endpoint: str, status: int, **said: Any) -> None:
        """Count a request and write its line of the access log."""
        took_s = time.monotonic() - watch.came_s
        self.of(self.requests, endpoint, str(status)).inc()
        self.of(self.duration, endpoint).observe(took_s)
        if self.trace is not None:
            self.trace(watch, endpoint, status, said)
        if self._log is None:
            return
        line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | said
        line |= {"status": status, "model": watch.model, "ms": round(1000 * took_s, 1)}
        line |= {"prompt_tokens": watch.prompt_tokens, "generated_tokens": watch.made}
        line |= {"cached_tokens": watch.cached or None, "fault": watch.fault, "key": watch.key.name or None}
        for name, at_s in (("first_ms", watch.first_s), ("queue_ms", watch.began_s)):
            line[name] = None if at_s is None else round(1000 * (at_s - watch.came_s), 1)
        known = {name: value for name, value in line.items() if value is not None}
        with contextlib.suppress(BrokenPipeError):  # nobody reads the log: the requests go on
            print(json.dumps(known), file=self._log, flush=True)


@dataclass
class Watch:
    """One request on its way."""

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

    def submitted(self, tokens: int) -> None:
        """A request's jobs were accepted."""
        self.prompt_tokens = (self.prompt_tokens or 0) + tokens
        self._of(self.telemetry.prompt_tokens).inc(tokens)

    def token(self, answer: int, at_s: float, began_s: float, batch: int, counted: bool) -> None:
        """A step of an answer was made at `at_s`."""
        last_s = self.last_s.get(answer)
        if last_s is None:
            self._began(began_s, batch)
            self._of(self.telemetry.first).observe(at_s - self.came_s)
            self.first_s = at_s if self.first_s is None else min(self.first_s, at_s)
        else:
            self._of(self.telemetry.between).observe(at_s - last_s)
        self.last_s[answer] = at_s
        self.made = (self.made or 0) + counted
        self._of(self.telemetry.made_tokens).inc(counted)

    def read(self, began_s: float, ended_s: float, batch: int) -> None:
        """An encoder has answered."""
        self._began(began_s, batch)
        self._of(self.telemetry.compute).observe(ended_s - began_s)

    def finished(self) -> None:
        """All answers of a generation were made."""
        if self.began_s is not None and self.last_s:
            self._of(self.telemetry.compute).observe(max(self.last_s.values()) - self.began_s)

    def cancelled(self, jobs: int) -> None:
        """Nobody waits for these answers any more."""
        self._of(self.telemetry.gone).inc(jobs)

    def _began(self, began_s: float, batch: int) -> None:
        self._of(self.telemetry.batch).observe(batch)
        self._of(self.telemetry.queue).observe(max(began_s - self.came_s, 0.0))
        self.began_s = began_s if self.began_s is None else min(self.began_s, began_s)

    def _of(self, metric: Any) -> Any:
        assert self.model is not None
        return self.telemetry.of(metric, self.model)
