"""One request: its body, taken within bounds of time and bytes and read field by field, the size of each field bounded
before its values become objects; the model that answers it; its deadline.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`: 400 for what a request gets wrong, 401
for a missing or wrong key, 404 for an unknown model, 408 for a body that does not come, 413 for one that is too large,
429 with Retry-After for a full queue, 503 while a model is not there, 504 for an answer that takes too long.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.console import say
from ...core.errors import Failed, ThroughlineError, WrongUse, did_you_mean
from ...core.hardware import usable_cores
from .accounts import ModelMetrics, ServerLimits, Telemetry, Watch, check_texts
from .api_types import Body, Generation, Ids, Text, Texts
from .catalogue import Catalogue
from .keys import later
from .served import CHATTING, TOKENISING, ServedModel

INLINE = 4000  # characters or numbers, that the event loop reads or writes in a millisecond
TEXT_SIZE = 64  # of each text besides its characters: a short one takes the event loop 20 us
SHAPES = {b'"': Text, b'["': Annotated[list[Text], msgspec.Meta(min_length=1)], b"[[": list[Ids]}
FIELD_BYTES = {"tokens": 1 << 19, "instructions": 1 << 62}
# of any other field that a body need not have; those that it must have are as long as it may be
SMALL_BYTES = 1 << 16
MOST_IDS = 1 << 19  # of a request: Python's lists of two million take the event loop 30 ms
MOST_STRINGS = 1 << 14  # of messages, names of fields too
MOST_PROBLEMS = 8  # told of one body
FREE_BYTES = 1 << 14  # of each body, which the budget leaves out: large ones must not shut small ones out
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
KINDS = {401: "authentication_error", 429: "rate_limit_error"}  # of errors, by status
_beside = ThreadPoolExecutor(max(1, usable_cores() - 1), "beside")  # each works on a megabyte of text at most
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Body)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as an answer; numbers that are not finite become null."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "invalid_api_key" if status == 401 else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def told(error: HTTPException | ThroughlineError) -> Response:
    """An error as an answer; what the user did not cause says nothing of our insides."""
    if isinstance(error, HTTPException):
        return json_response(error_body(error.status_code, error.detail), error.status_code, error.headers)
    wrong = isinstance(error, WrongUse)
    status, param = (400, error.where or None) if wrong else (500, None)
    message = "; ".join(part for part in (error.what, error.why if wrong else "", error.fix) if part)
    return json_response(error_body(status, message, param), status)


def size_of(texts: Iterable[Any]) -> int:
    """How much work texts are, for `Call.beside`: their characters or ids, and something for each."""
    return sum(TEXT_SIZE + len(text) for text in texts)


class NamedBody(msgspec.Struct):
    """The model that a body names, whatever else it holds."""

    model: str | None = None


class Server:
    """The models and what all endpoints share."""

    def __init__(self, catalogue: Catalogue, limits: ServerLimits, telemetry: Telemetry) -> None:
        self.catalogue, self.limits, self.telemetry = catalogue, limits, telemetry
        telemetry.registry.register(ModelMetrics(lambda: catalogue.models, catalogue.totals))
        self.draining = asyncio.Event()
        self.held = 0  # bytes of all bodies that are held now
        self.failure: ThroughlineError | None = None
        self.place = ""  # where it listens, for people

    @property
    def models(self) -> list[ServedModel]:
        return self.catalogue.models

    async def start(self) -> None:
        """Start all models and say which are served; note the `failure` of the first when none can be."""
        try:
            await self.catalogue.start()
        except Exception as error:  # whatever it is, nothing is served: the command ends with it
            failed = Failed("a model cannot be served", why=f"{type(error).__name__}: {error}")
            self.failure = error if isinstance(error, ThroughlineError) else failed
            return
        names = ", ".join(model.name for model in self.models if model.failure is None) or "no model yet"
        say(f"serving {names} at {self.place}")

    async def take(self, request: Request) -> bytearray:
        """The body of a request. Raises HTTPException: 413 too large, 408 it does not come, 503 too much is held."""
        limits, watch = self.limits, request.state.watch
        large = HTTPException(413, f"the request body is larger than {limits.body_bytes:,} bytes")
        if int(request.headers.get("content-length", 0)) > limits.body_bytes:
            raise large
        come = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    come += part
                    if len(come) > limits.body_bytes:
                        raise large
                    counted = max(0, len(come) - FREE_BYTES) - watch.held
                    if self.held + counted > limits.bodies_bytes:
                        raise later(503, "the bodies of other requests fill the memory for them", 1)
                    self.held += counted
                    watch.held += counted
        except ClientDisconnect:
            raise HTTPException(499, "the client went away") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {limits.body_s:g} s") from None
        watch.body_read = True
        return come

    def named(self, body: bytes | bytearray) -> str | None:
        """The served model that a body names, of one that is refused: for the log."""
        with suppress(*UNREADABLE):
            name = msgspec.json.decode(body, type=NamedBody).model
            if any(model.name == name for model in self.models):
                return name
        return None

    def pick(self, name: str | None, endpoint: str, watch: Watch) -> ServedModel:
        """The model of that name, or the only one that the endpoint fits. Raises HTTPException 404 or WrongUse."""
        fitting = [model for model in self.models if endpoint in model.endpoints]
        named = fitting if name is None else [self.catalogue.find(name)]
        if len(named) != 1:
            if waiting := next((model for model in self.models if not model.ready), None):
                waiting.free(0)
            names = ", ".join(model.name for model in fitting) or "none"
            why = f"{len(fitting)} models answer {endpoint}: {names}"
            raise WrongUse("which model?", where="model", why=why, fix="give a name from /v1/models")
        found = named[0]
        watch.model = found.name
        # A full queue is known before anything is tokenised.
        found.free(endpoint not in TOKENISING)
        if found not in fitting:
            what = f"{found.name} is a {found.facts['family'].upper()} and does not answer {endpoint}"
            why = ""
            if endpoint in CHATTING and found.causal:
                why = found.chat_fault or "it has no chat template"
            raise WrongUse(what, where="model", why=why, fix=f"it answers {', '.join(found.endpoints)}")
        return found


class Call:
    """A request on its way, with the model that answers it."""

    def __init__(self, server: Server, request: Request, model: ServedModel) -> None:
        self.model, self.watch = model, request.state.watch
        self.deadline_s = asyncio.get_running_loop().time() + server.limits.request_s
        self._request = request

    async def beside(self, size: int, work: Callable[[], Result]) -> Result:
        """Long texts are tokenised and large answers made beside the event loop: health checks and others go on."""
        if size <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(_beside, work)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work; give it up, and its slots, when the client goes away, and with a 504 after the deadline."""
        # The body is read: the next message is that the client left.
        gone = asyncio.ensure_future(self._request.receive())
        try:
            async with asyncio.timeout_at(self.deadline_s) as limit:

                def hurry(_: object) -> None:
                    limit.reschedule(0.0)

                gone.add_done_callback(hurry)
                try:
                    return await work
                finally:
                    gone.remove_done_callback(hurry)
        except TimeoutError:
            if gone.done():
                raise HTTPException(499, "the client went away") from None  # nobody reads it
            raise HTTPException(504, "the answer took longer than this server allows") from None
        finally:
            gone.cancel()


