"""Causal scoring equals a plain forward per pair, whatever the tree, the batch and the memory."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from throughline.core.errors import Failed, WrongUse
from throughline.core.scorer import Question
from throughline.eval import module_reader
from throughline.eval.causal import CausalScorer
from throughline.eval.items import Item
from throughline.eval.module_reader import Head, ModuleTrees, token_logprobs
from throughline.eval.opening import ScorerOptions, open_scorer
from throughline.eval.scoring import plant
from throughline.eval.task import find_tasks
from throughline.inference.runtimes.torch_backend import TorchCausal

MAT = "The cat sat on the mat and"
QUESTIONS = [
    [
        (MAT, " looked at me"),
        (MAT, " was"),
        (MAT, " was here again to see what there was to see, and then it left the room again"),
    ],
    [("", "Susan has seen herself."), ("", "Susan has seen himself.")],
    [
        ("Sarah was better than Maria so Sarah", " always won"),
        ("Sarah was better than Maria so Maria", " always won"),
    ],
    [("word " * 100, " over the hill"), ("word " * 100, " x")],  # longer than the window, cut at two places
    [("Hello", " a")],
    [("One of them", " is"), ("One of them", " is longer")],  # one choice begins with the other
]


def answers(scorer, questions) -> dict:
    found = {}
    for batch in scorer.score(questions):
        for index, scores in batch:
            assert index not in found
            found[index] = scores
    assert sorted(found) == list(range(len(questions)))
    return found


def plain(model, context, continuation, window):
    """The definition: one forward of one sequence, log-softmax over everything."""
    whole = torch.tensor((context + continuation)[-(window + 1) :])
    with torch.no_grad():
        logits = model(whole[None, :-1]).float()[0, -len(continuation) :]
    target = torch.tensor(continuation)
    tokens = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
    return tokens, bool((logits.argmax(-1) == target).all())


def test_trees_equal_one_forward_per_pair(gpt, gpt2_tokenizer) -> None:
    """1e-4: float32 sums of about 20 terms of some 10 nats in another order differ by 1e-5."""
    scorer = CausalScorer(gpt, gpt2_tokenizer, keep_tokens=True)
    questions = scorer.encode(QUESTIONS)
    found = answers(scorer, questions)
    for index, question in enumerate(questions):
        for (context, continuation), score in zip(question.pairs, found[index], strict=True):
            tokens, greedy = plain(gpt, context, continuation, scorer.window)
            np.testing.assert_allclose(score.token_logprobs, tokens.numpy(), atol=1e-4, rtol=0)
            assert score.logprob == pytest.approx(float(tokens.sum()), abs=1e-4)
            assert (score.greedy, score.tokens) == (greedy, len(continuation))
            assert scorer.lost(Question(((context, continuation),))) == max(
                0, len(context) + len(continuation) - scorer.window - 1
            )


def test_a_model_that_sees_a_window_is_scored_through_it(windowed_gpt, gpt2_tokenizer) -> None:
    """A pattern of attention decides in branches and in plain sequences too, by the positions of each pair's
    own sequence, and so does a soft cap; the backend that serves, with its cache, agrees.
    """
    for model in (windowed_gpt, TorchCausal(windowed_gpt)):
        scorer = CausalScorer(model, gpt2_tokenizer, keep_tokens=True)
        questions = scorer.encode(QUESTIONS)
        found = answers(scorer, questions)
        for index, question in enumerate(questions):
            for (context, continuation), score in zip(question.pairs, found[index], strict=True):
                tokens, _ = plain(windowed_gpt, context, continuation, scorer.window)
                np.testing.assert_allclose(score.token_logprobs, tokens.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_the_same_bits_in_any_batch(gpt, gpt2_tokenizer, threads: int) -> None:
    """Batches of one question, of some and of all, at each number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = []
        for budget in (1, 150, 333, 10_000):
            scorer = CausalScorer(gpt, gpt2_tokenizer, batch_tokens=budget, keep_tokens=True)
            found.append(answers(scorer, scorer.encode(QUESTIONS * 2)))
        assert all(one == found[0] for one in found[1:])
    finally:
        torch.set_num_threads(before)


