"""Answers of a model beside the accepted ones, as SQuAD's own script compares them."""

import re
import string
from collections import Counter

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """The words of an answer: lower case, no punctuation, no articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split()


def answer_f1(predicted: str, right: str) -> float:
    """F1 of the words of an answer (SQuAD, Rajpurkar et al. 2016); of two answers without words 1."""
    said, were = Counter(answer_words(predicted)), Counter(answer_words(right))
    if not said or not were:
        return float(said == were)
    return 2 * (said & were).total() / (said.total() + were.total())
