"""Scores of fine-tuned heads are those of scikit-learn, seqeval and SQuAD's official script."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.train.finetune import records as scores
from throughline.train.finetune.records import read_records
from throughline.train.finetune.tasks import best_span

DRAW = np.random.default_rng(3)


def test_classification_scores_are_scikit_learns() -> None:
    """The mean F1 is over the classes that occur on either side, not over all of a head."""
    sklearn = pytest.importorskip("sklearn.metrics")
    for labels, average in ((2, "binary"), (5, "macro")):
        right, said = (DRAW.integers(0, labels, 200).tolist() for _ in range(2))
        ours = scores.classification(said, right, labels)
        assert ours["accuracy"] == pytest.approx(sklearn.accuracy_score(right, said))
        assert ours["f1"] == pytest.approx(sklearn.f1_score(right, said, average=average))
        assert ours["matthews"] == pytest.approx(sklearn.matthews_corrcoef(right, said))


@pytest.mark.filterwarnings("ignore")
def test_the_mean_f1_is_over_the_classes_that_occur() -> None:
    """A head of six classes of which some are neither said nor right, and one is right that it does not have."""
    sklearn = pytest.importorskip("sklearn.metrics")
    for right, said in (([0, 0, 1, 4], [0, 1, 1, 0]), ([0, 0, 0], [0, 0, 0]), ([6, 1, 1], [1, 1, 0])):
        ours = scores.classification(said, right, 6)["f1"]
        assert ours == pytest.approx(sklearn.f1_score(right, said, average="macro"))
    assert scores.classification([0, 1, 1], [0, 1, 2], 2)["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


@pytest.mark.filterwarnings("ignore")
def test_scores_of_several_classes_are_scikit_learns() -> None:
    """Of random decisions, of some without a class on either side, and of none at all."""
    sklearn = pytest.importorskip("sklearn.metrics")
    right, said = (DRAW.random((50, 4)) < np.array([0.5, 0.2, 0.0, 0.9]) for _ in range(2))
    for wanted, chosen in ((right, said), (right[:1] & False, said[:1] & False), (right, right)):
        ours = scores.several_classes(chosen, wanted)
        for average in ("micro", "macro"):
            theirs = sklearn.f1_score(wanted, chosen, average=average, zero_division=0)
            assert ours[f"{average}_f1"] == pytest.approx(theirs), average
        assert ours["accuracy"] == pytest.approx(sklearn.accuracy_score(wanted, chosen))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=30))
def test_correlations_are_scipys(values: list[tuple[int, int]]) -> None:
    """With many equal values, whose ranks are shared; 0 where one side is constant, which has no correlation."""
    stats = pytest.importorskip("scipy.stats")
    ours, theirs = (list(side) for side in zip(*values))
    found = scores.regression(ours, theirs)
    assert found["mean_squared_error"] == pytest.approx(np.mean(np.subtract(ours, theirs) ** 2))
    if len(set(ours)) == 1 or len(set(theirs)) == 1:
        assert found["pearson"] == found["spearman"] == 0
        return
    assert found["pearson"] == pytest.approx(stats.pearsonr(ours, theirs)[0], abs=1e-12)
    assert found["spearman"] == pytest.approx(stats.spearmanr(ours, theirs)[0], abs=1e-12)


def tag_sequences(letters: str, form: str = "{letter}-{kind}") -> st.SearchStrategy[Any]:
    """Pairs of sequences of tags of the same length, sentence by sentence."""
    kinds = ("PER", "GEO-POL")
    tags = ["O", *(form.format(letter=letter, kind=kind) for letter in letters for kind in kinds)]
    pair = st.tuples(st.sampled_from(tags), st.sampled_from(tags))
    return st.lists(st.lists(pair, min_size=1, max_size=12), min_size=1, max_size=4)


def check_against_seqeval(
    sentences: list[list[tuple[str, str]]], ours_as: Any, is_suffix: bool = False, **theirs: Any
) -> None:
    """Precision, recall, F1 and accuracy of said and right tags; `theirs`: how seqeval is asked."""
    metrics = pytest.importorskip("seqeval.metrics")
    said, right = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    ours = scores.tagging(said, right, ours_as, is_suffix)
    for name, function in (("precision", "precision_score"), ("recall", "recall_score"), ("f1", "f1_score")):
        assert ours[name] == pytest.approx(getattr(metrics, function)(right, said, **theirs)), name
    assert ours["accuracy"] == pytest.approx(metrics.accuracy_score(right, said))


USUAL = settings(max_examples=50, deadline=None, derandomize=True)


@USUAL
@given(sentences=tag_sequences("BIES"))
@pytest.mark.filterwarnings("ignore")
def test_entity_scores_are_seqevals(sentences: list[list[tuple[str, str]]]) -> None:
    """Of its default mode, over any order of tags: IOB1, IOB2, IOE and IOBES are among them."""
    check_against_seqeval(sentences, "IOBES")


@USUAL
@given(sentences=tag_sequences("BILU"))
@pytest.mark.filterwarnings("ignore")
def test_entity_scores_of_bilou_are_seqevals(sentences: list[list[tuple[str, str]]]) -> None:
    """Of its strict mode: its default one knows no L and U."""
    scheme = pytest.importorskip("seqeval.scheme").BILOU
    check_against_seqeval(sentences, "BILOU", mode="strict", scheme=scheme)


@USUAL
@given(sentences=tag_sequences("BIES", "{kind}-{letter}"))
@pytest.mark.filterwarnings("ignore")
def test_entity_scores_of_suffixes_are_seqevals(sentences: list[list[tuple[str, str]]]) -> None:
    check_against_seqeval(sentences, "IOBES", is_suffix=True, suffix=True)


@USUAL
@given(sentences=tag_sequences("P", "{letter}{kind}"))
@pytest.mark.filterwarnings("ignore")
def test_entity_scores_of_plain_types_are_seqevals(sentences: list[list[tuple[str, str]]]) -> None:
    """Types that seqeval does not take for a letter and a type; each run of one is an entity."""
    metrics = pytest.importorskip("seqeval.metrics")
    check_against_seqeval(sentences, "plain")
    prefixed = [[[tag if tag == "O" else f"I-{tag}" for tag in pair] for pair in one] for one in sentences]
    said, right = ([[pair[side] for pair in sentence] for sentence in prefixed] for side in (0, 1))
    plain = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    assert scores.tagging(*plain, "plain")["f1"] == pytest.approx(metrics.f1_score(right, said))


@pytest.mark.parametrize(
    ("right", "said", "f1"),
    [
        (["PER", "O", "LOC"], ["LOC", "O", "PER"], 0.0),
        (["PER", "PER", "O"], ["PER", "O", "O"], 0.0),
        (["ORG", "ORG", "O", "EVENT"], ["ORG", "ORG", "O", "EVENT"], 1.0),
        (["PER", "LOC"], ["PER", "PER"], 0.0),
        (["DATE", "O"], ["RATE", "O"], 0.0),
    ],
)
def test_plain_types_are_told_apart(right: list[str], said: list[str], f1: float) -> None:
    """Whatever letter they begin with, of which seqeval reads O, B, I, E and S as that of a scheme."""
    assert scores.tagging([said], [right], "plain")["f1"] == f1


def test_answers_are_scored_as_the_official_script_does() -> None:
    """Cases worked by hand from its rules: case, punctuation, articles and spaces do not count; F1 is of words
    with their counts; the best answer counts.
    """
    assert scores.squad(["The  Panthers!"], [["panthers"]]) == {"exact_match": 100.0, "f1": 100.0}
    # SQuAD 2: no text is the right answer to a question without one, and the only one; "the" is no answer
    none = scores.squad(["", "Rome", "", ""], [[], [], ["Rome"], ["the"]])
    assert none == {
        "exact_match": 50.0,
        "f1": 50.0,
        "answered_exact_match": 0.0,
        "answered_f1": 0.0,
        "unanswerable_exact_match": pytest.approx(200 / 3),
        "unanswerable_f1": pytest.approx(200 / 3),
    }
    found = scores.squad(["in New York City", ""], [["New York", "York"], ["Rome"]])
    assert found["exact_match"] == 0.0
    assert found["f1"] == pytest.approx(100 * (2 * 2 / (4 + 2)) / 2)


def test_answers_are_scored_as_the_harness_scores_them(shared: Path) -> None:
    """XQuAD's answers against predictions that are right, cut short, too long, of another case, or wrong: the
    official script's rules as T5's authors wrote them, which lm_eval ships.
    """
    theirs = pytest.importorskip("lm_eval.tasks.super_glue.record.t5_utils", reason="needs lm_eval")
    records = read_records(str(shared / "data" / "squad" / "xquad.en.json"), squad=True)
    draw, predicted = np.random.default_rng(0), []
    for record in records:
        start, text = record["answers"][0]
        before, after = draw.integers(0, 25, 2)
        wrong = str(draw.choice(record["context"].split()))
        cut = record["context"][max(start - before, 0) : start + after]
        predicted.append(str(draw.choice([text, f"The {text.upper()}!", cut, wrong])))
    answers = [[text for _, text in record["answers"]] for record in records]
    second = [predicted[place - 1] if place % 3 else given[0] for place, given in enumerate(answers)]
    answers = [[given[0], other] for given, other in zip(answers, second)]  # there each answer is a record
    items = [
        (text, f"{number}_{answer.replace('_', ' ')}")
        for number, (text, given) in enumerate(zip(predicted, answers))
        for answer in given
    ]
    ours = scores.squad(predicted, answers)
    assert ours["exact_match"] == pytest.approx(100 * theirs.squad_em_agg(items))
    assert ours["f1"] == pytest.approx(100 * theirs.squad_f1_agg(items))
    assert 20 < ours["exact_match"] < ours["f1"] < 90, "predictions of every kind"


def test_the_best_span_ends_after_it_starts_and_is_not_too_long() -> None:
    start, end = DRAW.normal(size=12), DRAW.normal(size=12)
    every = [(start[a] + end[b], a, b) for a in range(12) for b in range(a, min(a + 4, 12))]
    assert best_span(start, end, 4) == pytest.approx(max(every))


def test_half_a_surrogate_pair_is_the_replacement_character(tmp_path: Path) -> None:
    """Labelled texts that were cut within an emoji can be hashed and encoded."""
    file = tmp_path / "records.jsonl"
    file.write_text('{"text": "cut \\ud83d", "spans": [{"text": "\\ude00 \\ud83d\\ude00"}], "label": 1}\n')
    assert read_records(str(file)) == [{"text": "cut \ufffd", "spans": [{"text": "\ufffd 😀"}], "label": 1}]
