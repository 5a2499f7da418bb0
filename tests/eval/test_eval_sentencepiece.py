"""A model with a SentencePiece-style tokenizer and several end tokens scores and writes as in the harness."""

from pathlib import Path
from typing import Any

import pytest
from throughline.eval.opening import ScorerOptions, open_scorer
from tokenizer_fixtures import write_ending

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")

CONTEXTS = ("hello world", "the answer 日本 \U0001f600", "naïve\n\n", "नमस्ते")


@pytest.fixture(scope="module")
def theirs(sentencepiece_dir: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(sentencepiece_dir), dtype="float32", device="cpu", batch_size=1)


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, task_name="t", doc_id=0, repeats=1)


def check_log_probabilities(scorer: Any, theirs: Any) -> None:
    """Those of pairs equal the harness's."""
    pairs = [(context, rest) for context in CONTEXTS for rest in (" hello", " 日本", "\U0001f600")]
    expected = theirs.loglikelihood([asked("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    questions = scorer.encode([[pair] for pair in pairs])
    found = dict(item for batch in scorer.score(questions) for item in batch)
    ours = [(found[place][0].logprob, found[place][0].greedy) for place in range(len(pairs))]
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
    assert [logprob for logprob, _ in ours] == pytest.approx([one for one, _ in expected], abs=1e-3)


@pytest.mark.parametrize("chat", [False, True], ids=["texts", "chats"])
def test_scores_and_answers_equal_the_harness(sentencepiece_dir: Path, theirs: Any, chat: bool) -> None:
    """Written answers of characters in bytes, that end at any end token and have no special token in their text."""
    scorer = open_scorer(sentencepiece_dir, ScorerOptions(apply_chat_template=chat)).scorer
    contexts = list(CONTEXTS)
    if not chat:
        check_log_probabilities(scorer, theirs)
    else:
        turns = [[{"role": "user", "content": text}] for text in CONTEXTS]
        contexts = [scorer.chat.text(one) for one in turns]
        assert contexts == [theirs.apply_chat_template(one) for one in turns]
    for until in ([], ["a"], ["\U0001f600"]):
        how = {"max_gen_toks": 24, "until": until, "do_sample": False}
        requests = [asked("generate_until", text, dict(how)) for text in contexts]
        expected = theirs.generate_until(requests, disable_tqdm=True)
        found = dict(item for batch in scorer.generate(contexts, until, 24) for item in batch)
        assert [found[place] for place in range(len(contexts))] == expected
    assert any("\ufffd" in text for text in expected)  # a random model writes broken characters, too


def test_an_answer_ends_at_each_end_token(sentencepiece_dir: Path, tmp_path: Path) -> None:
    """The ends of generation_config.json and config.json besides the tokenizer's, as transformers ends."""
    transformers = pytest.importorskip("transformers")
    path = write_ending(sentencepiece_dir, tmp_path / "ends")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=6, do_sample=False)[0][ids.shape[1] :]
    assert made.tolist() == [0]
    scorer = open_scorer(path, ScorerOptions()).scorer
    assert scorer.end_ids == {0, 2} and scorer.recipe["end ids"] == [0]
    (((_, text),),) = scorer.generate(["hello"], (), 6)
    assert text == tokenizer.decode(made, skip_special_tokens=True) == ""
