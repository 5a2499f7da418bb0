"""Definitions that a small slip would change without any other test noticing: each against the formula or a library."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from throughline.core.scorer import Score
from throughline.data.answers import answer_f1
from throughline.eval.items import Item
from throughline.eval.kinds.choices import MultipleChoice
from throughline.eval.kinds.core import Core
from throughline.eval.kinds.masks import Cloze, hidden
from throughline.eval.kinds.texts import Rolling, Stream, rolling
from throughline.eval.masked import MaskedScorer
from throughline.eval.metrics import METRICS, aggregate, random_baseline
from throughline.eval.textops import places, which
from throughline.inference.runtimes.torch_backend import TorchCausal

WINDOW = 8


@pytest.mark.parametrize("pll", ["original", "within_word_l2r"])
def test_every_row_of_a_document_has_one_cls(bert, bert_tokenizer, pll: str) -> None:
    """Of documents of less than a window, of one, of two and more: [CLS], the window's tokens, [SEP]."""
    scorer = MaskedScorer(bert, bert_tokenizer, pll=pll, window=WINDOW + 2)
    cls_id, sep_id = bert_tokenizer.cls_id, bert_tokenizer.sep_id
    for count in (1, 3, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 3):
        ids = tuple(range(200, 200 + count))
        predicted = []
        for question in rolling(ids, scorer.window, scorer.prefix):
            for row in scorer.laid_out(question)[1]:
                first = row.ids[1] - 200
                size = min(WINDOW, count)
                assert row.ids.tolist() == [cls_id, *ids[first : first + size], sep_id]
                predicted += row.targets.tolist()
        assert predicted == list(ids)


def test_windows_of_a_document_are_the_harness_s() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for count in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW + 5):
        ids = list(range(count))
        theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(ids, -1, WINDOW, 1))
        ours = [question.pairs[0] for question in rolling(tuple(ids), WINDOW, -1)]
        assert [(list(context), list(targets)) for context, targets in ours] == [
            (list(context), list(targets)) for context, targets in theirs
        ]


def test_macro_f1_counts_every_label_that_any_record_has() -> None:
    """Records with two and with four choices, as the data of one task may have them; the largest number counts."""
    metrics = pytest.importorskip("sklearn.metrics", reason="comes with lm_eval")
    gold, predicted, choices = [0, 1, 3, 2, 1, 0], [0, 1, 3, 1, 1, 2], [2, 2, 4, 3, 2, 3]
    for records in (slice(None), slice(None, None, -1)):
        rows = list(zip(gold[records], predicted[records], choices[records]))
        expected = metrics.f1_score(gold, predicted, labels=range(4), average="macro", zero_division=0)
        assert aggregate("f1_macro", [list(map(float, row)) for row in rows])[0] == pytest.approx(expected)


def test_matthews_correlation_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="comes with lm_eval")
    gold, predicted = np.random.default_rng(2).integers(0, 2, (2, 50))
    rows = np.stack([gold, predicted], axis=1).astype(float).tolist()
    assert aggregate("mcc", rows)[0] == pytest.approx(metrics.matthews_corrcoef(gold, predicted))
    assert aggregate("mcc", [[1.0, 1.0], [0.0, 1.0]])[0] == 0


def score_of(logprob: float, greedy: bool = False, rank: int = 0, tokens: int = 1) -> Score:
    return Score(logprob, tokens if greedy else tokens - 1, tokens, rank)


def choice(item: Item, *scores: Score) -> dict[str, list[float]]:
    return MultipleChoice.of_scores(SimpleNamespace(), item, scores)


def test_choices_of_equal_score_several_right_ones_and_shares() -> None:
    """The first of equals is chosen; any right one counts; Brier and mc2 are of the probabilities among the choices."""
    item = Item("x", choices=("a", "b", "c"), gold=0, right=(0, 2))
    found = choice(item, score_of(-1.0), score_of(-1.0), score_of(-2.0))
    shares = np.exp([-1.0, -1.0, -2.0]) / np.exp([-1.0, -1.0, -2.0]).sum()
    assert found["acc"] == [1.0] and found["exact_match"] == [0.0]
    assert found["share_right"] == [pytest.approx(shares[0] + shares[2])]
    assert found["brier_score"] == [pytest.approx(((shares - [1, 0, 1]) ** 2).sum())]
    assert not METRICS["brier_score"].higher and METRICS["acc"].higher
    found = choice(item, score_of(-2.0), score_of(-1.0), score_of(-3.0, greedy=True))
    assert found["acc"] == [0.0] and found["exact_match"] == [1.0] and found["f1_macro"] == [0.0, 1.0, 3.0]


