"""Perplexity: how a document or a stream becomes windows, and what each protocol divides by.

Every token of a text is predicted exactly once. `rolling` is lm-evaluation-harness's protocol (documents apart, disjoint
windows, the first token predicted from the prefix token); `stream` is Megatron-LM's (one stream, no prefix, overlapping
windows of which only the last `stride` targets count). Under a masked scorer the same sums are pseudo-log-likelihoods.
"""

import math
import re
from collections.abc import Sequence

from ..core.scorer import Ids, Question, Score
from .task import Item


def rolling(ids: Ids, window: int, prefix: int) -> list[Question]:
    """Disjoint windows over one document; the last is filled up to the left, so that its first target has context."""
    questions = []
    whole = (prefix, *ids)  # whole[i] is the token before target i
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))
        first = max(0, stop - window) if start else 0
        questions.append(Question(((whole[first : start + 1], ids[start:stop]),)))
    return questions


def stream(ids: Ids, window: int, stride: int) -> list[Question]:
    """Windows over one stream; targets are all tokens but the first. `stride` new targets a window, 0 = all of them.

    As Megatron-LM's zero-shot WikiText task reads it: the first window counts whole, later ones their last `stride` targets.
    """
    step = min(stride, window) or window
    questions = []
    done = 1
    while done < len(ids):
        stop = min(len(ids), done + (window if done == 1 else step))
        first = max(0, stop - window - 1)
        questions.append(Question(((ids[first:done], ids[done:stop]),)))
        done = stop
    return questions


def document_outcome(item: Item, scores: Sequence[Score]) -> dict[str, list[float]]:
    """Word, byte and token units of one document. Words are `re.split` on white space of the original text, which counts an
    empty one at each end that is white space; bytes are UTF-8 of the original."""
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