def test_solved_examples_are_read_once(gpt, windowed_gpt, gpt2_tokenizer, monkeypatch) -> None:
    """Of all questions behind them, with the answers of questions of their own, and the same bits whatever is asked
    with them; one that loses tokens to the window has them for itself.
    """
    shown = "Q: is water wet?\nA: yes\n\nQ: is fire cold?\nA: no\n\n"
    texts = [[(shown + context, rest) for context, rest in pairs] for pairs in QUESTIONS]
    real, reads = ModuleTrees.hidden, []
    monkeypatch.setattr(ModuleTrees, "hidden", lambda *given: (reads.append(len(given)), real(*given))[1])
    for model in (gpt, windowed_gpt):
        scorer = CausalScorer(model, gpt2_tokenizer, keep_tokens=True, batch_tokens=50)
        alone, behind = scorer.encode(texts), scorer.encode(texts, [len(shown)] * len(texts))
        trunks = {question.trunk for question in behind}  # before an empty context without the line's end
        assert len(trunks) <= 3 and max(map(len, trunks)) > 15
        assert sum(bool(question.shared) for question in behind) > len(texts) // 2
        assert any(map(scorer.lost, behind)) == (() in trunks)
        wanted = answers(scorer, alone)
        reads.clear()
        found = answers(scorer, behind)
        assert reads.count(4) == len(trunks - {()}) < reads.count(3)
        for index, scores in wanted.items():
            for a, b in zip(scores, found[index], strict=True):
                np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4, rtol=0)
        for index, question in enumerate(behind):
            other = CausalScorer(model, gpt2_tokenizer, keep_tokens=True, batch_tokens=10_000)
            assert answers(other, [question])[0] == found[index]


def test_a_gpu_attends_to_all_questions_of_a_batch_in_one_call(
    gpt, windowed_gpt, gpt2_tokenizer, monkeypatch
) -> None:
    """Rows filled up to the longest give what trees one after another give, behind shared examples too, and every layer
    launches one kernel a batch (and one for the examples).
    """
    shown = "Q: is water wet?\nA: yes\n\n"
    calls, real = [], module_reader.scaled_dot_product
    monkeypatch.setattr(
        module_reader, "scaled_dot_product", lambda *a, **how: (calls.append(1), real(*a, **how))[1]
    )
    for model in (gpt, windowed_gpt):
        for before in ("", shown):
            texts = [[(before + context, rest) for context, rest in pairs] for pairs in QUESTIONS[:3]]
            scorer = CausalScorer(model, gpt2_tokenizer, keep_tokens=True, batch_tokens=10_000)
            questions = scorer.encode(texts, [len(before)] * len(texts))
            wanted = answers(scorer, questions)
            scorer.reader.together, scorer.reader.trunk = True, ((), [])
            calls.clear()
            found = answers(scorer, questions)
            passes = len({question.trunk for question in questions}) + len(
                {q.trunk for q in questions} - {()}
            )
            assert len(calls) == passes * model.config.layers
            for index, scores in wanted.items():
                for a, b in zip(scores, found[index], strict=True):
                    np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4, rtol=0)


def test_a_backend_scores_like_the_module(gpt, gpt2_tokenizer) -> None:
    """The path of exported graphs (cache rows, copied prefixes) through the torch backend."""
    native = CausalScorer(gpt, gpt2_tokenizer, keep_tokens=True)
    other = CausalScorer(TorchCausal(gpt), gpt2_tokenizer, keep_tokens=True)
    questions = native.encode(QUESTIONS)
    ours, theirs = answers(native, questions), answers(other, questions)
    for index, tree_scores in ours.items():
        for a, b in zip(tree_scores, theirs[index], strict=True):
            np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4, rtol=0)
            assert (a.greedy, a.tokens) == (b.greedy, b.tokens)


def test_an_onnx_graph_scores_like_the_module(gpt, gpt2_tokenizer, tmp_path) -> None:
    """The graph that `export` writes, through ONNX Runtime: 1e-4 nats a token, as between two float32
    programs.
    """
    from throughline.inference.exports.export import write_graph
    from throughline.inference.runtimes.backends import run_graph

    write_graph(gpt, tmp_path / "model.onnx", {})
    native = CausalScorer(gpt, gpt2_tokenizer, keep_tokens=True)
    backend = run_graph(tmp_path / "model.onnx", gpt.config)
    exported = CausalScorer(backend, gpt2_tokenizer, keep_tokens=True)
    questions = native.encode(QUESTIONS)
    ours, theirs = answers(native, questions), answers(exported, questions)
    for index, scores in ours.items():
        for a, b in zip(scores, theirs[index], strict=True):
            np.testing.assert_allclose(a.token_logprobs, b.token_logprobs, atol=1e-4, rtol=0)


