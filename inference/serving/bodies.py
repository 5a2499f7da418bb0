"""The body of a request: taken from its connection within bounds of time and bytes, then read field by field, the size
of each field bounded before its values become objects.
"""

import asyncio
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ...core.errors import WrongUse, did_you_mean
from .api_types import Body, Ids, Text, Texts
from .limits import ServerLimits

SHAPES = {b'"': Text, b'["': Annotated[list[Text], msgspec.Meta(min_length=1)], b"[[": list[Ids]}
# Fields as long as a body may be.
LONG = (
    "prompt",
    "input",
    "inputs",
    "messages",
    "query",
    "documents",
    "texts",
    "text_1",
    "text_2",
    "instructions",
)
FIELD_BYTES = {"tokens": 1 << 19} | dict.fromkeys(LONG, 1 << 62)
SMALL_BYTES = 1 << 16  # of any other field
MOST_IDS = 1 << 19  # of a request: Python's lists of two million take the event loop 30 ms
MOST_PROBLEMS = 8  # told of one body
FREE_BYTES = 1 << 14  # of each body, which the budget leaves out: large ones must not shut small ones out
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
Kind = TypeVar("Kind", bound=Body)


class Budget:
    """Bytes of all bodies that are held now."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits, self.held = limits, 0

    async def take(self, request: Request) -> bytearray:
        """The body of a request. Raises HTTPException: 413 when it is too large, 408 when it does not come, 503 when
        too much is held.
        """
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
                        text = "the bodies of other requests fill the memory for them; try again in 1 s"
                        raise HTTPException(503, text, {"Retry-After": "1"})
                    self.held += counted
                    watch.held += counted
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {limits.body_s:g} s") from None
        watch.body_read = True
        return come


def read(kind: type[Kind], body: bytes | bytearray, most_texts: int) -> Kind:
    """A body of this kind, with at most so many texts in a field. Raises WrongUse."""
    fields = _fields(kind)
    try:
        given = _parts(kind).decode(body)
    except UNREADABLE as error:
        if "unknown field" not in str(error):
            raise WrongUse("the body cannot be read", where="body", why=str(error)) from None
        name = str(error).split("`")[1][:100]
        fix = did_you_mean(name, [*fields, *kind.missing], f"known: {', '.join(fields)}")
        raise WrongUse(f"unknown field {name!r}", where=name, fix=fix) from None
    problems, kept = {}, {}
    for name in given.__struct_fields__:
        raw = bytes(getattr(given, name)).strip()
        if raw != b"null":
            try:
                kept[name] = _value(name, fields[name].type if name in fields else Any, raw, most_texts)
            except UNREADABLE as error:
                problems[name] = str(error)
        elif name in fields and fields[name].required:
            problems[name] = "Field required"
    for name, neutral in kind.missing.items():
        if name in kept and kept.pop(name) not in neutral:
            worth = " or ".join(map(repr, neutral))
            fix = f"leave it out{f' or give {worth}' if worth else ''}"
            raise WrongUse(f"{name} is not supported by this server", where=name, fix=fix)
    if problems:
        said = [f"{name}: {why}" for name, why in problems.items()][:MOST_PROBLEMS]
        raise WrongUse("; ".join(said), where=next(iter(problems)))
    return kind(**kept)


@lru_cache(None)  # evaluating the annotations takes longer than reading a small body
def _fields(kind: type[Body]) -> dict[str, Any]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


@lru_cache(None)
def _parts(kind: type[Body]) -> Any:
    """Reads the fields of a body as bytes, up to the first that is unknown."""
    names = [*_fields(kind), *kind.missing]
    fields: Any = [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Parts", fields, forbid_unknown_fields=True))


def _value(name: str, kind: Any, raw: bytes, most_texts: int) -> Any:
    """The value of a field, made when it is known to be small enough."""
    if len(raw) > FIELD_BYTES.get(name, SMALL_BYTES):
        raise ValueError(f"larger than {FIELD_BYTES.get(name, SMALL_BYTES):,} bytes")
    opening = raw[:1] + raw[1:].lstrip()[:1] if raw[:1] == b"[" else raw[:1]
    # Texts that end in a backslash count half.
    count = {b'["': (raw.count(b'"') - raw.count(b'\\"')) // 2, b"[[": raw.count(b"[") - 1}.get(opening, 0)
    check_texts(count if name in LONG else 0, most_texts, name)
    if name in ("messages", "input") and raw.count(b'"role"') > 1000:
        raise ValueError("more than 1000 messages")
    if kind != Texts:
        return msgspec.json.decode(raw, type=kind)
    if opening[:1] == b"[" and opening != b'["' and raw.count(b",") >= MOST_IDS:
        raise ValueError(f"more than {MOST_IDS:,} token ids")
    value = msgspec.json.decode(raw, type=SHAPES.get(opening, Ids))
    texts = value if opening in (b'["', b"[[") else [value]
    check_texts(len(texts), most_texts, name)
    return texts


def check_texts(count: int, most: int, where: str) -> None:
    """Refuse more texts in one request than the queue holds."""
    if count > most:
        fix = "send them in parts"
        raise WrongUse("too many texts in one request", where=where, why=f"{count} > {most}", fix=fix)
