"""Masked scores equal a plain loop that masks one token at a time."""

import json
import shutil

import pytest
import torch
from throughline.core.errors import Failed, WrongUse
from throughline.core.scorer import Question
from throughline.eval.asked import Settings
from throughline.eval.causal import CausalScorer
from throughline.eval.kinds.masks import hidden
from throughline.eval.masked import MaskedScorer
from throughline.eval.opening import ScorerOptions, scorer_of
from throughline.eval.runner import evaluate
from throughline.eval.task import find_tasks

QUESTIONS = [
    [
        ("", "The unbelievability of reinterpretations astonishes me"),
        ("", "The unbelievability of cats astonish me"),
    ],
    [("Where was he?", "at home"), ("Where was he?", "reinterpretation")],
    [("word " * 80, "over")],  # the context loses its left
]


def answers(scorer, questions) -> dict:
    return dict(item for batch in scorer.score(questions) for item in batch)


def plain(model, tokenizer, context, continuation, whole_words: bool, window: int) -> float:
    """The definition: one row per token, a log-softmax at the mask."""
    names = {number: word for word, number in tokenizer.vocab.items()}
    context = context[max(0, len(context) - (window - len(continuation))) :]
    ids = [tokenizer.cls_id, *context, *continuation, tokenizer.sep_id]
    total = 0.0
    for place in range(1 + len(context), len(ids) - 1):
        row = list(ids)
        row[place] = tokenizer.mask_id
        later = place + 1
        while whole_words and names[ids[later]].startswith("##"):
            row[later] = tokenizer.mask_id
            later += 1
        with torch.no_grad():
            total += float(torch.log_softmax(model(torch.tensor([row]))[0, place], -1)[ids[place]])
    return total


@pytest.mark.parametrize("pll", ["original", "within_word_l2r"])
def test_scores_equal_one_mask_at_a_time(bert, bert_tokenizer, pll: str) -> None:
    """1e-4 is the bound of the issue; float32 noise here is about 1e-5."""
    scorer = MaskedScorer(bert, bert_tokenizer, pll=pll)
    questions = scorer.encode(QUESTIONS)
    found = answers(scorer, questions)
    for index, question in enumerate(questions):
        for (context, continuation), score in zip(question.pairs, found[index], strict=True):
            wanted = plain(
                bert, bert_tokenizer, context, continuation, pll == "within_word_l2r", scorer.window
            )
            assert score.logprob == pytest.approx(wanted, abs=1e-4)
            assert scorer.lost(Question(((context, continuation),))) == max(
                0, len(context) + len(continuation) - scorer.window
            )


def test_the_two_kinds_differ_only_inside_words(bert, bert_tokenizer) -> None:
    def score(pll: str, text: str) -> float:
        scorer = MaskedScorer(bert, bert_tokenizer, pll=pll)
        return answers(scorer, scorer.encode([[("", text)]]))[0][0].logprob

    assert score("original", "the cat is here") == score("within_word_l2r", "the cat is here")
    assert score("original", "reinterpretations") != score("within_word_l2r", "reinterpretations")


def test_answers_are_the_same_bits_in_any_batch(bert, bert_tokenizer) -> None:
    found = []
    for budget in (1, 70, 300, 100_000):
        scorer = MaskedScorer(bert, bert_tokenizer, batch_tokens=budget, keep_tokens=True)
        questions = scorer.encode(QUESTIONS * 5)
        (document,) = scorer.tokenize(["All work and no play makes Jack a dull boy. " * 20])
        found.append(answers(scorer, [*questions, *hidden(document, scorer.window, scorer.mask, 0.15)]))
    assert all(one == found[0] for one in found[1:])


def test_an_exported_bert_scores_like_the_module(bert, bert_tokenizer, tmp_path) -> None:
    """The graph that `export` writes, through ONNX Runtime: 1e-4 nats a token, as between two float32
    programs.
    """
    from throughline.inference.exports.export import write_graph
    from throughline.inference.runtimes.backends import run_graph

    write_graph(bert, tmp_path / "model.onnx", {})
    backend = run_graph(tmp_path / "model.onnx", bert.config)
    for pll in ("original", "within_word_l2r"):
        native = MaskedScorer(bert, bert_tokenizer, pll=pll, keep_tokens=True)
        exported = MaskedScorer(backend, bert_tokenizer, pll=pll, keep_tokens=True)
        questions = native.encode([*QUESTIONS, [("The capital of France is [MASK] .", "paris")]])
        (document,) = native.tokenize(["All work and no play makes Jack a dull boy. " * 20])
        questions += hidden(document, native.window, native.mask, 0.15)
        ours, theirs = answers(native, questions), answers(exported, questions)
        for index, scores in ours.items():
            for a, b in zip(scores, theirs[index], strict=True):
                assert a.token_logprobs == pytest.approx(b.token_logprobs, abs=1e-4)
                assert (a.right, a.tokens) == (b.right, b.tokens)
                assert abs(a.rank - b.rank) <= 10, "of 30,522 tokens few are 1e-4 from the answer"


