"""What is read again while a server runs, on SIGHUP or when a file changes: API keys and TLS certificates."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.console import say, warn
from ...core.errors import ThroughlineError, WrongUse

Stamp = tuple[int, int, int] | None


@dataclass
class ReloadedFile:
    """Files that are read while the server runs: what they are called, and what reads them again and says so."""

    name: str
    paths: Sequence[Path]
    read: Callable[[], None]  # raises WrongUse for what cannot be used, and changes nothing then

    def __post_init__(self) -> None:
        self._seen = self._stamps()

    def changed(self) -> bool:
        """Whether one of the files is another one than at the last call."""
        stamps = self._stamps()
        differs, self._seen = stamps != self._seen, stamps
        return differs

    def reload(self) -> None:
        """Read the files again; what they held stays in use when that fails."""
        try:
            self.read()
        except (ThroughlineError, OSError) as error:
            warn(f"{self.name} were not read again, the older ones stay in use: {error}")
        else:
            say(f"{self.name} were read again")

    def _stamps(self) -> list[Stamp]:
        return [_stamp(path) for path in self.paths]


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let new connections have this certificate. Raises WrongUse when it and its key do not fit together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise bad_certificate(error, certificate) from error
    context.load_cert_chain(certificate, key)


def bad_certificate(error: OSError, certificate: Path | str) -> WrongUse:
    """The error of a certificate or key that cannot be used."""
    why = str(getattr(error, "reason", None) or error.strerror or error).replace("_", " ").lower()
    fix = "give a chain of certificates and the private key of its first one, both in PEM"
    return WrongUse("TLS cannot begin", where=certificate, why=why, fix=fix)
