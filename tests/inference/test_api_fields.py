"""Fields beyond OpenAI's, and shapes of other servers, through HTTP: each does what it says, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.data.tokenizer import Tokenizer

LIKELY = {"temperature": 0, "logit_bias": {"0": 100, "9": 90}}  # the end of text, then token 9


def test_where_an_answer_ends(ask: Any) -> None:
    async def body(found: Any) -> None:
        async def ids(**fields: Any) -> tuple[list[int], str]:
            (choice,) = (await found.complete(prompt="x", max_tokens=6, **LIKELY | fields))["choices"]
            return choice["token_ids"], choice["finish_reason"]

        assert await ids() == ([0], "stop")
        assert await ids(min_tokens=3) == ([9, 9, 9, 0], "stop")
        assert await ids(ignore_eos=True) == ([0] * 6, "length")
        assert await ids(ignore_eos=True, stop_token_ids=[9], logit_bias={"9": 100}) == ([9], "stop")

    ask(body)


def test_the_end_of_a_prompt_is_kept(ask: Any, gpt_dir: Path) -> None:
    """By a number of tokens, or by what the context leaves behind the answer; of ids and of text beyond any context."""
    text = "The quick brown fox " * 2000
    ids = Tokenizer.load(gpt_dir).encode(text).tolist()

    async def body(found: Any) -> None:
        async def answer(prompt: Any, **fields: Any) -> tuple[list[int], int]:
            told = await found.complete(prompt=prompt, max_tokens=4, **fields)
            return told["choices"][0]["token_ids"], told["usage"]["prompt_tokens"]

        for last, kept in ((7, 7), (-1, 156)):
            wanted = await answer(ids[-kept:])
            assert wanted[1] == kept
            assert await answer(ids, truncate_prompt_tokens=last) == wanted
            assert await answer(text, truncate_prompt_tokens=last) == wanted

    ask(body)


@pytest.mark.parametrize(
    ("kind", "value"), [("json", {"enum": ["yes"]}), ("regex", "[ab]{3}"), ("choice", ["up", "down"])]
)
def test_a_shape_by_both_names(ask: Any, kind: str, value: Any) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")

    async def body(found: Any) -> None:
        asked = {"prompt": "x", "max_tokens": 20}
        one = await found.complete(**asked, **{f"guided_{kind}": value})
        other = await found.complete(**asked, structured_outputs={kind: value})
        (text,) = {told["choices"][0]["text"] for told in (one, other)}
        assert text in ('"yes"', "up", "down") or {*text} <= {*"ab"}
        both = asked | {f"guided_{kind}": value, "structured_outputs": {kind: value}, "model": "gpt"}
        refused = await found.client.post("/v1/completions", json=both)
        assert refused.status_code == 400 and "two shapes" in refused.text

    ask(body)


def test_a_schema_with_a_large_number_is_one(ask: Any) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")

    async def body(found: Any) -> None:
        told = await found.complete(prompt="x", guided_json={"enum": [10**30]}, max_tokens=60)
        assert float(told["choices"][0]["text"]) == 1e30

    ask(body)


def test_vectors_are_shortened_and_texts_cut_when_asked(ask: Any) -> None:
    async def body(found: Any) -> None:
        async def post(path: str, **fields: Any) -> Any:
            return await found.client.post(path, json={"model": "bert"} | fields)

        async def vector(**fields: Any) -> np.ndarray:
            told = (await post("/v1/embeddings", **fields)).json()
            return np.array(told["data"][0]["embedding"])

        whole, short = await vector(input="A model"), await vector(input="A model", dimensions=5)
        np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
        assert (await post("/v1/embeddings", input="A model", dimensions=49)).status_code == 400
        long = "dog " * 99
        assert (await post("/embed", inputs=long)).status_code == 400
        cut = (await post("/embed", inputs=long, truncate=True)).json()[0]
        np.testing.assert_allclose(cut, await vector(input="dog " * 62), atol=1e-5)

    ask(body)


def test_scores_of_pairs_are_cosines_without_classes(ask: Any) -> None:
    async def body(found: Any) -> None:
        async def score(**fields: Any) -> Any:
            return await found.client.post("/v1/score", json={"model": "bert"} | fields)

        texts = ["A model", "the lazy dog", "word"]
        listed = await found.client.post("/v1/embeddings", json={"model": "bert", "input": texts})
        one, *others = (np.array(each["embedding"]) for each in listed.json()["data"])
        told = (await score(text_1=texts[0], text_2=texts[1:])).json()["data"]
        np.testing.assert_allclose(
            [each["score"] for each in told], [one @ other for other in others], atol=1e-5
        )
        assert (await score(text_1=["a", "b"], text_2=["a", "b", "c"])).status_code == 400
        many = await score(text_1=["a"] * 20, text_2=["b"] * 20)
        assert many.status_code == 400 and "too many texts" in many.text

    ask(body, texts=30)


def test_conversations_beyond_any_context_are_not_tokenised(
    chat_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found: Any) -> None:
        def refuse(messages: Any) -> Any:
            raise AssertionError("the messages were read")

        monkeypatch.setattr(found.server.models[0].chat, "ids", refuse)
        for message in ({"content": "word " * 9000}, {"content": "x", "name": "n" * 40_000}):
            request = {"messages": [{"role": "user"} | message]}
            answer = await found.client.post("/v1/chat/completions", json=request)
            assert answer.status_code == 400 and "longer than the model's context" in answer.text
        parts = json.dumps([{"type": "text", "text": ""}] * 9000)
        headers = {"Content-Type": "application/json"}
        data = f'{{"messages": [{{"role": "user", "content": {parts}}}]}}'
        answer = await found.client.post("/v1/chat/completions", content=data, headers=headers)
        assert answer.status_code == 400 and "too many messages, or parts" in answer.text

    in_thread.run_with(monkeypatch, [f"chat={chat_dir}"], body)