def test_an_exported_bert_passes_the_gate(bert, bert_tokenizer, gpt_directory, samples, tmp_path) -> None:
    """From a Hugging Face directory to an ONNX artifact, both scored in one command: tokens agree, BLiMP's
    score too.
    """
    from safetensors.torch import save_file
    from throughline.eval.session import Request, evaluate_one
    from throughline.inference.exports.export import export_onnx
    from throughline.models.huggingface import to_huggingface

    config, state = to_huggingface(bert)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    (tmp_path / "bert" / "tokenizer.json").write_text(bert_tokenizer.to_json())
    save_file(
        {name: value.contiguous() for name, value in state.items()}, tmp_path / "bert" / "model.safetensors"
    )
    export_onnx(tmp_path / "bert", tmp_path / "onnx")
    shutil.copytree(samples / "blimp", tmp_path / "data" / "blimp")
    (tmp_path / "data" / "copa").mkdir(parents=True)
    record = {"query": "The cat sat because", "choices": ["it was tired", "it ran away"], "gold": 0}
    (tmp_path / "data" / "copa" / "copa.jsonl").write_text(json.dumps(record) + "\n")
    asked = {"tasks": "blimp_wh_island,copa", "limit": 6, "data_dir": tmp_path / "data"}
    payload, _ = evaluate_one(Request(tmp_path / "bert", **asked, against=str(tmp_path / "onnx"), bound=1e-4))
    assert set(payload["against"]["largest_difference"]) == {"blimp_wh_island", "copa"}
    with pytest.raises(WrongUse, match="cannot be compared") as caught:
        evaluate_one(Request(tmp_path / "bert", **asked, against=str(gpt_directory)))
    assert caught.value.why == "a bert and a gpt"
    alone, _ = evaluate_one(Request(tmp_path / "onnx", **asked))
    assert [task["metrics"] for task in alone["tasks"]] == [
        task["metrics"] for task in payload["against"]["scores"]
    ]


def test_cloze_ranks_the_answer_at_the_mask(bert, bert_tokenizer) -> None:
    """Against a plain forward; of an answer of several tokens the rank is that of the worst one, whichever it is."""
    scorer = MaskedScorer(bert, bert_tokenizer)
    asked = [
        ("The capital of France is [MASK] .", "paris"),
        ("The capital of France is [MASK] [MASK] .", "new york"),
        ("The capital of France is [MASK] [MASK] .", "york new"),
    ]
    questions = scorer.encode([[pair] for pair in asked])
    found = answers(scorer, questions)
    for index, question in enumerate(questions):
        context, answer = question.pairs[0]
        ids = torch.tensor([[bert_tokenizer.cls_id, *context, bert_tokenizer.sep_id]])
        with torch.no_grad():
            logprobs = torch.log_softmax(bert(ids)[0, ids[0] == bert_tokenizer.mask_id], -1)
        chosen = logprobs[range(len(answer)), list(answer)]
        ranks = (logprobs > chosen[:, None]).sum(-1).tolist()
        first, last = ((logprobs > chosen[:, None] + near).sum(-1).max() for near in (1e-4, -1e-4))
        (score,) = found[index]
        assert score.logprob == pytest.approx(float(chosen.sum()), abs=1e-4)
        assert first <= score.rank <= last < first + 10, "another processor rounds a near tie otherwise"
        assert len(ranks) == 1 or min(ranks) < first
    with pytest.raises(Failed, match="cloze"):
        answers(scorer, scorer.encode([[("It is [MASK] .", "reinterpretations")]]))  # of several tokens


