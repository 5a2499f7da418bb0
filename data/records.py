"""Records of tasks and of fine-tuning: local files in any usual format, or a `datasets` name when there is a network.

Local files come first and need no network code at all. A record remembers its file and line, so that every
complaint about it can name them.
"""

import csv
import io
import json
import lzma
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise, starmap
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..core.errors import Failed, WrongUse
from ..core.files import json_lines
from .ingest.formats import open_blocks

COMPRESSION = (".gz", ".bz2", ".xz", ".zst")
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".tokens", ".raw")
csv.field_size_limit(1 << 24)  # a cell may be a book; a quotation mark without its second takes no more
KNOWN = f"known: {', '.join(FORMATS)}, each also {'/'.join(COMPRESSION)}"


_HALF_PAIR = re.compile("[\ud800-\udfff]")


def whole_characters(value: Any) -> Any:
    """A JSON value without halves of surrogate pairs, which UTF-8 cannot encode: each becomes U+FFFD, as in a store."""
    if isinstance(value, str):
        return value if value.isascii() else _HALF_PAIR.sub("\ufffd", value)
    if isinstance(value, list):
        return [whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(name): whole_characters(item) for name, item in value.items()}
    return value


@dataclass(frozen=True)
class Record:
    """One record of a data file: its fields, and where it stands ("path:line", or "path:row" in parquet)."""

    where: str
    data: dict[str, Any]


def find_files(patterns: Sequence[str], root: Path) -> list[Path]:
    """The files of the first pattern that matches anything below the root, sorted, without compressed copies of files
    beside them. Raises WrongUse for what cannot be a pattern below a directory, such as an absolute path.
    """
    for pattern in patterns:
        if found := [path for path in _matching(pattern, root) if _format(path) in FORMATS]:
            copies = [path for path in found if path.suffix in COMPRESSION and path.with_suffix("") in found]
            return [path for path in found if path not in copies]
    return []


def unknown_files(patterns: Sequence[str], root: Path) -> list[Path]:
    """Files that match, and are of no known format."""
    return [path for pattern in patterns for path in _matching(pattern, root) if _format(path) not in FORMATS]


def _matching(pattern: str, root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        fix = "name files by their place below --data-dir, for example piqa/valid*.jsonl"
        raise WrongUse(f"no pattern of files: {pattern!r}", why=str(error), fix=fix) from None


def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSION else path.suffix


def read_records(
    paths: Sequence[Path],
    limit: int | None = None,
    *,
    lines: int = 0,
    pages: bool = False,
    tabs: bool = False,
) -> list[Record]:
    """The records of several files in order, at most `limit`. Raises WrongUse for a format that is not known and Failed
    for a damaged file, naming file and line.

    A .txt file is cut into records of `lines` each, WikiText `pages` or the rows of a table (`tabs`); else it is one.
    With `pages` the lines of WikiText as records of their own become the same pages.
    """
    return list(islice(iter_records(paths, lines=lines, pages=pages, tabs=tabs), limit))


def iter_records(
    paths: Sequence[Path], *, lines: int = 0, pages: bool = False, tabs: bool = False
) -> Iterator[Record]:
    """The records of `read_records`, one at a time."""

    def text(file: TextIO, path: Path) -> Iterator[Record]:
        if lines:
            return _lines(file, path, lines)
        if pages:
            return _pages(file, path)
        return table(file, path, "\t") if tabs else iter([Record(f"{path}:1", {"text": file.read()})])

    records = (record for path in paths for record in _read(path, text))
    return _articles(records) if pages else records


def _read(path: Path, text: Callable[[TextIO, Path], Iterator[Record]]) -> Iterator[Record]:
    kind = _format(path)
    if kind == ".parquet":
        yield from _parquet(path)
        return
    readers: dict[str, Callable[[TextIO, Path], Iterator[Record]]] = {
        ".jsonl": lambda file, path: starmap(Record, json_lines(path, file)),
        ".json": _json,
        ".csv": lambda file, path: table(file, path, ","),
        ".tsv": lambda file, path: table(file, path, "\t"),
        **dict.fromkeys((".txt", ".tokens", ".raw"), text),
    }
    if kind not in readers:
        raise WrongUse("unknown data format", where=path, fix=KNOWN)
    try:
        with _open(path) as file:
            yield from readers[kind](file, path)
    except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError, csv.Error) as error:
        fix = "check that the file is whole"
        raise Failed("cannot read the data file", where=path, why=str(error), fix=fix) from error


def _open(path: Path) -> TextIO:
    """A UTF-8 file as text, line ends as they are; a byte order mark at its beginning is no part of it."""
    file: Any = _unpacked(path) if path.suffix in COMPRESSION else path.open("rb")
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _unpacked(path: Path) -> io.BytesIO:
    """A compressed file, unpacked in memory."""
    if path.suffix == ".xz":
        return io.BytesIO(lzma.decompress(path.read_bytes()))
    with open_blocks(str(path), path.suffix[1:], 0, lambda _: None) as blocks:
        return io.BytesIO(b"".join(blocks))


