"""Token stores: Megatron-LM's `.bin` + `.idx` shards (data/shard.py), any number in name order, as one long stream."""

from collections.abc import Callable, Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ..core.artifact import read_manifest, verify_artifact
from ..core.errors import Refused, WrongUse, beside
from .shard import Shard

DOCUMENTS_IN_MEMORY = 1 << 22  # up to here (32 MB) starts are kept; beyond, the mapped index is bisected
PARTIAL = ".partial"  # what a store is called, after its name, until it is whole
REHASH_BYTES = 1 << 30  # larger stores are not hashed when opened (1.7 GB/s): their sizes are checked


def partial(out: Path) -> Path:
    """Where the store `out` is made."""
    return out.with_name(f"{out.name}{PARTIAL}")


def _last_at_most(key: Callable[[np.ndarray], np.ndarray], count: int, values: np.ndarray) -> np.ndarray:
    """The last i in range(count) with key(i) <= value, for each: a bisection of log2(count) reads."""
    low, high = np.zeros(len(values), np.int64), np.full(len(values), count, np.int64)
    while (high - low > 1).any():
        middle = (low + high) // 2
        below = key(middle) <= values
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


class Cut(NamedTuple):
    """A place in the stream. A sequence or document that it parts (`inside_…`) belongs to both sides."""

    token: int
    sequence: int
    document: int
    inside_sequence: bool = False
    inside_document: bool = False

    def minus(self, base: "Cut") -> Self:
        """The same place, counted from `base`."""
        token, sequence, document = np.subtract(self[:3], base[:3]).tolist()
        return self._replace(token=token, sequence=sequence, document=document)