def test_pairs_are_tokenised_whole_and_then_split(gpt2_tokenizer, small_gpt) -> None:
    scorer = CausalScorer(small_gpt, gpt2_tokenizer)
    encode = lambda text: tuple(gpt2_tokenizer.encode(text).tolist())  # noqa: E731
    eos = gpt2_tokenizer.eos_id
    cases = {
        ("Answer:", " yes"): (encode("Answer:"), encode(" yes")),
        ("Answer: ", "yes"): (encode("Answer:"), encode(" yes")),  # the blank belongs to the continuation
        ("", "Yes"): ((eos,), encode("Yes")),
        # the split is at the context's own length
        ("a b", "c"): (encode("a b"), encode("a bc")[len(encode("a b")) :]),
    }
    for pair, wanted in cases.items():
        assert scorer.encode([[pair]])[0].pairs == (wanted,)


def test_bos_is_put_before_every_text_when_asked(bos_tokenizer, gpt2_tokenizer, small_gpt) -> None:
    """By the file's own habit or by wish; an empty context is the BOS alone. Without such a token the wish is
    refused.
    """
    assert bos_tokenizer.puts_bos and not gpt2_tokenizer.puts_bos
    scorer = CausalScorer(small_gpt, bos_tokenizer, bos=True)
    plain = CausalScorer(small_gpt, bos_tokenizer)
    bos = bos_tokenizer.bos_id
    for pair in (("Hello there", " you"), ("", "Alone")):
        ((with_bos,), (without,)) = (found.encode([[pair]])[0].pairs for found in (scorer, plain))
        assert (
            with_bos == (((bos, *without[0]), without[1]) if pair[0] else without) and with_bos[0][0] == bos
        )
    with pytest.raises(WrongUse, match="no BOS"):
        CausalScorer(small_gpt, gpt2_tokenizer, bos=True)


def test_a_tie_is_greedy_for_the_first_token_only() -> None:
    weight = torch.zeros(3000, 4)
    weight[[7, 1500, 2900], 0] = 1.0  # three equal logits, in three pieces of the vocabulary
    hidden = torch.tensor([[1.0, 0, 0, 0]])
    targets = np.array([7, 1500, 2900, 8])
    head = Head(weight, None)
    logprobs, greedy, above = token_logprobs(head, hidden, np.zeros(4, np.int64), targets, ranks=True)
    assert greedy.tolist() == [True, False, False, False]
    assert above.tolist() == [0, 0, 0, 3]
    np.testing.assert_allclose(
        logprobs, torch.log_softmax(weight @ hidden[0], -1)[targets].numpy(), atol=1e-6
    )


def test_a_tree_holds_the_common_prefix_once() -> None:
    tree = plant(Question((((1, 2, 3), (4, 5)), ((1, 2, 3), (4, 6, 7)), ((1, 2, 3), (9,)))), 64)
    # inputs 1234, 12346, 123: the one-token choice needs no branch
    assert tree.prefix == 3 and tree.branches == (1, 2)
    assert tree.ids.tolist() == [1, 2, 3, 4, 4, 6] and tree.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert [lines.tolist() for lines in tree.lines] == [[2, 3], [2, 4, 5], [2]]


def too_much_for_torch() -> None:
    """As torch says it on a CPU."""
    torch.empty(1 << 60, dtype=torch.uint8)


def too_much_for_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def too_much_for_onnxruntime() -> None:
    raise type("RuntimeException", (Exception,), {})(
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"
    )


@pytest.mark.parametrize("full", [too_much_for_torch, too_much_for_cuda, too_much_for_onnxruntime])
def test_out_of_memory_halves_the_batch(
    small_gpt, gpt2_tokenizer, monkeypatch: pytest.MonkeyPatch, full: Any
) -> None:
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, batch_tokens=100_000)
    questions = scorer.encode(QUESTIONS)
    wanted = answers(scorer, questions)
    real, sizes = scorer.answered, []

    def small(trees):
        sizes.append(len(trees))
        if len(trees) > 2:
            full()
        return real(trees)

    monkeypatch.setattr(scorer, "answered", small)
    assert answers(scorer, questions) == wanted
    assert sizes[0] == len(QUESTIONS) and max(sizes[1:]) <= 3
    monkeypatch.setattr(scorer, "answered", lambda trees: full())
    with pytest.raises(Failed, match="single question"):
        answers(scorer, questions)


