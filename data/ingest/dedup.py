"""Duplicate documents out of text: exact by a 128-bit hash, near by MinHash; the first of a kind is kept.

Three passes: hashes go to 256 buckets on disk; each bucket is sorted alone; then the text is read again and the records
that stay are written with all their fields as .jsonl.zst, one file per input. Memory grows with the duplicates alone.

Near duplicates: 14 bands of 8 minimum hashes over 5-grams, the setting of datatrove; two documents that share half of
their 5-grams meet with probability 0.05, that share 0.8 of them with 0.92, that share 0.9 with 0.9996. The grams are of
words in lower case without punctuation. A character of a script that puts no spaces between words (Chinese, Japanese,
Thai, Khmer, ...) is a word of its own, and every character is one in a text whose words are long. Texts of fewer than
5 words meet those with the same words alone, and are counted as `short`.
"""

import base64
import hashlib
import json
import re
import shutil
import tempfile
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...core.artifact import check_free
from ...core.console import progress
from ...core.errors import Failed
from ...core.files import full_disk, written_aside
from .inputs import Source, expand_inputs
from .readers import Reader, ReadOptions
from .task_plan import check_unchanged, read_unchanged
from .text import COUNTS, MAX_REPLACED, check_replaced

BUCKETS = 256
REPORT = ".report.json"  # hidden: `data tokenize OUT` and OUT/* read the records alone
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8")])
BANDS, ROWS, GRAM = 14, 8, 5
GRAMS_AT_ONCE = 1 << 13  # 7 MB of hashes, however long a document is
_RANDOM = np.random.Generator(np.random.Philox(20))
_MULTIPLIERS = _RANDOM.integers(1, 2**63, (BANDS * ROWS, 1), np.uint64) * 2 + 1
_MIX = _RANDOM.integers(1, 2**63, max(ROWS, GRAM), np.uint64) * 2 + 1


def dedup(
    inputs: list[str],
    out: Path | str | None,
    options: ReadOptions,
    near: bool = False,
    dry_run: bool = False,
    max_replaced: float = MAX_REPLACED,
) -> dict[str, Any]:
    """Remove documents of `inputs` that differ from others in white space alone; returns counts. With `dry_run` nothing
    is written. Raises WrongUse for a taken `out`, Failed for bad input and over `max_replaced` invalid characters.
    """
    sources = expand_inputs(inputs)
    options = replace(options, piece_bytes=None)
    if not dry_run:
        check_free(out or "")
    place = Path(out).parent if out and not dry_run else Path(tempfile.gettempdir())
    with full_disk(place):
        place.mkdir(parents=True, exist_ok=True)
    with full_disk(place), tempfile.TemporaryDirectory(dir=place, prefix=".dedup.", suffix=".tmp") as scratch:
        counts: Counter[str] = Counter()
        firsts, kinds = _hash_all(sources, options, Path(scratch), near, counts)
        check_replaced(counts["replaced"], counts["characters"], max_replaced, f"{len(sources)} inputs")
        removed = {kind: _later(_matches(Path(scratch), kind)) for kind in kinds}
        exact = removed["exact"]
        near_only = np.setdiff1d(removed.get("near", np.empty(0, np.int64)), exact)
        drop = np.union1d(exact, near_only)
        rows = []
        for source, first, stop in zip(sources, firsts, firsts[1:]):
            found = [int(((part >= first) & (part < stop)).sum()) for part in (exact, near_only)]
            rows.append(
                {"source": source.path, "documents": stop - first, "exact": found[0], "near": found[1]}
            )
        if not firsts[-1]:
            raise Failed("no text in the input", where=sources[0].path, fix="name inputs that hold text")
        if not dry_run:
            with written_aside(out or "") as staging:
                _write_kept(sources, options, drop, staging)
                (staging / REPORT).write_text(json.dumps(rows, indent=1) + "\n")
    return {
        "documents": firsts[-1],
        "exact": len(exact),
        "near": len(near_only),
        "kept": firsts[-1] - len(drop),
        "short": counts["short"],
        "dry_run": dry_run,
        "counts": {key: counts[key] for key in COUNTS},
        "sources": rows,
    }


def _documents(
    sources: list[Source], options: ReadOptions, counts: Counter[str]
) -> Iterator[tuple[int, list[str]]]:
    with progress("hash", sum(source.bytes for source in sources) or None, "B") as bar:
        for number, source in enumerate(sources):
            for batch in read_unchanged(Reader(options, counts, bar.advance), source):
                counts["characters"] += sum(map(len, batch.texts))
                yield number, batch.texts


def _hash_all(
    sources: list[Source], options: ReadOptions, scratch: Path, near: bool, counts: Counter[str]
) -> tuple[list[int], list[str]]:
    """Write the records of every document; returns the first of each source (and the count), the kinds."""
    kinds = ["exact", "near"] if near else ["exact"]
    per_source = [0] * len(sources)
    writers = {kind: _Buckets(scratch, kind) for kind in kinds}
    try:
        document = 0
        for number, texts in _documents(sources, options, counts):
            words = [text.split() for text in texts]
            digests = b"".join(hashlib.blake2b(" ".join(w).encode(), digest_size=16).digest() for w in words)
            records = np.empty(len(texts), RECORD)
            records["high"], records["low"] = np.frombuffer(digests, "<u8").reshape(-1, 2).T
            records["document"] = np.arange(document, document + len(texts))
            writers["exact"].write(records)
            if near:
                units = [near_words(text) for text in texts]
                rows = [_bands(each, document + place) for place, each in enumerate(units) if each]
                counts["short"] += sum(len(each) < GRAM for each in units)
                writers["near"].write(np.concatenate(rows) if rows else np.empty(0, RECORD))
            document += len(texts)
            per_source[number] += len(texts)
    finally:
        for writer in writers.values():
            writer.close()
    return [0, *np.cumsum(per_source).tolist()], kinds


# Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Tai scripts, Javanese, Chinese characters,
# kana and Yi. Korean, Hindi and Arabic have spaces.
_UNSPACED = (
    "\u0e00-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9df\uaa60-\uaadf\u2e80-\u2fdf\u3005-\u3007"
    "\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\uf900-\ufaff\uff66-\uff9f"
    "\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
LONG_WORD = 20  # characters a word on average, above which spaces do not part words


class _WithoutPunctuation(dict[int, str]):
    """A table for `str.translate`: punctuation and symbols part words, characters of format are none."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        text = " " if category[0] in "PS" else "" if category == "Cf" else chr(code)
        self[code] = text
        return text


_simplify = _WithoutPunctuation()


def near_words(text: str) -> list[str]:
    """The words of which near duplicates share runs."""
    words = _WORDS.findall(text.lower().translate(_simplify))
    characters = sum(map(len, words))
    return list("".join(words)) if characters > LONG_WORD * len(words) else words


def _bands(words: list[str], document: int) -> np.ndarray:
    """The 14 band keys of one document as records."""
    words = words + [""] * (GRAM - len(words))
    hashes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    grams = sum(hashes[i : len(hashes) - GRAM + 1 + i] * _MIX[i] for i in range(GRAM))
    grams = np.unique(grams ^ (grams >> np.uint64(29)))
    least = np.full(BANDS * ROWS, 1 << 40, np.uint64)
    for start in range(0, len(grams), GRAMS_AT_ONCE):
        part = grams[None, start : start + GRAMS_AT_ONCE]
        np.minimum(least, np.min((part * _MULTIPLIERS) >> np.uint64(24), axis=1), out=least)
    keys = (least.reshape(BANDS, ROWS) * _MIX[:ROWS]).sum(axis=1, dtype=np.uint64)
    records = np.empty(BANDS, RECORD)
    bands = np.arange(BANDS, dtype=np.uint64)
    # the lowest byte chooses the bucket
    records["high"] = keys ^ (keys >> np.uint64(31)) ^ bands << np.uint64(8)
    records["low"] = keys * np.uint64(BANDS) + bands
    records["document"] = document
    return records


class _Buckets:
    """256 files of records, by the lowest byte of the hash."""

    def __init__(self, scratch: Path, kind: str):
        folder = scratch / kind
        folder.mkdir()
        self._files: list[BinaryIO] = [(folder / f"{i:03d}").open("wb", 1 << 16) for i in range(BUCKETS)]

    def write(self, records: np.ndarray) -> None:
        owners = (records["high"] % BUCKETS).astype(np.int64)
        records = records[np.argsort(owners, kind="stable")]
        ends = np.cumsum(np.bincount(owners, minlength=BUCKETS))
        for bucket in np.unique(owners):
            start = ends[bucket - 1] if bucket else 0
            self._files[bucket].write(records[start : ends[bucket]].tobytes())

    def close(self) -> None:
        for file in self._files:
            file.close()


def _matches(scratch: Path, kind: str) -> np.ndarray:
    """(later document, first document with the same hash) pairs, int64 (pairs, 2)."""
    found = []
    for bucket in range(BUCKETS):
        records = np.fromfile(scratch / kind / f"{bucket:03d}", RECORD)
        records = records[np.lexsort((records["document"], records["low"], records["high"]))]
        same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
        begins = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(records))))
        later = np.flatnonzero(same) + 1
        found.append(np.stack([records["document"][later], records["document"][begins[later]]], axis=1))
    shutil.rmtree(scratch / kind)
    return np.concatenate(found)


def _later(pairs: np.ndarray) -> np.ndarray:
    """Documents that are not the first of their group; groups join through shared members."""
    from networkx.utils import UnionFind

    groups = UnionFind()
    for pair in pairs.tolist():
        groups.union(*pair)
    return np.array(sorted(later for group in groups.to_sets() for later in sorted(group)[1:]), np.int64)


def _write_kept(sources: list[Source], options: ReadOptions, drop: np.ndarray, folder: Path) -> None:
    """The records that stay, one .jsonl.zst per source."""
    import zstandard

    document = 0
    with progress("write", sum(source.bytes for source in sources) or None, "B") as bar:
        for number, source in enumerate(sources):
            check_unchanged(source)
            name = f"{number:05d}-{Path(source.path).name.split('.')[0]}.jsonl.zst"
            with zstandard.open(folder / name, "wb", cctx=zstandard.ZstdCompressor(3)) as file:
                for records in Reader(options, Counter(), bar.advance).read_records(source):
                    here = slice(*np.searchsorted(drop, [document, document + len(records)]))
                    kept = np.ones(len(records), bool)
                    kept[drop[here] - document] = False
                    file.write(b"".join(_line(record) for record, keep in zip(records, kept) if keep))
                    document += len(records)
            check_unchanged(source)


def _line(record: dict[str, Any]) -> bytes:
    """A record as a line of JSON; dates as text, bytes in base64."""
    try:
        return (json.dumps(record, ensure_ascii=False, default=_plain) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair in another field than the text
        return (json.dumps(record, default=_plain) + "\n").encode()


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | time) else str(value)
