"""Contamination: which evaluated records share a long run of tokens with the training data.

Runs of `LENGTH` tokens (13, as GPT-3 and MT-NLG filtered words) of every record are hashed; the store is read
once in pieces with a rolling hash over all its windows; a hash found in both is compared token by token, so
there are no false alarms. Records shorter than a run cannot be checked and are counted apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.console import progress
from ..core.errors import WrongUse
from .asked import TaskScores
from .metrics import aggregate

if TYPE_CHECKING:
    from ..data.store import TokenStore

LENGTH = 13
PIECE = 1 << 20  # tokens of the store at a time
_BASE = 0x9E3779B97F4A7C15  # odd, so that the powers of it stay invertible modulo 2^64


def window_hashes(ids: np.ndarray) -> np.ndarray:
    """Polynomial hash modulo 2^64 of every window of LENGTH ids: (n,) -> (n - LENGTH + 1,) uint64."""
    count = len(ids) - LENGTH + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    spread = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    spread ^= spread >> np.uint64(32)
    total = np.zeros(count, np.uint64)
    for offset in range(LENGTH):
        total = total * np.uint64(_BASE) + spread[offset : offset + count]
    return total


def shared_runs(texts: Sequence[np.ndarray], store: Any) -> list[bool]:
    """For each record's ids, whether any run of LENGTH of them stands in the token store."""
    runs: dict[int, list[tuple[int, int]]] = {}  # hash -> (record, place) of its runs
    for record, ids in enumerate(texts):
        for value, place in zip(*np.unique(window_hashes(ids), return_index=True)):
            runs.setdefault(int(value), []).append((record, int(place)))
    known = np.array(sorted(runs), np.uint64)
    hit = [False] * len(texts)
    with progress("contamination", total=store.tokens, unit="tokens") as bar:
        for start in range(0, store.tokens, PIECE):
            ids = np.asarray(store.read(start, min(start + PIECE + LENGTH - 1, store.tokens)))
            values, places = np.unique(window_hashes(ids), return_index=True)
            both = np.isin(values, known)
            for value, window in zip(values[both], places[both]):
                for record, at in runs[int(value)]:
                    same = ids[window : window + LENGTH] == texts[record][at : at + LENGTH]
                    hit[record] = hit[record] or bool(same.all())
            bar.advance(min(PIECE, store.tokens - start))
    return hit


def open_searched(path: Path | str, tokenizer: Any) -> "TokenStore":
    """The store to search. Raises WrongUse when it was made with another tokenizer."""
    from ..data.store import TokenStore

    store = TokenStore.open(path)
    mark = store.facts.get("tokenizer")
    if mark and mark != tokenizer.fingerprint():
        why, fix = "the same text has other ids in it", "give a store made with the model's tokenizer"
        raise WrongUse("the token store was made with another tokenizer", where=path, why=why, fix=fix)
    return store


def contaminated(store: "TokenStore", tokenizer: Any, scores: Sequence[TaskScores]) -> dict[str, Any]:
    """Per task: records checked, hits, records too short, and each metric with and without the hits. A record is
    searched as it would stand in a text: the document, or the question with its right answer.
    """
    texts = [
        [np.asarray(tokenizer.encode(item.text or item.solved)) for item in score.items] for score in scores
    ]
    found = iter(shared_runs([ids for own in texts for ids in own], store))
    report: dict[str, Any] = {}
    for score, own in zip(scores, texts):
        hits = [next(found) for _ in own]
        clean = [sample["metrics"] for sample, hit in zip(score.samples, hits) if not hit]
        metrics = score.summary["metrics"]
        report[score.summary["task"]] = {
            "n": LENGTH,
            "checked": len(own),
            "hits": sum(hits),
            "too_short": sum(len(ids) < LENGTH for ids in own),
            "all": {name: metric["value"] for name, metric in metrics.items()},
            "clean": {name: aggregate(name, [one[name] for one in clean])[0] for name in metrics if clean},
        }
    return report