class TokenStore:
    """Shards as one stream of `tokens` ids in `sequences` inside `documents`; positions are tokens."""

    def __init__(self, shards: list[Shard], facts: dict, identity: str, cuts: tuple[Cut, Cut] | None = None):
        self.shards, self.identity, self._all_facts = shards, identity, facts
        counts = np.array([(s.tokens, s.sequences, s.documents) for s in shards], np.int64).reshape(-1, 3)
        self._firsts = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(counts, axis=0)])
        self._cuts = cuts or (Cut(0, 0, 0), Cut(*self._firsts[-1].tolist()))
        start, stop = self._cuts
        self.dtype = shards[0].dtype
        self.tokens = stop.token - start.token
        self.sequences = stop.sequence + stop.inside_sequence - start.sequence
        self.documents = stop.document + stop.inside_document - start.document

    @property
    def place(self) -> Path:
        """The file of its first shard, by which a message names the store."""
        return self.shards[0].bin

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a store artifact, or adopt a Megatron prefix or directory (facts["foreign"] is then True). Raises
        WrongUse when there is no store, Refused when one is unfinished, cut or (up to REHASH_BYTES) changed.
        """
        path = Path(path)
        manifest = path / "manifest.json"
        if manifest.is_file():
            held = sum(file.stat().st_size for file in path.glob("*.bin"))
            read = read_manifest(path, "tokens")
            verify_artifact(path, sizes_only=held > REHASH_BYTES)
            facts, identity = dict(read.facts), str(read.hash)
            names = [file.name for file in read.files]  # and nothing else that may lie there
        elif unfinished := [p for p in (path, partial(path)) if p.suffix == PARTIAL and p.is_dir()]:
            why = f"its tokenisation has not finished: the work is in {unfinished[0]}"
            fix = "run the same tokenize command again"
            raise Refused("unfinished token store", where=path, why=why, fix=fix)
        else:
            facts, identity = {"foreign": True}, ""
            names = [file.name for file in path.glob("*.idx")]
        if path.is_dir():
            prefixes = [path / name.removesuffix(".idx") for name in names if name.endswith(".idx")]
            # 100000 after 99999
            prefixes.sort(key=lambda prefix: (len(prefix.name) if prefix.name.isdigit() else 0, prefix))
        else:
            named = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
            prefixes = [named] if Path(f"{named}.idx").is_file() else []
        if not prefixes:
            why = "" if path.exists() else "it does not exist"
            why = "there is no .idx file in it" if path.is_dir() else why
            fix = "give the output of `throughline data tokenize`, or a Megatron prefix (PREFIX.bin + PREFIX.idx);"
            fix += "\nplain text is trained on by: throughline train TEXT"
            fix = fix if path.exists() else beside(path, fix)
            raise WrongUse("no token store here", where=str(path), why=why, fix=fix)
        shards = [Shard(prefix) for prefix in prefixes]
        if len({shard.dtype for shard in shards}) > 1:
            dtypes = ", ".join(sorted({str(shard.dtype) for shard in shards}))
            raise Refused("shards of different dtypes in one store", where=str(path), why=dtypes)
        # what names a store without a manifest: sizes and names; its content is not hashed at opening
        sizes = (f"{s.bin.name}={s.tokens}/{s.sequences}/{s.documents}" for s in shards)
        store = cls(shards, facts, identity or "foreign:" + ",".join(sizes))
        if not store.tokens:
            raise Refused("the token store is empty", where=str(path), why="its shards hold no token")
        return store

    def content_identity(self) -> str:
        """Names the content of this view: by the manifest, or for a foreign store by a hash of its indexes."""
        if not self._all_facts.get("foreign"):
            return self.identity
        digest = sha256()
        for shard in self.shards:
            digest.update(shard.idx.read_bytes())
        return f"{self.identity} {digest.hexdigest()}"

    @property
    def facts(self) -> dict:
        """The manifest's facts, with the counts of this view."""
        counts = {"tokens": self.tokens, "documents": self.documents, "sequences": self.sequences}
        return {**self._all_facts, **counts, "dtype": str(self.dtype)}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), a new array of the store's dtype. Raises IndexError outside the store."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}..{stop} of a store of {self.tokens}")
        out = np.empty(stop - start, self.dtype)
        start, stop = start + self._cuts[0].token, stop + self._cuts[0].token
        firsts = self._firsts[:, 0]
        index = int(np.searchsorted(firsts, start, side="right")) - 1
        position = start
        while position < stop:
            until = min(stop, int(firsts[index + 1]))
            offset = int(firsts[index])
            data = self.shards[index].data[position - offset : until - offset]
            out[position - start : until - start] = data
            position, index = until, index + 1
        return out

    def _by_shard(self, column: int, places: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """(which of `places`, their shard), for places counted as in that column of `_firsts`."""
        owners = np.searchsorted(self._firsts[:, column], places, side="right") - 1
        owners = np.minimum(owners, len(self.shards) - 1)  # where the last one ends
        for owner in np.unique(owners):
            yield np.flatnonzero(owners == owner), int(owner)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [start, start + length) for each start: (starts, length) int64, gathered shard by shard."""
        starts = np.asarray(starts, np.int64)
        if len(starts) and not (starts.min() >= 0 and starts.max() + length <= self.tokens):
            raise IndexError(f"windows {starts.min()}..{starts.max() + length} of a store of {self.tokens}")
        out = np.empty((len(starts), length), np.int64)
        places = starts + self._cuts[0].token
        for rows, owner in self._by_shard(0, places):
            shard, here = self.shards[owner], places[rows] - self._firsts[owner, 0]
            whole = here + length <= shard.tokens
            if whole.any():
                data = np.lib.stride_tricks.sliding_window_view(shard.data, length)
                out[rows[whole]] = data[here[whole]]
            for row in rows[~whole]:  # over the end of the shard
                out[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return out

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The token at each position: int64, same length."""
        places = np.asarray(positions, np.int64) + self._cuts[0].token
        if len(self.shards) == 1:
            return self.shards[0].data[places].astype(np.int64)
        out = np.empty(len(places), np.int64)
        for rows, owner in self._by_shard(0, places):
            out[rows] = self.shards[owner].data[places[rows] - self._firsts[owner, 0]]
        return out

    def parts(self) -> Iterator[tuple[int, "TokenStore"]]:
        """(first token, store) for each shard's share of this view: what a pass in bounded memory goes over."""
        start, stop = self._cuts
        places = [Cut(*counts) for counts in self._firsts.tolist()]
        for base, end, shard in zip(places, places[1:], self.shards):
            low = start if start.token > base.token else base
            high = stop if stop.token < end.token else end
            if low.token < high.token:
                cuts = (low.minus(base), high.minus(base))
                identity = f"{self.identity}/{base.token}"
                yield low.token - start.token, TokenStore([shard], self._all_facts, identity, cuts)

    def document_start(self, documents: np.ndarray) -> np.ndarray:
        """Token at which each document begins (the count of documents gives the end), in O(log) reads each."""
        if self.documents <= DOCUMENTS_IN_MEMORY:
            return self.document_starts[documents]
        start, stop = self._cuts
        documents = np.asarray(documents, np.int64) + start.document
        out = np.empty(len(documents), np.int64)
        for rows, owner in self._by_shard(2, documents):
            shard, first = self.shards[owner], self._firsts[owner]
            out[rows] = first[0] + shard.sequence_start(shard.bounds[documents[rows] - first[2]])
        return np.clip(out, start.token, stop.token) - start.token

    def document_at(self, tokens: np.ndarray) -> np.ndarray:
        """The document that holds each token position."""
        if self.documents <= DOCUMENTS_IN_MEMORY:
            return np.searchsorted(self.document_starts, tokens, side="right") - 1
        tokens = np.asarray(tokens, np.int64) + self._cuts[0].token
        out = np.empty(len(tokens), np.int64)
        for rows, owner in self._by_shard(0, tokens):
            shard, first = self.shards[owner], self._firsts[owner]
            start = lambda d, shard=shard: shard.sequence_start(shard.bounds[d])  # noqa: E731
            out[rows] = first[2] + _last_at_most(start, shard.documents, tokens[rows] - first[0])
        return out - self._cuts[0].document

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """Token offset of every sequence and the end, int64: 8 bytes a sequence, for whole passes."""
        start, stop = self._cuts
        every = [first[0] + s.pointers // s.dtype.itemsize for first, s in zip(self._firsts, self.shards)]
        kept = np.concatenate(every)[start.sequence : start.sequence + self.sequences]
        return np.append(np.clip(kept, start.token, stop.token), stop.token) - start.token

    @cached_property
    def document_bounds(self) -> np.ndarray:
        """First sequence of every document and the count of sequences, int64 (documents + 1,)."""
        start = self._cuts[0]
        every = [first[1] + shard.bounds[:-1] for first, shard in zip(self._firsts, self.shards)]
        kept = np.concatenate(every)[start.document : start.document + self.documents] - start.sequence
        return np.append(np.maximum(kept, 0), self.sequences)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Token offset of every document and the end, int64 (documents + 1,)."""
        return self.sequence_starts[self.document_bounds]

    def view(self, start_fraction: float, stop_fraction: float) -> "TokenStore":
        """The part between two fractions of the stream; adjoining ones share no token. A cut falls on the nearest
        boundary of documents; when that is an end of the store, of sequences; when that is an end too, on the token.
        """
        if not 0 <= start_fraction < stop_fraction <= 1:
            why = f"{start_fraction} to {stop_fraction} is not within 0 to 1"
            raise WrongUse("bad part of a token store", why=why)
        cuts = (self._cut(start_fraction), self._cut(stop_fraction))
        if cuts[0].token >= cuts[1].token:
            part = f"{start_fraction} to {stop_fraction}"
            why = f"{part} of {self.tokens:,} tokens in {self.documents:,} documents is empty"
            raise WrongUse("empty part of a token store", why=why, fix="give more text or a larger fraction")
        identity = f"{self.identity}:{cuts[0].token}-{cuts[1].token}"
        return TokenStore(self.shards, self._all_facts, identity, cuts)

    def _cut(self, fraction: float) -> Cut:
        if fraction in (0.0, 1.0):
            return self._cuts[int(fraction)]
        base = self._cuts[0]
        target = round(fraction * self.tokens)
        document = int(self.document_at(np.array([min(target, self.tokens - 1)]))[0])
        start, end = (int(t) for t in self.document_start(np.array([document, document + 1])))
        if target - start > end - target:
            start, document = end, document + 1
        if 0 < start < self.tokens:
            place = base.document + document
            owner = int(np.searchsorted(self._firsts[:, 2], place, side="right")) - 1
            _, sequence, first = self._firsts[owner].tolist()
            return Cut(base.token + start, sequence + int(self.shards[owner].bounds[place - first]), place)
        starts = self.sequence_starts
        sequence = int(np.argmin(np.abs(starts - target)))
        inside = not 0 < starts[sequence] < self.tokens
        if inside:
            sequence = int(np.searchsorted(starts, target, side="right")) - 1
        token = target if inside else int(starts[sequence])
        document = int(np.searchsorted(self.document_bounds, sequence, side="right")) - 1
        return Cut(base.token + token, base.sequence + sequence, base.document + document, inside, True)
