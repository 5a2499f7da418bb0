"""Load on any server that speaks OpenAI's completions or embeddings: many clients that ask without a pause, each a
thread (one that waits for the network costs the measured server nothing), and what they saw.
"""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...core.errors import Failed, WrongUse
from ...core.files import json_lines

COMMON = (
    "the of and a to in is was he for it with as his on be at by I this had not are but from or have an they "
    "which one you were her all she there would their we him been has when who will more no if out so said what "
    "up its about into than them can only other new some could time these two may then do first any my now such "
    "like our over man me even most made after also did many before must through back years where much your way"
)
WORDS = tuple(COMMON.split())
ONE_READ_S = 1e-4  # events that are nearer came together: no model makes a token in so little
Ask = dict[str, Any]  # one request: the body without `model`


@dataclass
class Seen:
    """What a client saw of one answer; times in seconds since it was sent."""

    status: int
    total_s: float
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # of each event that brought text since the one before
    generated: int = 0
    read: int = 0
    error: str = ""

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error


def seeded(kind: str, count: int, seed: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Ask]:
    """Requests that a seed determines: prompts of so many words, greedy answers of so many tokens at most."""
    draw = random.Random(seed)

    def one() -> Ask:
        text = " ".join(draw.choices(WORDS, k=draw.randint(*prompt)))
        if kind == "embeddings":
            return {"input": text}
        return {"prompt": text, "max_tokens": draw.randint(*output), "temperature": 0}

    return [one() for _ in range(count)]


def read_asks(path: Path) -> list[Ask]:
    """Requests from a .jsonl of bodies. Raises Failed for a line that is none."""
    asks = [body for _, body in json_lines(path)]
    if not asks:
        raise WrongUse("there is no request in the file", where=path)
    return asks


class Target:
    """A server: where it is, which model, which key. Raises WrongUse for an address that is none."""

    def __init__(self, url: str, kind: str, model: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise WrongUse("not an address of a server", where=url, fix="give http://HOST:PORT")
        self._place = f"{parts.hostname}:{parts.port}"
        # A connection, not opened yet; one that was closed opens itself again.
        self.connect = partial(kinds[parts.scheme], parts.hostname, parts.port, timeout=600)
        self._base, self._endpoint = parts.path.rstrip("/").removesuffix("/v1"), f"/v1/{kind}"
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        listed = self._listed(model)
        self.model = str(listed["id"])
        self.context: int | None = listed.get("max_model_len")  # tokens, where the server lists them

    def _listed(self, name: str | None) -> dict[str, Any]:
        """What the server lists of this model, or of the first that fits; it need not list one that is named."""
        try:
            with closing(self.connect()) as connection:
                connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
                answer = connection.getresponse()
                body = answer.read()
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {_message(body)}")
            models = json.loads(body)["data"]
            if name is not None:
                return dict({model["id"]: model for model in models}[name])
            able = [model for model in models if self._endpoint in model.get("endpoints", [self._endpoint])]
            return dict((able or models)[0])
        except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
            if name is not None:  # what is wrong is told by the first answer
                return {"id": name}
            fix = "check the address; give the model's name with --model and a key with --api-key-variable"
            what = "the server does not list its models"
            raise WrongUse(what, where=self._place, why=str(error), fix=fix) from error

    def ask(self, connection: http.client.HTTPConnection, asked: Ask) -> Seen:
        body = asked | {"model": self.model}
        if self._endpoint == "/v1/completions":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        began_s = time.perf_counter()
        connection.request("POST", self._base + self._endpoint, json.dumps(body).encode(), self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            return Seen(answer.status, 0.0, error=_message(answer.read()))
        seen, times_s = Seen(answer.status, 0.0), list[float]()
        streamed = answer.headers.get_content_type() == "text/event-stream"
        for line in iter(answer.readline, b"") if streamed else [answer.read()]:
            now_s = time.perf_counter()
            if streamed and not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                seen.error = str(event["error"])[:300]
            if usage := event.get("usage"):
                seen.generated, seen.read = usage.get("completion_tokens", 0), usage["prompt_tokens"]
            if streamed and event.get("choices"):
                times_s.append(now_s)
        seen.total_s = time.perf_counter() - began_s
        if times_s:  # where a server cannot stream, its first token comes with the last
            seen.first_s, seen.gaps_s = times_s[0] - began_s, waits(times_s)
        return seen


def waits(times_s: Sequence[float]) -> list[float]:
    """Seconds that each event after the first read took to come, where those of one read share its wait."""
    firsts = np.flatnonzero(np.diff(times_s, prepend=-np.inf) > ONE_READ_S)
    counts = np.diff([*firsts, len(times_s)])[1:]
    return np.repeat(np.diff(np.take(times_s, firsts)) / counts, counts).tolist()


def _message(body: bytes) -> str:
    """What an error answer says: OpenAI's message, or the beginning of what came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:300].decode("utf-8", "replace")


def load(
    target: Target, asks: Sequence[Ask], clients: int, tick: Callable[[], None] = lambda: None
) -> tuple[list[Seen], float]:
    """Send all requests from so many clients, each its next after an answer; what they saw, and the seconds."""
    kept = threading.local()  # each thread's connection

    def one(asked: Ask) -> Seen:
        used = kept.connection.sock is not None
        try:
            try:
                return target.ask(kept.connection, asked)
            except (http.client.RemoteDisconnected, BrokenPipeError):
                if not used:
                    raise
                kept.connection.close()  # the server closed it while it was idle, and has answered nothing
                return target.ask(kept.connection, asked)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            kept.connection.close()
            return Seen(0, 0.0, error=f"{type(error).__name__}: {error}")

    seen = list[Seen]()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(clients, "client", lambda: setattr(kept, "connection", target.connect())) as pool:
        for answered in pool.map(one, asks):
            seen.append(answered)
            tick()
    return seen, time.perf_counter() - began_s


def summary(seen: Sequence[Seen], took_s: float, clients: int) -> dict[str, Any]:
    """Rates and percentiles of a run. Raises Failed when no request was answered."""
    good, failed = ([one for one in seen if one.answered == wanted] for wanted in (True, False))
    if not good:
        raise Failed("no request was answered", why=next((one.error for one in failed if one.error), ""))
    gaps_s = [gap for one in good for gap in one.gaps_s]
    firsts_s = [one.first_s for one in good if one.first_s is not None]
    found: dict[str, Any] = {
        "clients": clients,
        "answered": len(good),
        "not": dict(Counter(str(one.status or "broken") for one in failed)),
        "first_error": failed[0].error if failed else None,
        "requests_per_s": len(good) / took_s,
        "generated_per_s": sum(one.generated for one in good) / took_s,
        "tokens_per_s": sum(one.generated + one.read for one in good) / took_s,
    }
    for name, values in (("first", firsts_s), ("gap", gaps_s), ("total", [one.total_s for one in good])):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = 1000 * float(np.percentile(values, share)) if values else None
    return found