def _json(file: TextIO, path: Path) -> Iterator[Record]:
    """A JSON file: a list of records, or an object with one under `data` or `rows`."""
    try:
        tree = json.load(file)
    except (ValueError, RecursionError) as error:
        fix = "give one record a line in a .jsonl file"
        raise Failed("not valid JSON", where=path, why=str(error), fix=fix) from error
    if isinstance(tree, dict):
        tree = tree.get("data", tree.get("rows"))
    if not isinstance(tree, list) or not all(isinstance(item, dict) for item in tree):
        fix = "give a list of objects, or one record a line as .jsonl"
        raise Failed("no list of records in the file", where=path, fix=fix)
    for number, item in enumerate(tree, 1):
        wrapped = set(item) == {"row_idx", "row", "truncated_cells"}
        yield Record(f"{path}:{number}", item["row"] if wrapped else item)


def table(file: Iterable[str], path: Path, delimiter: str) -> Iterator[Record]:
    """The rows of a table's lines, whose first is the header. Raises Failed for a row of another width."""
    # Tab-separated benchmark files (GLUE) hold bare quotes inside cells and never quote a cell.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    rows = csv.reader(file, delimiter=delimiter, quoting=quoting)
    header = next(rows, [])
    if twice := next((name for name in header if name and header.count(name) > 1), ""):
        why = "the later one would take the first one's place"
        what = f"two columns are called {twice!r}"
        raise Failed(what, where=f"{path}:1", why=why, fix="rename one of them")
    for row in filter(None, rows):  # blank lines are no rows
        if len(row) != len(header):
            why = f"cells: {len(row)}; columns: {len(header)} ({', '.join(header)})"
            fix = 'a cell with a comma or a line break stands in quotation marks: "one, two"'
            if delimiter == "\t":
                fix = "a cell holds no tab and no line break; a text that does goes into .jsonl or .csv"
            raise Failed("a row of another width", where=f"{path}:{rows.line_num}", why=why, fix=fix)
        yield Record(f"{path}:{rows.line_num}", dict(zip(header, row)))


def _lines(file: TextIO, path: Path, count: int) -> Iterator[Record]:
    number = 1
    while lines := [line.rstrip("\r\n") for line in islice(file, count)]:
        if len(lines) < count:
            why = f"{len(lines)} lines, a record has {count}"
            raise Failed("the last record is cut", where=f"{path}:{number}", why=why, fix="restore the file")
        yield Record(f"{path}:{number}", {"lines": lines})
        number += count


_TITLE = re.compile("= (?!=).*(?<!=) =")  # one sign on each side: two and more are sections of an article


def _pages(file: TextIO, path: Path) -> Iterator[Record]:
    """WikiText's articles as lm-evaluation-harness's data set parts them: one begins at every line that looks like a
    top-level title (" = Title = "), two lines of prose in the test split among them.
    """
    lines = file.read().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    starts = [number for number, line in enumerate(lines) if _TITLE.fullmatch(line.strip())]
    for start, stop in pairwise([0, *starts, len(lines)]):
        page = "\n".join(lines[start:stop])
        if page.strip():
            yield Record(f"{path}:{start + 1}", {"page": page})


def _articles(records: Iterator[Record]) -> Iterator[Record]:
    """The hub's other form of WikiText, a line a record, as the articles of `_pages`; before a title as they are."""
    lines: list[str] = []
    where = ""
    for record in records:
        line = record.data.get("text")
        if len(record.data) > 1 or not isinstance(line, str):
            yield record
        elif _TITLE.fullmatch(line.strip()):
            yield from _article(where, "".join(lines).removesuffix("\n"))
            lines, where = [whole_line(line)], record.where
        elif lines:
            lines.append(whole_line(line))
        elif line.strip():
            yield record
    yield from _article(where, "".join(lines))


def whole_line(text: str) -> str:
    """The text with its line end; an empty one is WikiText's blank line, whose blank (to Megatron-LM a word) went."""
    return text if text.endswith("\n") else f"{text}\n" if text else " \n"


def _article(where: str, page: str) -> Iterator[Record]:
    if page.strip():
        yield Record(where, {"page": page})


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(_unpacked(path) if path.suffix in COMPRESSION else path) as file:
            number = 0
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}:{number}", row)
    except (pyarrow.ArrowException, OSError, EOFError, lzma.LZMAError) as error:
        fix = "check that the file is whole"
        raise Failed("cannot read the parquet file", where=path, why=str(error), fix=fix) from error


def hub_records(name: str, config: str | None, split: str, limit: int | None) -> list[Record]:
    """The records of a `datasets` name. Raises WrongUse when it cannot be had: --data-dir is the way out."""
    import datasets

    what = f"cannot get the data set {name} ({config or 'default'}, {split})"
    fix = "give the files yourself with --data-dir; `throughline eval --list` names those of each task"
    offline = not _hub_answers()
    try:
        with _offline() if offline else nullcontext():  # else the library tries for half a minute
            found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises many kinds: no network, unknown name, gated, script refused
        why = f"{type(error).__name__}: {error}"
        if offline:
            why = "the Hugging Face hub does not answer from here, and the data set is not in its cache"
        raise WrongUse(what, why=why, fix=fix) from error
    count = len(found) if limit is None else min(limit, len(found))
    return [Record(f"{name}/{split}:{i + 1}", found[i]) for i in range(count)]


@cache
def _hub_answers() -> bool:
    """Whether the hub's server takes a connection; behind a proxy it is taken to be there."""
    from huggingface_hub import constants

    url = urlsplit(constants.ENDPOINT)
    if getproxies().get(url.scheme) or constants.HF_HUB_OFFLINE:
        return True
    try:
        with socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), 5):
            return True
    except OSError:
        return False


@contextmanager
def _offline() -> Iterator[None]:
    """The libraries of the hub read their caches and ask nobody."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
