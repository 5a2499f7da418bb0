"""What a server holds at once, and for whom: bounds of requests, and the keys of those who may ask."""

import hashlib
import hmac
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.exceptions import HTTPException

from ...core.errors import WrongUse

KEY_LINE = "give a text file with one key a line, and behind it if need be name=NAME priority=N places=N per_minute=N"


@dataclass(frozen=True)
class ServerLimits:
    """What a server holds at once, and how long. Beyond `queue` waiting jobs a request is answered with 429."""

    slots: int = 8
    speculate: int = 0  # tokens of an answer that are guessed ahead
    queue: int = 256
    body_bytes: int = 4_000_000
    bodies_bytes: int = 64_000_000  # of all requests together
    max_tokens: int | None = None  # generated per answer; None = what fits the context
    max_n: int = 128
    request_s: float = 600.0  # from the first byte of a body to the last of the answer
    body_s: float = 30.0  # for the client to send its body
    load_s: float = 1800.0  # for a model to be opened
    hang_s: float = 60.0  # in which a model's process must say that it lives
    share_prefixes: bool = False  # of prompts, among keys


LIMITS = ServerLimits()


def later(status: int, what: str, wait_s: int) -> HTTPException:
    """A refusal that says when to come back."""
    return HTTPException(status, f"{what}; try again in {wait_s} s", {"Retry-After": str(wait_s)})


class Key(msgspec.Struct, dict=True, forbid_unknown_fields=True):
    """Who asks: one API key, or everybody where none is needed."""

    name: str = ""  # for the access log
    priority: Annotated[int, msgspec.Meta(ge=-10, le=10)] = 0  # the higher, the earlier
    places: Annotated[int, msgspec.Meta(ge=1)] | None = (
        None  # answers in work and waiting at once; None = all
    )
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
        """Count answers that are accepted. Raises HTTPException 429 beyond the key's places."""
        if self.places is not None and self.held + answers > self.places:
            raise later(429, f"{self.held} of this key's {self.places} places are taken", 1)
        self.held += answers


def find_key(keys: Sequence[Key], authorization: str) -> Key | None:
    """Whose key a header holds. All are compared, in constant time: the time of an answer tells nothing of how much was
    right.
    """
    kind, _, given = authorization.partition(" ")
    digest = hashlib.sha256(given.strip().encode()).digest()
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found and kind.lower() == "bearer" else None


def read_keys(file: Path | None, variable: str | None, places: int) -> list[Key]:
    """API keys from a file (one a line with its settings, # begins a comment) and an environment variable (commas
    between). Of several keys none fills more than half of the `places` unless its line says so.

    Raises WrongUse for a file that is not there, holds none or says what is no setting.
    """
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
        key.places = key.places or max(1, places // 2)
    return keys
