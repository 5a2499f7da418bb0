"""What the user names as input - files, directories, globs, datasets - as a list of sources in a fixed order."""

import glob
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.console import warn
from ...core.errors import WrongUse
from ...core.files import read_json

FORMATS = dict.fromkeys((".txt", ".md", ".text"), "txt") | dict.fromkeys((".jsonl", ".ndjson"), "jsonl")
FORMATS |= {".parquet": "parquet"}
# read where they are named, not found in a directory
NAMED = {".json": "jsonl", ".csv": "table", ".tsv": "table"}
MARKUP = (".html", ".htm", ".xhtml", ".xml", ".rtf", ".epub", ".ipynb")
COMPRESSIONS = {".gz": "gz", ".bz2": "bz2", ".zst": "zst"}
DATASET_PREFIX = "datasets:"


@dataclass(frozen=True)
class Source:
    """One input: a file or a dataset."""

    path: str
    bytes: int  # 0 when unknown
    modified_ns: int  # 0 for a dataset
    format: Literal["txt", "jsonl", "table", "parquet", "dataset"]
    compression: Literal["", "gz", "bz2", "zst"] = ""
    parts: int = 0  # files of a streamed dataset, which can be read apart

    @property
    def place(self) -> str:
        """Its path from anywhere, or the name of a dataset of the hub."""
        return self.path if self.path.startswith(DATASET_PREFIX) else os.path.abspath(self.path)

    @property
    def streamed(self) -> bool:
        """Whether it is a dataset of unknown size, which is read by parts and not by bytes."""
        return self.format == "dataset" and not self.bytes


def expand_inputs(inputs: list[str]) -> list[Source]:
    """Sources in the order given; a directory or a glob gives its files sorted by path.

    `datasets:NAME[:CONFIG]` is streamed from the hub; a `save_to_disk` directory is recognised.
    A file and links to it count once. Raises WrongUse for a missing path, a directory without text files, a file named
    twice, a pipe.
    """
    if not inputs:
        raise WrongUse("no input given", fix="name files, directories, globs or datasets:NAME")
    sources: list[Source] = []
    for name in inputs:
        if name.startswith(DATASET_PREFIX):
            local = name.removeprefix(DATASET_PREFIX)
            if not local.partition(":")[0]:
                fix = "write datasets:NAME or datasets:NAME:CONFIG"
                raise WrongUse("no dataset is named", where=name, fix=fix)
            if is_saved_dataset(local):
                fix = f"name it as it is: {local}"
                raise WrongUse("a saved dataset is none of the hub", where=name, fix=fix)
            sources.append(Source(name, 0, 0, "dataset"))
        elif os.path.isdir(name):
            sources += _directory(name)
        elif os.path.exists(name):
            sources.append(_file(name))
        elif matches := sorted(glob.glob(name, recursive=True)):
            for match in matches:
                if not os.path.isdir(match):
                    sources.append(_file(match))
                elif "**" not in name:  # which names what is in its directories itself
                    sources += _directory(match)
        else:
            fix = "check the path; a dataset of the hub is written datasets:NAME"
            raise WrongUse("no such input", where=name, fix=fix)
    if not sources:
        raise WrongUse("no file in the input", where=", ".join(inputs), fix="check the pattern")
    first: dict[object, str] = {}
    for source in sources:
        content = _content(source)
        if content in first:
            why = f"it is the same file as {first[content]}" if first[content] != source.place else ""
            raise WrongUse("an input is named twice", where=source.place, why=why, fix="name every file once")
        first[content] = source.place
    empty = [source.path for source in sources if source.modified_ns and not source.bytes]
    if empty:
        warn(f"{len(empty)} input files are empty (0 bytes), {empty[0]} the first")
    return sources


def _content(source: Source) -> object:
    """Return a key that is equal for two names of the same content: the inode of a file, or the name of a dataset."""
    if source.format == "dataset":
        return source.place
    facts = os.stat(source.path)
    return (facts.st_dev, facts.st_ino) if facts.st_ino else os.path.realpath(source.path)


def _each_content_once(directory: str, sources: list[Source]) -> list[Source]:
    """The files of a directory, of several links to one content the first that is no symbolic link."""
    by_content: dict[object, list[Source]] = {}
    for source in sources:
        by_content.setdefault(_content(source), []).append(source)
    kept = {min(same, key=lambda one: os.path.islink(one.path)) for same in by_content.values()}
    links = [source for source in sources if source not in kept]
    if links:
        what = f"{len(links)} files are links to others of them and were left out"
        warn(f"{directory}: {what}, {links[0].path} the first")
    return [source for source in sources if source in kept]


def suffix_of(path: str) -> tuple[str, str]:
    """(suffix, compression) of a file's name, in lower case."""
    stem, suffix = os.path.splitext(path.lower())
    compression = COMPRESSIONS.get(suffix, "")
    return os.path.splitext(stem)[1] if compression else suffix, compression


def check_no_markup(path: str) -> None:
    """Refuse what is text by its bytes alone: its tags would be taken for words."""
    if (suffix := suffix_of(path)[0]) in MARKUP:
        fix = "extract its text first (pandoc -t plain, trafilatura); or name it .txt if the tags are wanted"
        raise WrongUse(f"a {suffix} file is markup, not text", where=path, fix=fix)


def _file(path: str) -> Source:
    """A file named by the user: an unknown suffix is taken as text, and judged when it is read."""
    try:
        facts = os.stat(path)
    except OSError as error:  # a link to nothing
        why, fix = error.strerror or str(error), "put the file back, or remove its name"
        raise WrongUse("cannot read an input", where=path, why=why, fix=fix) from error
    if not stat.S_ISREG(facts.st_mode):
        why, fix = "it can be read once only, and its size is not known", "write the text to a file first"
        raise WrongUse("an input is no regular file", where=path, why=why, fix=fix)
    check_no_markup(path)
    suffix, compression = suffix_of(path)
    form = (FORMATS | NAMED).get(suffix, "")
    if form == "parquet" and compression:
        fix = "unpack it: parquet is compressed itself"
        raise WrongUse("a parquet file inside another compression", where=path, fix=fix)
    return Source(path, facts.st_size, facts.st_mtime_ns, form or "txt", compression)  # type: ignore[arg-type]


def _directory(path: str) -> list[Source]:
    if is_saved_dataset(path):
        size = sum(file.stat().st_size for file in Path(path).rglob("*.arrow"))
        return [Source(path, size, 0, "dataset")]
    found: list[Source] = []
    ignored: list[str] = []
    seen: set[str] = set()  # links may lead in circles
    for folder, folders, names in os.walk(path, onerror=_unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in names:
            if not name.startswith("."):
                full = os.path.join(folder, name)
                found.append(_file(full)) if suffix_of(full)[0] in FORMATS else ignored.append(full)
    if ignored:
        what = f"{len(ignored)} files are not text by their names"
        warn(f"{path}: {what} and were left out, {ignored[0]} the first")
    if not found:
        suffixes = ", ".join([*FORMATS, *(f"…{suffix}" for suffix in COMPRESSIONS)])
        why, fix = f"looked for {suffixes}", "name the files themselves"
        raise WrongUse("a directory without text files", where=path, why=why, fix=fix)
    return _each_content_once(path, sorted(found, key=lambda source: source.path))


def _unreadable(error: OSError) -> None:
    why = error.strerror or str(error)
    raise WrongUse("cannot read a directory", where=error.filename, why=why, fix="leave it out") from error


def is_saved_dataset(path: str) -> bool:
    """Whether a directory was written by `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file():
        return True
    whole = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return whole and "_data_files" in read_json(folder / "state.json")
