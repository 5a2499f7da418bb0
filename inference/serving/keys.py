"""API keys: who may do what, how much and how soon. A file holds one key a line, which is read again while the server
runs; an environment variable holds further ones.
"""

import hashlib
import hmac
import math
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.exceptions import HTTPException

from ...core.errors import WrongUse, did_you_mean

SCOPES = ("inference", "metrics", "admin")
KEY_LINE = (
    "give one key a line, of visible ASCII characters, and behind it if need be "
    "name=NAME scopes=inference,metrics,admin priority=N places=N per_minute=N"
)
KEY_TEXT = re.compile(r"[\x21-\x7e]+")  # what every client can send in a header; others encode it differently


def later(status: int, what: str, wait_s: int) -> HTTPException:
    """A refusal that says when to come back."""
    return HTTPException(status, f"{what}; try again in {wait_s} s", {"Retry-After": str(wait_s)})


class Key(msgspec.Struct, dict=True, forbid_unknown_fields=True):
    """The caller: one API key, or every client of a server without keys."""

    name: str = ""  # for the access log
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] = 0  # the higher, the earlier
    places: Annotated[int, msgspec.Meta(ge=1)] | None = None  # for answers in work and waiting; None = all
    per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None  # inference requests
    scopes: tuple[str, ...] = ("inference",)

    def __post_init__(self) -> None:
        self.digest = b""
        self.held = 0  # places of what is accepted and not answered
        self.free_s = 0.0  # when all requests so far are paid for

    @classmethod
    def of(cls, text: str, **settings: Any) -> "Key":
        """The key of this text. Raises msgspec.ValidationError for a value that a setting does not take."""
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

    def take(self, places: int) -> None:
        """Count the places of a request. Raises HTTPException 429 beyond the key's places, WrongUse beyond all."""
        if self.places is not None and self.held + places > self.places:
            if places > self.places:
                what, why = "too many answers for this key in one request", f"{places} > {self.places}"
                raise WrongUse(what, why=why)
            raise later(429, f"{self.held} of this key's {self.places} places are taken", 1)
        self.held += places

    def allow(self, scope: str) -> None:
        """Raise HTTPException 403 unless the key has this scope."""
        if scope not in self.scopes:
            has = ",".join(self.scopes)
            fix = f"add scopes={has},{scope} to its line in the key file"
            raise HTTPException(403, f"this key has the scope {has}, and {scope} is needed; {fix}")


def find_key(keys: Sequence[Key], authorization: bytes) -> Key | None:
    """Whose key a header holds. All are compared, in constant time: no time tells how much was right."""
    kind, _, given = authorization.partition(b" ")
    digest = hashlib.sha256(given.strip()).digest()
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found and kind.lower() == b"bearer" else None


def read_keys(file: Path | None, variable: str | None, places: int) -> list[Key]:
    """API keys of a file (a line each, # begins a comment) and a variable (commas between). Of several keys none gets
    more than half of the `places` unless its line says so. Raises WrongUse, which names file and line.
    """
    entries = [("THROUGHLINE_API_KEYS", text) for text in (variable or "").split(",")]
    if file is not None:
        lines = _lines(file)
        entries = [*entries, *((f"{file}:{number}", line) for number, line in enumerate(lines, 1))]
    found: dict[bytes, tuple[str, Key]] = {}
    for place, text in entries:
        words = text.split()
        if not words or words[0].startswith("#"):
            continue
        key = _key(words, place)
        if key.digest in found:
            why = f"{found[key.digest][0]} has it"
            raise WrongUse("the same key stands twice", where=place, why=why, fix="remove one of the two")
        found[key.digest] = place, key
    if file is not None and all(place == "THROUGHLINE_API_KEYS" for place, _ in found.values()):
        raise WrongUse("there is no API key in the file", where=file, fix=KEY_LINE)
    keys = [key for _, key in found.values()]
    for key in keys if len(keys) > 1 else ():
        key.places = key.places or max(1, places // 2)
    return keys


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        why = error.strerror or str(error)
        raise WrongUse("the API keys cannot be read", where=file, why=why, fix=KEY_LINE) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = "this line is no UTF-8 text"
        raise WrongUse(
            "the API keys cannot be read", where=f"{file}:{line}", why=why, fix=KEY_LINE
        ) from error


def _key(words: Sequence[str], place: str) -> Key:
    """The key of one line. The key itself stands in no error: it is a secret."""
    text, *rest = words
    what = "the API keys cannot be read"
    if not KEY_TEXT.fullmatch(text):
        why = "the key has a character that is not visible ASCII, which clients do not send alike in a header"
        raise WrongUse(what, where=place, why=why, fix=KEY_LINE)
    settings: dict[str, Any] = {}
    for number, word in enumerate(rest, 2):
        name, equals, value = word.partition("=")
        if not equals:
            why = f"word {number} of the line is no NAME=VALUE"
            raise WrongUse(what, where=place, why=why, fix=KEY_LINE)
        if name not in Key.__struct_fields__:
            fix = did_you_mean(name, Key.__struct_fields__, KEY_LINE)
            raise WrongUse(what, where=place, why=f"no setting is called {name[:40]!r}", fix=fix)
        settings[name] = value
    if "scopes" in settings:
        settings["scopes"] = _scopes(settings["scopes"], place)
    try:
        return Key.of(text, **settings)
    except msgspec.ValidationError as error:
        raise WrongUse(what, where=place, why=str(error), fix=KEY_LINE) from error


def _scopes(text: str, place: str) -> tuple[str, ...]:
    """Scopes with commas between, or + in the variable, whose commas part keys."""
    scopes = tuple(re.split("[,+]", text))
    if unknown := next((scope for scope in scopes if scope not in SCOPES), None):
        fix = did_you_mean(unknown, SCOPES, f"give one or more of {', '.join(SCOPES)}, with commas between")
        raise WrongUse(
            "the API keys cannot be read", where=place, why=f"no scope is called {unknown!r}", fix=fix
        )
    return scopes


def replace_keys(keys: list[Key], newer: Iterable[Key]) -> None:
    """Put newer keys in the place of `keys`, in the same list. A key that stays keeps its object, which requests hold,
    and with it what it has used of its places and of its minute.
    """
    known = {key.digest: key for key in keys}
    replaced = []
    for key in newer:
        if (old := known.get(key.digest)) is not None:
            for name in Key.__struct_fields__:
                setattr(old, name, getattr(key, name))
            key = old
        replaced.append(key)
    keys[:] = replaced
