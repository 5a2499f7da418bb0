"""Protocols of perplexity and Megatron-LM's forms of tasks against plain readings of their definitions."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from throughline.core.errors import Failed, WrongUse
from throughline.data.records import Record
from throughline.eval.asked import Settings
from throughline.eval.causal import CausalScorer
from throughline.eval.kinds.texts import stream
from throughline.eval.masked import MaskedScorer
from throughline.eval.report import rows_of
from throughline.eval.runner import evaluate
from throughline.eval.task import find_tasks

TEXT = (
    " = Title = \n \n The cat , which had sat on the mat , left . \n"
    " It was the age of wisdom and it was the age of foolishness . \n"
) * 2


def megatron(ids: list[int], window: int, stride: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """(what is read, what is predicted) of every target that counts, by Megatron-LM's zero-shot data set:
    windows begin every `stride` tokens, the first counts whole, later ones by their last `stride` places,
    padding never.
    """
    targets = max(len(ids) - 1 - stride, 0)
    for number in range(max(math.ceil(targets / stride) + 1, 1)):
        piece = ids[number * stride : number * stride + window + 1]
        for place in range(window):
            counts = number == 0 or stride == window or place >= window - stride
            if counts and place + 1 < len(piece):
                yield tuple(piece[: place + 1]), piece[place + 1]


@pytest.mark.parametrize("stride", [32, 20, 0])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 66, 100, 129, 333])
def test_a_stream_is_cut_as_megatron_cuts_it(tokens: int, stride: int) -> None:
    """Every target once, each after exactly the tokens that it has there, in the last window too."""
    ids = list(range(tokens))
    found = []
    for question in stream(tuple(ids), 64, stride):
        ((context, targets),) = question.pairs
        found += [
            ((context + targets)[: len(context) + place], target) for place, target in enumerate(targets)
        ]
    assert found == list(megatron(ids, 64, stride or 64))
    assert [target for _, target in found] == ids[1:]


def test_wikitext_by_megatron_is_normalised_by_original_words(
    small_gpt, gpt2_tokenizer, tmp_path: Path
) -> None:
    """exp of the sum over the original's words less one; the report's line says per what, and the stride."""
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_text(TEXT)
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, window=48)
    (task,) = find_tasks(["wikitext_megatron_2"])
    (scores,) = evaluate(scorer, [task], Settings(data_dir=tmp_path))
    (item,) = task.kind.items(task.records(tmp_path, None))
    ids = gpt2_tokenizer.encode(item.text).tolist()
    total = 0.0
    for read, target in megatron(ids, 48, 32):
        with torch.no_grad():
            total += float(torch.log_softmax(small_gpt(torch.tensor([read]))[0, -1].float(), -1)[target])
    metrics = scores.summary["metrics"]
    assert metrics["adjusted_perplexity"]["value"] == pytest.approx(
        math.exp(-total / (len(TEXT.strip().split(" ")) - 1)), rel=1e-4
    )
    assert metrics["token_perplexity"]["value"] == pytest.approx(math.exp(-total / (len(ids) - 1)), rel=1e-4)
    results = {"tasks": [scores.summary], "groups": []}
    assert rows_of(results)[0][:3] == ("wikitext_megatron_2", "adjusted_perplexity", "word, stride 32")
    (narrow,) = evaluate(
        CausalScorer(small_gpt, gpt2_tokenizer, window=20), [task], Settings(data_dir=tmp_path)
    )
    assert narrow.summary["stride"] == 20, "a window has no more new targets than tokens"


def test_lambada_by_megatron(small_gpt, gpt2_tokenizer) -> None:
    """Lax: the text's last token alone. Strict: all tokens of the last word, whatever white space is before
    it.
    """
    text = "He spoke of the \n antidisestablishmentarians"
    lax, strict, harness = find_tasks(["lambada_megatron", "lambada_megatron_strict", "lambada_openai"])
    (item,) = lax.kind.items([Record("x:1", {"text": text})])
    assert item.text == text
    assert strict.kind.items([Record("x:1", {"text": text})])[0].pairs == (
        ("He spoke of the", " antidisestablishmentarians"),
    )
    assert harness.kind.items([Record("x:1", {"text": text})])[0].pairs == (
        ("He spoke of the \n", " antidisestablishmentarians"),
    )
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, keep_tokens=True)
    (scores,) = evaluate(scorer, [lax], Settings(limit=3))
    for record, sample in zip(lax.records(None, 3), scores.samples, strict=True):
        ids = gpt2_tokenizer.encode(record.data["text"])[-(scorer.window + 1) :].tolist()
        with torch.no_grad():
            logits = small_gpt(torch.tensor([ids[:-1]]))[0, -1]
        ((logprob, right, tokens, *_),) = sample["answers"][0]
        assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[ids[-1]]), abs=1e-4)
        assert (tokens, right) == (1, int(logits.argmax() == ids[-1]))


def test_pseudo_perplexity_masks_each_token_once(bert, bert_tokenizer, tmp_path: Path) -> None:
    """Of a BERT a document's perplexity is that of its tokens, each masked alone in its window; the last
    window is filled up.
    """
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "test.txt").write_text(TEXT * 2)
    (task,) = find_tasks(["wikitext_2"])
    scorer = MaskedScorer(bert, bert_tokenizer, pll="original", window=13)
    (scores,) = evaluate(scorer, [task], Settings(data_dir=tmp_path, limit=1))
    ids = bert_tokenizer.encode(task.kind.items(task.records(tmp_path, 1))[0].text).tolist()
    room, total = 11, 0.0
    assert 2 * room < len(ids) and len(ids) % room
    for place, token in enumerate(ids):
        start = place // room * room
        start = min(start, len(ids) - room)
        row = [bert_tokenizer.cls_id, *ids[start : start + room], bert_tokenizer.sep_id]
        row[1 + place - start] = bert_tokenizer.mask_id
        with torch.no_grad():
            total += float(torch.log_softmax(bert(torch.tensor([row]))[0, 1 + place - start], -1)[token])
    metrics = scores.summary["metrics"]
    assert metrics["token_perplexity"]["value"] == pytest.approx(math.exp(-total / len(ids)), rel=1e-4)


PROMPT = "The capital of France is [MASK] ."


def cloze_task(folder: Path, *records: dict, answers: str = "a") -> list:
    (folder / "own.toml").write_text(
        'about = "own"\nkind = "cloze"\nmetrics = ["p_at_1", "p_at_10"]\n[source]\nfiles = ["own.jsonl"]\n'
        f'[[prompt]]\nfields = ["a", "c"]\ncontext = "{{{{ c }}}}"\nanswers = "{answers}"\n'
    )
    (folder / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return find_tasks([str(folder / "own.toml")])


def ranked_words(scorer: MaskedScorer, model, tokenizer) -> tuple[list[str], list[int]]:
    """What the model has for PROMPT's mask, the most probable first, and the places in it of words of one
    token.
    """
    ((context, _),) = scorer.encode([[(PROMPT, "x")]])[0].pairs
    row = [tokenizer.cls_id, *context, tokenizer.sep_id]
    with torch.no_grad():
        logits = model(torch.tensor([row]))[0, row.index(tokenizer.mask_id)]
    names = {number: word for word, number in tokenizer.vocab.items()}
    whole = [names[i] for i in logits.argsort(descending=True).tolist()]
    return whole, [
        place for place, word in enumerate(whole) if word.isalpha() and tokenizer.encode(word).size == 1
    ]


def test_cloze_counts_the_first_and_the_first_ten(bert, bert_tokenizer, tmp_path: Path) -> None:
    """P@1 and P@10 of the words that the model has first, last of the first ten, and next after them."""
    scorer = MaskedScorer(bert, bert_tokenizer)
    whole, ranked = ranked_words(scorer, bert, bert_tokenizer)
    chosen = [
        ranked[0],
        [place for place in ranked if place < 10][-1],
        next(place for place in ranked if place >= 10),
    ]
    tasks = cloze_task(tmp_path, *({"a": whole[place], "c": PROMPT} for place in chosen), answers="[a]")
    (scores,) = evaluate(scorer, tasks, Settings(data_dir=tmp_path))
    assert [sample["metrics"]["p_at_1"] for sample in scores.samples] == [
        [float(place < 1)] for place in chosen
    ]
    assert [sample["metrics"]["p_at_10"] for sample in scores.samples] == [
        [float(place < 10)] for place in chosen
    ]
    assert {place < 10 for place in chosen} == {True, False}


def test_every_accepted_answer_of_a_cloze_question_counts(bert, bert_tokenizer, tmp_path: Path) -> None:
    """The most probable word is right wherever it stands among the accepted ones; one that the mask cannot
    spell is none.
    """
    scorer = MaskedScorer(bert, bert_tokenizer)
    whole, ranked = ranked_words(scorer, bert, bert_tokenizer)
    best, worst = whole[ranked[0]], whole[ranked[-1]]
    tasks = cloze_task(
        tmp_path, {"c": PROMPT, "a": [worst, "reinterpretations", best]}, {"c": PROMPT, "a": [worst]}
    )
    (scores,) = evaluate(scorer, tasks, Settings(data_dir=tmp_path))
    assert [sample["metrics"]["p_at_10"] for sample in scores.samples] == [[1.0], [0.0]] and ranked[0] < 10


def test_a_cloze_question_without_an_answer_is_named(bert, bert_tokenizer, tmp_path: Path) -> None:
    """By file and line; a text as long as the window is no cut one, a longer one is skipped on demand,
    examples are refused.
    """
    scorer = MaskedScorer(bert, bert_tokenizer)
    good = {"c": PROMPT, "a": ["paris"]}
    full = {"c": "[MASK] " + "word " * (scorer.window - 1), "a": ["paris"]}
    long = {"c": "[MASK] " + "word " * scorer.window, "a": ["paris"]}
    (found,) = evaluate(
        scorer, cloze_task(tmp_path, good, full), Settings(data_dir=tmp_path, overlong="error")
    )
    assert (found.summary["n"], found.summary["truncated_records"]) == (2, 0)
    for wrong, complaint in (
        ({"c": "It is [MASK] .", "a": ["reinterpretations"]}, "not a cloze question"),
        ({"c": "It is .", "a": ["paris"]}, "no [MASK]"),
        (long, "longer than the model's window"),
    ):
        tasks = cloze_task(tmp_path, good, wrong)
        with pytest.raises(Failed, match=re.escape(complaint)) as caught:
            evaluate(scorer, tasks, Settings(data_dir=tmp_path))
        assert "own.jsonl:2" in caught.value.where
    (found,) = evaluate(scorer, tasks, Settings(data_dir=tmp_path, overlong="skip"))
    assert (found.summary["n"], found.summary["skipped_records"]) == (1, 1)
    with pytest.raises(WrongUse, match="takes no examples"):
        evaluate(scorer, tasks, Settings(data_dir=tmp_path, shots=1))