Endpoint = Callable[[Call, Any], Coroutine[Any, Any, Any]]


def post(server: Server, path: str, endpoint: Endpoint) -> Route:
    """The route of an endpoint `(call, body)` that a model answers; the body is what its annotation says."""

    @wraps(endpoint)
    async def answer(request: Request, body: Any) -> Response:
        model = server.pick(body.model, path, request.state.watch)
        model.users += 1
        try:
            found = await endpoint(Call(server, request, model), body)
        finally:
            model.users -= 1
        return found if isinstance(found, Response) else json_response(found)

    return with_body(server, path, answer)


def with_body(server: Server, path: str, endpoint: Callable[..., Coroutine[Any, Any, Response]]) -> Route:
    """The route of an endpoint `(request, body)`."""
    kind: Any = get_type_hints(endpoint)["body"]

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        raw = await server.take(request)
        # A web page may send any other type to any server without asking it first.
        said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not re.fullmatch(r"application/(.+\+)?json", said):
            fix = "send the header Content-Type: application/json"
            raise WrongUse("the body is not said to be JSON", where="body", fix=fix)
        try:
            body = read(kind, raw, server.limits)
        except WrongUse:
            request.state.watch.model = server.named(raw)
            raise
        return await endpoint(request, body)

    return Route(path, answer, methods=["POST"])