def test_norms_are_of_characters_and_of_bytes() -> None:
    """A choice of three letters of three bytes beside one of four of one byte."""
    item = Item("x", choices=("東京都", "abcd"), gold=0)
    found = choice(item, score_of(-3.6), score_of(-4.0))
    assert found["acc"] == [1.0] and found["acc_norm"] == [0.0] and found["acc_bytes"] == [1.0]


def test_ranks_of_a_cloze_answer() -> None:
    """Rank 0 is the first, rank 9 the tenth; the best accepted answer counts."""
    for ranks, first, ten in (((0,), 1.0, 1.0), ((9,), 0.0, 1.0), ((10,), 0.0, 0.0), ((12, 1), 0.0, 1.0)):
        found = Cloze.of_scores(SimpleNamespace(), Item("x"), [score_of(-1.0, rank=rank) for rank in ranks])
        assert found == {"p_at_1": [first], "p_at_10": [ten]}


def test_guessing_is_taken_off_a_centred_accuracy() -> None:
    """CORE of DCLM: (right - guessed) / (1 - guessed), by the mean log-probability of a token."""
    kind = SimpleNamespace(member={"guessed": "25"})
    item = Item("x", choices=("a", "b"), gold=1)
    scores = [score_of(-3.0, tokens=1), score_of(-4.0, tokens=2)]
    assert Core.of_scores(kind, item, scores) == {"acc": [1.0], "centred": [1.0]}
    found = Core.of_scores(kind, item, scores[::-1])
    assert found["acc"] == [0.0] and found["centred"] == [pytest.approx(-0.25 / 0.75)]


def test_words_of_pages_and_streams() -> None:
    """The harness counts an empty word at each end that is white space, Megatron-LM words less one."""
    page = " one  two\n three "
    assert Rolling.words(SimpleNamespace(), page) == len(re.split(r"\s+", page)) == 5
    assert Stream.words(SimpleNamespace(), " one two  three ") == 3  # "one", "two", "", "three", less one


def test_hidden_tokens_are_a_share_of_each_window() -> None:
    """Disjoint windows; 15 % of each, one at least, and the targets put back give the text."""
    ids = tuple(range(100, 145))
    questions = hidden(ids, 18, 5, 0.15)
    restored = []
    for question, size in zip(questions, (18, 18, 9), strict=True):
        ((row, targets),) = question.pairs
        assert len(row) == size and row.count(5) == len(targets) == max(1, round(0.15 * size))
        answers = iter(targets)
        restored += [next(answers) if token == 5 else token for token in row]
    assert restored == list(ids)


def test_guessing_scores_the_mean_of_one_over_the_choices() -> None:
    items = [Item("x", choices=("a", "b")), Item("x", choices=("a", "b", "c", "d"))]
    assert random_baseline("acc_norm", items) == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert random_baseline("f1", items) is None and random_baseline("acc", [Item("x")]) is None


@pytest.mark.parametrize(
    ("predicted", "right", "f1"),
    [
        ("", "", 1.0),  # SQuAD 2: no answer is right where there is none
        ("", "Paris", 0.0),
        ("Paris", "", 0.0),
        ("the a", "", 1.0),  # articles alone are no words
        ("The Paris, city", "paris", 2 / 3),
        ("a a b b", "b c", 1 / 2),  # b counts once
        ("up up", "up up up", 0.8),
    ],
)
def test_f1_of_answers_is_squad_s(predicted: str, right: str, f1: float) -> None:
    assert answer_f1(predicted, right) == pytest.approx(f1)


def test_filters_name_what_they_do_not_know() -> None:
    assert which(" B ", ("a",), ("b", "c")) == 1 and places([1, 0, 1]) == [0, 2]
    assert places(["x", "y"], ("y",)) == [1]
    with pytest.raises(ValueError, match="'d' is none of a, b/c"):
        which("d", ("a",), ("b", "c"))


def test_written_answers_take_the_room_that_they_need(small_gpt, gpt2_tokenizer, monkeypatch) -> None:
    """A row of a cache holds the longest prompt and its answer, not the model's context; the text is the same."""
    from throughline.eval.causal import CausalScorer

    caches = []
    real = TorchCausal.new_cache

    def new_cache(backend: TorchCausal, rows: int):
        caches.append((rows, backend.context))
        return real(backend, rows)

    monkeypatch.setattr(TorchCausal, "new_cache", new_cache)
    scorer = CausalScorer(small_gpt, gpt2_tokenizer)
    contexts = ["The cat", "It was the best of times"]
    answers = dict(item for batch in scorer.generate(contexts, [], 5) for item in batch)
    longest = max(gpt2_tokenizer.encode(context).size for context in contexts)
    assert caches == [(2, longest + 5)] and longest + 5 < small_gpt.config.sequence_length
    monkeypatch.setattr(type(scorer.reader), "writer", lambda reader, tokens: TorchCausal(reader.model))
    assert answers == dict(item for batch in scorer.generate(contexts, [], 5) for item in batch)
