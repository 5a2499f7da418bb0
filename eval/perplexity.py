"""Perplexity: how a document or a stream becomes windows, and what each protocol divides by.

Every token of a text is predicted exactly once. `rolling` is lm-evaluation-harness's protocol (documents
apart, disjoint windows, the first token predicted from the prefix token); `stream` is Megatron-LM's (one
stream, no prefix, overlapping windows of which only the last `stride` targets count). Under a masked scorer
the same sums are pseudo-log-likelihoods; `hidden` asks it for many tokens of a window at once, as it was
trained (Devlin et al. 2019).
"""

import hashlib
import math
import re
from collections.abc import Sequence

import numpy as np

from ..core.scorer import Ids, Question, Score
from .items import Item


def rolling(ids: Ids, window: int, prefix: int) -> list[Question]:
    """Disjoint windows over one document, a BOS of which is predicted like the rest (as the harness does);
    the last is filled up to the left, so that its first target has context.
    """
    questions = []
    whole = (prefix, *ids)  # whole[i] is the token before target i
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))
        first = max(0, stop - window) if start else 0
        questions.append(Question(((whole[first : start + 1], ids[start:stop]),)))
    return questions


def stream(ids: Ids, window: int, stride: int) -> list[Question]:
    """Windows over one stream; targets are all tokens but the first. `stride` new targets a window, 0 = all
    of them.

    As Megatron-LM's zero-shot WikiText task reads it: the first window counts whole, later ones their last
    `stride` targets.
    """
    step = min(stride, window) or window
    questions = []
    done = 1
    while done < len(ids):
        stop = done + (
            window if done == 1 else step
        )  # the last window keeps its place where the stream ends inside it
        questions.append(Question(((ids[max(0, stop - window - 1) : done], ids[done:stop]),)))
        done = stop
    return questions


def hidden(ids: Ids, window: int, mask: int, share: float) -> list[Question]:
    """Disjoint windows with `share` of their tokens, one at least, masked at once; which ones is drawn from
    the window's ids.
    """
    questions = []
    for start in range(0, len(ids), window):
        row = np.array(ids[start : start + window], np.int64)
        seed = int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little")
        count = max(1, round(share * len(row)))
        places = np.sort(np.random.Generator(np.random.Philox(key=seed)).permutation(len(row))[:count])
        targets = tuple(row[places].tolist())
        row[places] = mask
        questions.append(Question(((tuple(row.tolist()), targets),)))
    return questions


def hidden_outcome(scores: Sequence[Score]) -> dict[str, list[float]]:
    """Of one document: hidden tokens that the model names, the log-probability of all of them, their number."""
    tokens = float(sum(score.tokens for score in scores))
    return {
        "mlm_accuracy": [float(sum(score.right for score in scores)), tokens],
        "mlm_perplexity": [math.fsum(score.logprob for score in scores), tokens],
    }


def document_outcome(item: Item, scores: Sequence[Score]) -> dict[str, list[float]]:
    """Word, byte and token units of one document. Words are `re.split` on white space of the original text,
    which counts an empty one at each end that is white space; bytes are UTF-8 of the original.
    """
    total = math.fsum(score.logprob for score in scores)
    words = float(len(re.split(r"\s+", item.original)))
    size = float(len(item.original.encode()))
    tokens = float(sum(score.tokens for score in scores))
    return {
        "word_perplexity": [total, words],
        "byte_perplexity": [total, size],
        "bits_per_byte": [total, size],
        "token_perplexity": [total, tokens],
    }


def stream_outcome(item: Item, scores: Sequence[Score]) -> dict[str, list[float]]:
    """Megatron-LM's units: tokens less one, and words of the original parted by single blanks, less one."""
    total = math.fsum(score.logprob for score in scores)
    words = float(len(item.original.strip().split(" ")) - 1)
    return {
        "adjusted_perplexity": [total, words],
        "token_perplexity": [total, float(sum(score.tokens for score in scores))],
        "bits_per_byte": [total, float(len(item.original.encode()))],
    }