def read(kind: type[Kind], body: bytes | bytearray, limits: ServerLimits) -> Kind:
    """A body of this kind. Raises WrongUse."""
    fields, parts = _read_by(kind)
    try:
        given = parts.decode(body)
    except UNREADABLE as error:
        if "unknown field" not in str(error):
            raise WrongUse("the body cannot be read", where="body", why=str(error)) from None
        name = str(error).split("`")[1][:100]
        fix = did_you_mean(name, fields, f"known: {', '.join(fields)}")
        raise WrongUse(f"unknown field {name!r}", where=name, fix=fix) from None
    most_texts = limits.queue if issubclass(kind, Generation) else limits.texts
    problems, kept = {}, {}
    for name in given.__struct_fields__:
        raw, field = bytes(getattr(given, name)).strip(), fields.get(name)
        if raw == b"null":
            if field and field.required:
                problems[name] = "Field required"
            continue
        try:
            value = _value(name, field, raw, most_texts)
        except UNREADABLE as error:
            problems[name] = str(error)
            continue
        if field:
            kept[field.name] = value
        elif not kind.unsupported[name].accepts(value):
            why, neutral = kind.unsupported[name].why, kind.unsupported[name].neutral
            fix = " or give ".join(["leave it out", *map(repr, neutral)])
            raise WrongUse(f"{name} is not supported by this server", where=name, why=why, fix=fix)
    if problems:
        said = [f"{name}: {why}" for name, why in problems.items()][:MOST_PROBLEMS]
        raise WrongUse("; ".join(said), where=next(iter(problems)))
    return kind(**kept)


@lru_cache(None)  # evaluating the annotations takes longer than reading a small body
def _read_by(kind: type[Body]) -> tuple[dict[str, Any], Any]:
    """The fields of a body, and what reads each as bytes, up to the first that is unknown."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    parts: Any = [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in {**fields, **kind.unsupported}]
    return fields, msgspec.json.Decoder(msgspec.defstruct("Parts", parts, forbid_unknown_fields=True))


def _value(name: str, field: Any, raw: bytes, most_texts: int) -> Any:
    """The value of a field (None: of one that is missing here), made when it is known to be small enough."""
    kind, required = (field.type, field.required) if field else (Any, False)
    most = FIELD_BYTES.get(name, len(raw) if required else SMALL_BYTES)
    if len(raw) > most:
        raise ValueError(f"larger than {most:,} bytes")
    opening = raw[:1] + raw[1:].lstrip()[:1] if raw[:1] == b"[" else raw[:1]
    strings = (raw.count(b'"') - raw.count(b'\\"')) // 2  # those that end in a backslash count half
    count = {b'["': strings, b"[[": raw.count(b"[") - 1}.get(opening, 0)
    if required:
        check_texts(count, name, most_texts)
    if strings > MOST_STRINGS and name in ("messages", "input"):
        raise ValueError("too many messages, or parts of them")
    if kind != Texts:
        return msgspec.json.decode(raw, type=kind)
    if opening[:1] == b"[" and opening != b'["' and raw.count(b",") >= MOST_IDS:
        raise ValueError(f"more than {MOST_IDS:,} token ids")
    value = msgspec.json.decode(raw, type=SHAPES.get(opening, Ids))
    texts = value if opening in (b'["', b"[[") else [value]
    check_texts(len(texts), name, most_texts)
    return texts
