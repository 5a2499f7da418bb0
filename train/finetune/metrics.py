"""Scores of predictions as the official scripts compute them. Plain Python: predictions in, numbers out."""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")


def classification(predicted: Sequence[int], right: Sequence[int], labels: int) -> dict[str, float]:
    """Accuracy, F1 (of class 1 for two classes, else the mean over classes) and Matthews' correlation (Gorodkin
    2004 for more than two classes), as GLUE reports them.
    """
    pairs = Counter(zip(predicted, right))
    said, were = Counter(predicted), Counter(right)
    hits = [pairs[label, label] for label in range(labels)]
    f1 = [
        2 * hit / (said[label] + were[label]) if said[label] + were[label] else 0.0
        for label, hit in enumerate(hits)
    ]
    present = [label for label in range(labels) if said[label] or were[label]]
    count = len(right)
    covariance = sum(hits) * count - sum(said[label] * were[label] for label in range(labels))
    spread = (count**2 - sum(n * n for n in said.values())) * (count**2 - sum(n * n for n in were.values()))
    return {
        "accuracy": sum(hits) / count,
        "f1": f1[1] if labels == 2 else sum(f1[label] for label in present) / len(present),
        "matthews": covariance / spread**0.5 if spread > 0 else 0.0,
    }


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, after last) of the entities of one sentence in BIO tags, as conlleval reads them: an I- of
    another type, or after an O, begins a new one.
    """
    found, kind, start = set(), "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        name = name or ("" if prefix == "O" else "_")
        if kind and (prefix != "I" or name != kind):
            found.add((kind, start, place))
            kind = ""
        if prefix != "O" and not kind:
            kind, start = name, place
    return found


def tagging(predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of whole entities over all sentences, and the accuracy of single tags."""
    ours = {(row, *entity) for row, tags in enumerate(predicted) for entity in entities(tags)}
    theirs = {(row, *entity) for row, tags in enumerate(right) for entity in entities(tags)}
    both = len(ours & theirs)
    precision, recall = both / len(ours) if ours else 0.0, both / len(theirs) if theirs else 0.0
    tags = [(a, b) for first, second in zip(predicted, right) for a, b in zip(first, second, strict=True)]
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if both else 0.0,
        "accuracy": sum(a == b for a, b in tags) / len(tags) if tags else 0.0,
    }


def normalise_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(ch for ch in text.lower() if ch not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", text).split())


def answer_f1(predicted: str, right: str) -> float:
    """F1 of the words of two answers in normal form."""
    said, were = normalise_answer(predicted).split(), normalise_answer(right).split()
    shared = sum((Counter(said) & Counter(were)).values())
    return 2 * shared / (len(said) + len(were)) if shared else 0.0


def squad(predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, each question with the best of its answers (Rajpurkar et al. 2016)."""
    exact = [
        max(normalise_answer(text) == normalise_answer(answer) for answer in given)
        for text, given in zip(predicted, answers, strict=True)
    ]
    f1 = [max(answer_f1(text, answer) for answer in given) for text, given in zip(predicted, answers)]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}
