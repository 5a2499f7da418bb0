"""The errors a user can meet: what happened, where, why, and what to do; one exit code per kind.

The command line prints the four parts; a traceback appears with `--debug`. Asserts are for invariants of our own.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_REFUSED = 3
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130
EXIT_FILE = "THROUGHLINE_EXIT_FILE"  # the file in which the first process of a launch says what became of it


class ThroughlineError(Exception):
    """Root of every error a user can meet: `what` happened, `where` (path, file:line, field), `why`, the `fix`."""

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: object = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, str(where), why, fix

    def __str__(self) -> str:
        parts = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines = text.splitlines()
                parts.append(f"  {label + ':':<7}{lines[0]}")
                parts += [f"         {line}" for line in lines[1:]]
        return "\n".join(parts)

    def as_dict(self) -> dict[str, object]:
        """The error for `--json`."""
        said = {name: getattr(self, name) for name in ("where", "why", "fix", "exit_code")}
        return {"error": self.what} | said

    def __reduce__(self) -> tuple:  # past __init__, whose parts are keywords: they are in the __dict__
        return type(self).__new__, (type(self), *self.args), self.__dict__


def nearest(name: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """The names that look most like one that is not there, whatever their case; at most `limit`, none far-fetched."""
    import difflib  # by those alone who mistyped

    lowered = {one.lower(): one for one in known}
    return [lowered[one] for one in difflib.get_close_matches(name.lower(), lowered, limit)]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", limit: int = 1) -> str:
    """The fix for a name that is not there: the nearest ones, or `otherwise` where none is near."""
    near = nearest(name, known, limit)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def beside(path: Path, otherwise: str = "") -> str:
    """The fix for a path that is not there: the name beside it that looks most like it, or `otherwise`."""
    near = nearest(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [])
    return f"did you mean {path.parent / near[0]}?" if near else otherwise


def download_hint(path: Path) -> str:
    """How the model of a name that may be one of the hub is had; nothing for what is a path by its look."""
    ours = path.parts[:1] == ("runs",) or ".." in path.parts or path.suffix in (".pt", ".gguf", ".onnx")
    if ours or path.is_absolute() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path), re.ASCII):
        return ""
    return f"; a model of the hub is downloaded first: hf download {path} --local-dir {path.name}"


class Failed(ThroughlineError):
    """The work was understood and could not be done (exit 1)."""


class WrongUse(ThroughlineError):
    """A wrong option, recipe or path, or a device that is not there (exit 2)."""

    exit_code = EXIT_WRONG_USE


class MissingExtra(WrongUse):
    """An optional package is not installed (exit 2)."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        clone = " (an extra: docs/extras.md has the command for a clone)" if "[" in install else ""
        what = f"{needed_for} needs the package {package}, which is not installed"
        super().__init__(what, fix=f"pip install {install}{clone}")


def extra(module: str, needed_for: str, name: str) -> Any:
    """A module of the extra of this name. Raises MissingExtra where it is not installed."""
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        raise MissingExtra(module, needed_for, f"'throughline[{name}]'") from error


class Refused(ThroughlineError):
    """A check said no: a hash, a parity bound, a capability, a comparison (exit 3)."""

    exit_code = EXIT_REFUSED


class Stopped(ThroughlineError):
    """Stopped by a signal with everything saved; the same command continues (exit 75)."""

    exit_code = EXIT_STOPPED