def test_solved_examples_that_memory_ended_in_are_read_again(
    small_gpt, gpt2_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept of them, a part of the layers, is not taken for all."""
    scorer, shown = CausalScorer(small_gpt, gpt2_tokenizer), "Q: is water wet?\nA: yes\n\n"
    texts = [
        [(f"{shown}Q: {word}?\nA:", " yes"), (f"{shown}Q: {word}?\nA:", " no")] for word in ("a", "b", "c")
    ]
    questions = scorer.encode(texts, [len(shown)] * 3)
    wanted, real, failing = answers(scorer, questions), ModuleTrees.hidden, [True]

    def hidden(reader: ModuleTrees, trees: Any, lines: Any, keep: Any = None) -> torch.Tensor:
        if keep and failing.pop() if failing else False:
            keep(())
            too_much_for_cuda()
        return real(reader, trees, lines, keep)

    monkeypatch.setattr(ModuleTrees, "hidden", hidden)
    assert answers(CausalScorer(small_gpt, gpt2_tokenizer), questions) == wanted and not failing


def test_batches_respect_the_budget_and_come_longest_first(small_gpt, gpt2_tokenizer) -> None:
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, batch_tokens=40)
    real, batches = scorer.answered, []
    scorer.answered = lambda trees: (batches.append([tree.tokens for tree in trees]), real(trees))[1]
    answers(scorer, scorer.encode(QUESTIONS * 3))
    asked = list(itertools.chain(*batches))
    assert asked == sorted(asked, reverse=True) and max(map(len, batches)) > 2
    assert all(sum(batch) <= 40 or len(batch) == 1 for batch in batches)


def test_wrong_questions_are_refused(small_gpt, gpt2_tokenizer, bert_tokenizer) -> None:
    scorer = CausalScorer(small_gpt, gpt2_tokenizer)
    with pytest.raises(Failed, match="longer than the model's window"):
        answers(scorer, scorer.encode([[("a", " word" * 200)]]))
    with pytest.raises(Failed, match="no tokens"):
        answers(scorer, scorer.encode([[("a", "")]]))
    tiny = type(small_gpt)(
        type(small_gpt.config)(vocab_size=100, layers=1, width=16, heads=1, sequence_length=16)
    )
    with pytest.raises(WrongUse, match="does not belong to the model"):
        CausalScorer(tiny, gpt2_tokenizer)


def test_what_an_option_does_not_do_is_said(gpt_directory, capsys) -> None:
    opened = open_scorer(gpt_directory, ScorerOptions(window=4096, pll="original"))
    said = capsys.readouterr().err
    assert opened.scorer.window == 128
    assert "--window 4,096 is longer than the model's 128 tokens" in said and "--pll" in said


def test_greedy_text_equals_argmax_steps(small_gpt, gpt2_tokenizer) -> None:
    scorer = CausalScorer(small_gpt, gpt2_tokenizer)
    contexts = ["The cat", "Question: where?\nAnswer:", ""]
    found = dict(item for batch in scorer.generate(contexts, [], 5) for item in batch)
    for number, context in enumerate(contexts):
        ids = list(gpt2_tokenizer.encode(context)) or [gpt2_tokenizer.eos_id]
        start = len(ids)
        for _ in range(5):
            with torch.no_grad():
                step = int(small_gpt(torch.tensor([ids]))[0, -1].argmax())
            if step == gpt2_tokenizer.eos_id:
                break
            ids.append(step)
        assert found[number] == gpt2_tokenizer.decode(ids[start:])


def test_written_answers_keep_to_the_window(small_gpt, gpt2_tokenizer, bos_tokenizer) -> None:
    """A narrower window cuts the question on its left to what the answer leaves, as the report counts it: the BOS is
    one of the tokens.
    """
    narrow, wide = (CausalScorer(small_gpt, gpt2_tokenizer, window=window) for window in (24, None))
    ids = gpt2_tokenizer.encode(
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age"
    )
    context, kept = (gpt2_tokenizer.decode(part) for part in (ids, ids[-19:]))
    assert len(ids) > 19 and gpt2_tokenizer.encode(kept).tolist() == ids[-19:].tolist()
    assert (
        list(narrow.generate([context], [], 5))
        == list(wide.generate([kept], [], 5))
        != list(wide.generate([context], [], 5))
    )
    with pytest.raises(WrongUse, match="no room for a question"):
        list(narrow.generate([context], [], 24))
    (task,) = find_tasks(["triviaqa"])
    for bos in (False, True):
        scorer = CausalScorer(small_gpt, bos_tokenizer, bos=bos, window=task.task.max_tokens + 6)
        ((_, lost),) = task.kind.asks([Item("x", ((context, " a"),))], scorer)
        assert lost == bos_tokenizer.encode(context).size + bos - 6
