"""What is in a token store: counts, lengths, bytes per token, sample documents, the most repeated ones."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import WrongUse
from ..core.page import Bar, Part, page
from .store import TokenStore
from .tokenizer import Tokenizer, tokenizer_beside

MOST_HASHED = 1_000_000  # documents looked at for repetitions; of a larger store every n-th
SHOWN_TOKENS = 60


def inspect_store(
    path: Path | str, samples: int = 3, top: int = 3, tokenizer_path: Path | str | None = None
) -> dict[str, Any]:
    """Facts of a store; reads every index and `MOST_HASHED` documents at most. Raises WrongUse and Refused as
    TokenStore.open does, and WrongUse for a foreign store without `tokenizer_path`.
    """
    store = TokenStore.open(path)
    file = tokenizer_beside(path)
    if tokenizer_path is None and not file.is_file():
        raise WrongUse("the store has no tokenizer of its own", where=path, fix="name one with --tokenizer")
    tokenizer = Tokenizer.load(tokenizer_path or file)
    facts = store.facts
    histogram = np.zeros(64, np.int64)
    for shard in store.shards:
        lengths = np.diff(shard.sequence_start(shard.bounds))
        histogram += np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64), minlength=64)
    spaced = np.unique(np.linspace(0, store.documents - 1, min(samples, store.documents)).astype(np.int64))
    return {
        "tokens": store.tokens,
        "documents": store.documents,
        "sequences": store.sequences,
        "shards": len(store.shards),
        "dtype": str(store.dtype),
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": facts["text_bytes"] / store.tokens if "text_bytes" in facts else None,
        "tokens_per_document": store.tokens / store.documents,
        "lengths": {f"{2**power:,}": int(count) for power, count in enumerate(histogram) if count},
        "counts": facts.get("made", {}).get("counts", {}),
        "samples": [{"document": int(d), "text": _text(store, tokenizer, int(d))} for d in spaced],
        "repeated": [{"times": n, "text": _text(store, tokenizer, d)} for n, d in _repeated(store, top)],
    }


def inspect_page(path: Path | str, found: dict[str, Any]) -> str:
    """What `inspect_store` has found as an HTML page."""
    facts = [(key, f"{found[key]:,}") for key in ("tokens", "documents", "sequences", "shards", "vocab_size")]
    facts += [(key, f"{found[key]:.4g}") for key in ("bytes_per_token", "tokens_per_document") if found[key]]
    held = found["lengths"].items()
    most = max((count for _, count in held), default=1)
    lengths = [Bar(f"up to {length} tokens", count / most, text=f"{count:,}") for length, count in held]
    counted = [(key, f"{count:,}") for key, count in found["counts"].items() if count]
    samples = [(s["document"], s["text"]) for s in found["samples"]]
    repeated = [(r["times"], r["text"]) for r in found["repeated"]]
    parts = [
        Part(rows=[(key.replace("_", " "), value) for key, value in facts]),
        Part("Lengths of documents", bars=lengths),
        Part("Found in the text", rows=counted),
        Part("Documents", header=("document", "beginning"), rows=samples),
        Part("Most repeated documents", header=("times", "beginning"), rows=repeated),
    ]
    return page(f"Token store {path}", parts)


def _text(store: TokenStore, tokenizer: Tokenizer, document: int) -> str:
    start, stop = (int(place) for place in store.document_start(np.array([document, document + 1])))
    text = tokenizer.decode(store.read(start, min(stop, start + SHOWN_TOKENS)))
    return text + (f" … ({stop - start:,} tokens)" if stop - start > SHOWN_TOKENS else "")


def _repeated(store: TokenStore, top: int) -> list[tuple[int, int]]:
    """(times, document) of the documents that occur most often, those that occur twice or more."""
    step = -(-store.documents // MOST_HASHED)
    digests, numbers, first = [], [], 0
    for shard in store.shards:
        bounds, data = shard.sequence_start(shard.bounds), shard.data
        for document in range(-first % step, shard.documents, step):
            raw = data[bounds[document] : bounds[document + 1]].tobytes()
            digests.append(hashlib.blake2b(raw, digest_size=8).digest())
            numbers.append(first + document)
        first += shard.documents
    hashes = np.frombuffer(b"".join(digests), "<u8")
    _, places, times = np.unique(hashes, return_index=True, return_counts=True)
    order = np.lexsort((places, -times))[:top]
    return [(int(times[i]), numbers[places[i]]) for i in order if times[i] > 1]
