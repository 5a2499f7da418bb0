"""The OpenAI surface: prompt log-probabilities, neutral values, refusals by name, limits, constrained output; in the
test's own process.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.source import open_model


def reference_logprobs(directory: Path, ids: list[int]) -> np.ndarray:
    """log p(ids[i] | ids[:i]) for i >= 1 by one plain forward, without a cache."""
    model = open_model(directory).model
    with torch.inference_mode():
        logits = model(torch.tensor([ids]))[0, :-1].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_gives_the_prompts_tokens_first(
    ask_texts, text_dir: Path, max_tokens: int, streamed: bool
) -> None:
    """A client that scores text reads them; the values equal a plain forward's: fp32 sums in another order."""
    prompt = "The quick brown fox says café. " * 3  # several tokens a character among them

    async def body(found) -> None:
        fields = {"model": "gpt", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        fields |= {"temperature": 0, "stream": streamed}
        answer = await found.client.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        if streamed:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            parts = [event["choices"][0] for event in events]
            choice = {"text": "".join(part["text"] for part in parts), "logprobs": {}}
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                choice["logprobs"][name] = [one for part in parts for one in part["logprobs"][name]]
        else:
            choice = answer.json()["choices"][0]
            assert answer.json()["usage"]["completion_tokens"] == max_tokens
        assert choice["text"].startswith(prompt)
        tokenizer = Tokenizer.load(text_dir)
        ids = tokenizer.encode_prompt(prompt).tolist()
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(ids) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = reference_logprobs(text_dir, ids)
        np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(ids)], expected, atol=1e-3)
        assert logprobs["tokens"][0] == tokenizer.decode(ids[:1], skip_special_tokens=True)
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])

    ask_texts(body)


NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "best_of": 1,
    "logit_bias": None,
    "suffix": None,
    "max_tokens": None,
    "n": None,
    "stop": None,
    "logprobs": None,
    "stream": None,
    "stream_options": None,
    "seed": None,
    "user": "me",
    "store": False,
    "response_format": {"type": "text"},
}


def test_neutral_values_and_nulls_are_accepted(ask) -> None:
    async def body(found) -> None:
        plain = await found.complete(prompt="The quick", max_tokens=None)
        neutral = await found.complete(prompt="The quick", **NEUTRAL)
        assert neutral["choices"] == plain["choices"] and plain["usage"]["completion_tokens"] == 16

    ask(body)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("best_of", 4, "best_of is not supported"),
        ("suffix", "the end", "suffix is not supported"),
        ("temprature", 0.5, "did you mean temperature?"),
        ("max_token", 5, "did you mean max_tokens?"),
        ("no_such_thing", 1, "known: "),
        ("max_tokens", 0, "max_tokens is 0"),
        ("logit_bias", {"304": 1}, "304 is not in 0"),
        ("stop_token_ids", [304], "304 is not in 0"),
        ("guided_json", True, "Expected `object | null`"),
        ("guided_json", [], "Expected `object | null`"),
    ],
)
def test_what_is_not_done_is_refused_by_name(ask, field: str, value: object, said: str) -> None:
    async def body(found) -> None:
        answer = await found.client.post(
            "/v1/completions", json={"prompt": "x", "model": "gpt", field: value}
        )
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"] and error["param"] == field

    ask(body)


def test_eight_problems_of_a_body_are_told(ask) -> None:
    async def body(found) -> None:
        wrong = dict.fromkeys(
            ("top_p", "top_k", "min_p", "seed", "n", "stop", "stream", "echo", "logprobs"), "a"
        )
        answer = await found.client.post("/v1/completions", json={"model": "gpt", "temperature": "b"} | wrong)
        assert answer.status_code == 400 and answer.json()["error"]["message"].count("; ") == 7

    ask(body)


def test_the_last_seed_is_followed_by_the_first(ask) -> None:
    """Answers of one request have seeds one apart; the largest that may be given has one behind it too."""

    async def body(found) -> None:
        drawn = {"prompt": "x", "temperature": 1.5, "max_tokens": 6}
        _, second = (await found.complete(seed=2**63 - 1, n=2, **drawn))["choices"]
        (first,) = (await found.complete(seed=0, **drawn))["choices"]
        assert second["token_ids"] == first["token_ids"]

    ask(body)


def test_penalties_and_biases_change_the_answer(ask) -> None:
    async def body(found) -> None:
        plain = (await found.complete(prompt="The quick"))["choices"][0]["token_ids"]
        banned = {str(i): -100 for i in set(plain)}
        other = (await found.complete(prompt="The quick", logit_bias=banned))["choices"][0]["token_ids"]
        assert not set(other) & set(plain)
        forced = await found.complete(prompt="The quick", logit_bias={"65": 100}, frequency_penalty=0.1)
        assert set(forced["choices"][0]["token_ids"]) == {65}

    ask(body)


def test_limits_of_a_request(ask) -> None:
    async def body(found) -> None:
        for fields, said in (({"max_tokens": 9}, "9 > 8"), ({"n": 3}, "3 > 2")):
            answer = await found.client.post(
                "/v1/completions", json={"prompt": "x", "model": "gpt"} | {"max_tokens": 4} | fields
            )
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]

    ask(body, max_tokens=8, max_n=2)


def test_an_answer_that_takes_too_long_is_given_up(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(found) -> None:
        import time

        backend = found.workers["gpt"].loaded.causal
        step = backend.step
        monkeypatch.setattr(backend, "step", lambda *given: time.sleep(0.05) or step(*given))
        fields = {"model": "gpt", "prompt": "x", "max_tokens": 150, "logit_bias": {"0": -100}}
        whole = await found.client.post("/v1/completions", json=fields)
        assert whole.status_code == 504 and whole.json()["error"]["type"] == "server_error"
        streamed = await found.client.post("/v1/completions", json=fields | {"stream": True})
        assert "took too long" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        assert found.remote().waiting == 0

    ask(body, request_s=0.3)


def test_tokens_there_and_back(ask) -> None:
    async def body(found) -> None:
        text = "Wörter mit Umlauten 🙂"
        told = (await found.client.post("/tokenize", json={"model": "gpt", "prompt": text})).json()
        assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 160
        back = await found.client.post("/detokenize", json={"model": "gpt", "tokens": told["tokens"]})
        assert back.json() == {"prompt": text}
        wrong = await found.client.post("/detokenize", json={"model": "gpt", "tokens": [99999]})
        assert wrong.status_code == 400

    ask(body)


# --- constrained output ---


def test_an_answer_fits_its_schema_or_expression(ask_texts) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "blue"]},
            "size": {"type": "integer", "minimum": 3, "maximum": 9},
        },
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}

    async def body(found) -> None:
        for seed in range(3):  # drawn from a model of noise: only the constraint gives it a shape
            drawn = {"prompt": "x", "temperature": 1.5, "seed": seed, "max_tokens": 100}
            answer = (await found.complete(response_format=shape, **drawn))["choices"][0]
            made = json.loads(answer["text"])
            assert made["colour"] in ("red", "blue") and 3 <= made["size"] <= 9
            assert answer["finish_reason"] == "stop"
            matched = (await found.complete(guided_regex=r"[a-f]{3}-[0-9]{2}", **drawn))["choices"][0]
            assert re.fullmatch(r"[a-f]{3}-[0-9]{2}", matched["text"])
        for wrong in ({"guided_regex": "("}, {"response_format": {"type": "json_schema"}}):
            request = {"prompt": "x", "model": "gpt"} | wrong
            answer = await found.client.post("/v1/completions", json=request)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(wrong))

    ask_texts(body)