def test_hidden_tokens_are_predicted_at_once(bert, bert_tokenizer) -> None:
    """Against one plain forward a window: every token is in one window, 15 % of each are masked, arg-max and
    sum are the head's.
    """
    scorer = MaskedScorer(bert, bert_tokenizer)
    (document,) = scorer.tokenize(["All work and no play makes Jack a dull boy. " * 20])
    questions = hidden(document, scorer.window, bert_tokenizer.mask_id, 0.15)
    found = answers(scorer, questions)
    whole: list[int] = []
    for index, question in enumerate(questions):
        ((context, targets),) = question.pairs
        places = [place for place, token in enumerate(context) if token == bert_tokenizer.mask_id]
        assert len(places) == len(targets) == max(1, round(0.15 * len(context)))
        restored = list(context)
        for place, target in zip(places, targets):
            restored[place] = target
        whole += restored
        with torch.no_grad():
            row = torch.tensor([[bert_tokenizer.cls_id, *context, bert_tokenizer.sep_id]])
            logprobs = torch.log_softmax(bert(row)[0, [1 + place for place in places]], -1)
        (score,) = found[index]
        assert score.logprob == pytest.approx(float(logprobs[range(len(targets)), targets].sum()), abs=1e-4)
        assert score.right == int((logprobs.argmax(-1) == torch.tensor(targets)).sum())
    assert tuple(whole) == document and len(questions) > 2


def test_accuracy_at_hidden_tokens_of_a_task(bert, bert_tokenizer, gpt, gpt2_tokenizer, tmp_path) -> None:
    """Over a user's own text: the share of all hidden tokens, not the mean of the documents' shares; a GPT is
    refused.
    """
    (tmp_path / "text.txt").write_text(
        "the cat sat\n" + "a much longer line of words about the sea and the land\n" * 3
    )
    (tmp_path / "own.toml").write_text(
        'about = "own"\nkind = "masked"\nmetrics = ["mlm_accuracy", "mlm_perplexity"]\nhidden = 0.5\n'
        '[source]\nfiles = ["text.txt"]\nlines = 1\n[[prompt]]\nfields = ["lines"]\ntext = "{{ lines[0] }}"\n'
    )
    (task,) = find_tasks([str(tmp_path / "own.toml")])
    (scores,) = evaluate(MaskedScorer(bert, bert_tokenizer), [task], Settings(data_dir=tmp_path))
    right, asked = map(sum, zip(*(sample["metrics"]["mlm_accuracy"] for sample in scores.samples)))
    assert asked == sum(answer[2] for sample in scores.samples for (answer,) in sample["answers"])
    assert scores.summary["metrics"]["mlm_accuracy"]["value"] == right / asked
    with pytest.raises(WrongUse, match="no masks"):
        evaluate(CausalScorer(gpt, gpt2_tokenizer), [task], Settings(data_dir=tmp_path))


def test_an_option_of_a_gpt_is_said_to_change_nothing(bert, bert_tokenizer, capsys) -> None:
    scorer_of(bert, "bert", bert_tokenizer, ScorerOptions(bos=True, window=4096))
    said = capsys.readouterr().err
    assert "--bos" in said and "--window 4,096 is longer" in said
    scorer_of(bert, "bert", bert_tokenizer)
    assert not capsys.readouterr().err


def test_wrong_tokenizer_and_generation_are_refused(
    bert, gpt2_tokenizer, bert_tokenizer, samples, tmp_path, monkeypatch
) -> None:
    """Also before the other tasks of the same command are scored, and a window without room."""
    with pytest.raises(WrongUse, match="does not belong to the model"):
        MaskedScorer(bert, gpt2_tokenizer)
    with pytest.raises(WrongUse, match="cannot write"):
        next(MaskedScorer(bert, bert_tokenizer).generate(["x"], [], 3))
    file = tmp_path / "triviaqa" / "triviaqa_sm_sub.jsonl"
    file.parent.mkdir()
    file.write_text(
        json.dumps({"context": "Question: Who?\nAnswer:", "answer": "Ann", "aliases": ["Ann"]}) + "\n"
    )
    shutil.copytree(samples / "blimp", tmp_path / "blimp")
    scorer = MaskedScorer(bert, bert_tokenizer)
    monkeypatch.setattr(scorer, "score", lambda questions: pytest.fail("scored before the refusal"))
    with pytest.raises(WrongUse, match="cannot write"):
        evaluate(scorer, find_tasks(["blimp_wh_island", "triviaqa"]), Settings(data_dir=tmp_path, limit=2))
    with pytest.raises(WrongUse, match="no room for a text"):
        MaskedScorer(bert, bert_tokenizer, window=2)
