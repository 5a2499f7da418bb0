"""Stored answers: a dict in memory, JSON lines on disk, so that a stopped evaluation goes on where it was."""

import json
import shutil
import time
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from ..core.files import write_atomic
from ..core.scorer import Score
from ..core.workspace import Workspace, read_records


class Answers:
    """The store of answers: a dict in memory, JSON lines on disk (none without a directory)."""

    def __init__(self, directory: Path | None, rank: int = 0) -> None:
        self.directory = directory
        self._file = f"answers-{rank}.jsonl"
        self._known: dict[str, Any] = {}
        self._dates: dict[str, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read what every rank has written."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.directory.glob("answers-*.jsonl")):
                for line in read_records(file):
                    self._known[line["key"]], self._dates[line["key"]] = line["answer"], line.get("date", "")

    def dates(self, keys: Iterable[str]) -> list[str]:
        """The days on which those of `keys` that are known were answered, in order of time."""
        return sorted(self._dates[key] for key in keys if key in self._dates)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, found: dict[str, Any]) -> None:
        """Keep answers and append them to this rank's file in one write."""
        self._known.update(found)
        if self.directory is not None:
            day = time.strftime("%Y-%m-%d")
            lines = ({"key": key, "answer": answer, "date": day} for key, answer in found.items())
            Workspace(self.directory).append(self._file, *lines)


def replace_answers(directory: Path, new: Path, keys: Set[str]) -> None:
    """Put the answers to these keys that lie in another directory in the place of every rank's, and remove it."""
    lines = [line for file in sorted(new.glob("answers-*.jsonl")) for line in read_records(file)]
    for file in sorted({directory / "answers-0.jsonl", *directory.glob("answers-*.jsonl")}):
        lines += (line for line in read_records(file) if line["key"] not in keys)
        write_atomic(file, "".join(json.dumps(line) + "\n" for line in lines))
        lines = []
    shutil.rmtree(new)


def packed(score: Score) -> list[Any]:
    """A score as a short JSON list (numbers come back bit for bit)."""
    values = [score.logprob, score.right, score.tokens, score.rank]
    return [*values, list(score.token_logprobs)] if score.token_logprobs else values


def unpacked(values: list[Any]) -> Score:
    """The score that `packed` made the list of."""
    logprob, right, tokens, rank, kept = [*values, ()][:5]
    return Score(logprob, right, tokens, rank, tuple(kept))
