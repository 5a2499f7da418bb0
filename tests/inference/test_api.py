"""The OpenAI surface: prompt log-probabilities, neutral values, refusals by name, keys, limits,
constrained output; in the test's own process.
"""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.source import open_model
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.keys import Key
from throughline.inference.serving.server import Server, build_app


@pytest.fixture
def ask(gpt_onnx: Path, bert_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an async test body against a server with a GPT and a BERT."""
    specs = [f"gpt={gpt_onnx}", f"bert={bert_onnx}"]
    return lambda body, **limits: in_thread.run_with(monkeypatch, specs, body, **limits)


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


def test_keys_are_needed_everywhere_but_for_probes_and_the_page(
    gpt_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found) -> None:
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/", 200),
            ("/metrics", 401),
            ("/v1/models", 401),
        ):
            assert (await found.client.get(path)).status_code == status
        wrong = await found.client.get("/v1/models", headers={"Authorization": "Bearer key-onE"})
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        for key in ("key-one", "key-two"):
            right = await found.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert right.status_code == 200

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, keys=("key-one", "key-two"))


def test_only_pages_of_named_origins_may_call() -> None:
    """CORS: off unless asked for; a browser's question before a call needs no key, and an error tells the page
    what it is.
    """
    page, other = {"Origin": "https://page.example"}, {"Origin": "https://other.example"}
    preflight = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    allowed = "access-control-allow-origin"

    async def ask(origins: tuple[str, ...]) -> list[httpx.Response]:
        app = build_app(
            Server(Catalogue([]), ServerLimits(), Telemetry()), keys=[Key.of("key")], origins=origins
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.options("/v1/completions", headers=preflight),
                *[await client.get("/v1/models", headers=given) for given in (page, other)],
                await client.get("/v1/models", headers=page | {"Authorization": "Bearer key"}),
            ]

    before, refused, elsewhere, answered = asyncio.run(ask(("https://page.example",)))
    assert before.status_code == 200 and before.headers[allowed] == "https://page.example"
    assert {"authorization", "content-type"} <= set(
        before.headers["access-control-allow-headers"].lower().split(", ")
    )
    assert refused.status_code == 401 and refused.headers[allowed] == "https://page.example"
    assert answered.status_code == 200 and answered.headers[allowed] == "https://page.example"
    assert allowed not in elsewhere.headers
    assert all(allowed not in answer.headers for answer in asyncio.run(ask(())))


def test_metrics_count_what_happened(ask) -> None:
    async def body(found) -> None:
        await found.complete(prompt="The quick", max_tokens=7)
        await found.client.post("/v1/embeddings", json={"input": ["a model", "text"], "model": "bert"})
        text = (await found.client.get("/metrics")).text
        value = lambda name: float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])  # noqa: E731
        assert value('throughline_generation_tokens_total{model="gpt"}') == 7
        assert value('throughline_inter_token_latency_seconds_count{model="gpt"}') == 6
        for name in ("time_to_first_token", "request_queue_time", "request_inference_time"):
            assert value(f'throughline_{name}_seconds_count{{model="gpt"}}') == 1
        assert value('throughline_batch_size_count{model="bert"}') == 2
        assert value('throughline_requests_total{endpoint="/v1/completions",status="200"}') == 1
        assert value('throughline_num_requests_waiting{model="gpt"}') == 0

    ask(body)


def test_counters_are_counters_and_every_metric_is_documented(ask) -> None:
    """Prometheus's own reader takes the page; what only grows is a counter, and the page of the book has each name."""
    from prometheus_client.parser import text_string_to_metric_families

    async def body(found) -> None:
        text = (await found.client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        documented = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
        for name, family in families.items():
            if not name.endswith("_created"):
                assert f"`{name}{'_total' if family.type == 'counter' else ''}" in documented, name
        grows = ("worker_restarts", "failed_requests", "spec_decode_draft_tokens", "watch_failures")
        assert {families[f"throughline_{name}"].type for name in grows} == {"counter"}
        gauges = {"num_requests_running": 0, "queue_limit": 5, "max_model_len": 160, "model_ready": 1}
        for name, value in (gauges | {"kv_cache_usage_perc": 0}).items():
            family = families[f"throughline_{name}"]
            by_model = {sample.labels["model"]: sample.value for sample in family.samples}
            assert family.type == "gauge" and by_model["gpt"] == value, name
        (build,) = families["throughline_build_info"].samples
        assert build.value == 1 and build.labels["version"]

    ask(body, queue=5)


def test_counters_go_on_when_a_model_is_replaced(ask) -> None:
    async def body(found) -> None:
        catalogue = found.server.catalogue
        found.remote().totals.restarts += 2
        source = catalogue.sources()["gpt"]
        catalogue._switch(await catalogue._open_beside(source, None))
        assert 'throughline_worker_restarts_total{model="gpt"} 2.0' in found.server.telemetry.page().decode()

    ask(body)


def test_a_refused_request_leaves_its_model_error_and_parameter_in_the_log(ask) -> None:
    """Whether its body cannot be read, a value is out of bounds, or the model does not answer the endpoint."""

    async def body(found) -> None:
        lines: list[dict] = []
        found.server.telemetry.log = lambda level, **fields: lines.append(fields | {"level": level})
        for fields in ({"temprature": 1}, {"max_tokens": 1000}, {"model": "bert"}, {"model": "absent"}):
            request = {"model": "gpt", "prompt": "a secret sentence"} | fields
            assert (await found.client.post("/v1/completions", json=request)).status_code in (400, 404)
        assert [line.get("model") for line in lines] == ["gpt", "gpt", "bert", None]
        assert [line.get("param") for line in lines[::2]] == ["temprature", "model"]
        assert lines[0]["error"] == "unknown field 'temprature'" and "context" in lines[1]["error"]
        assert all("secret" not in str(line) and line["level"] == "info" for line in lines)

    ask(body)


def test_the_access_log_has_numbers_and_no_text(ask) -> None:

    async def body(found) -> None:
        lines: list[dict] = []
        found.server.telemetry.log = lambda level, **fields: lines.append(fields)
        await found.complete(prompt="a secret sentence", max_tokens=3)
        (said,) = lines
        assert "secret" not in str(said) and said["generated_tokens"] == 3 and said["prompt_tokens"] > 3
        assert said["path"] == "/v1/completions" and said["status"] == 200 and said["id"].startswith("req-")
        assert 0 <= said["queue_ms"] <= said["first_ms"] <= said["ms"]

    ask(body)


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


def test_pooling_and_scale_of_embeddings(ask, bert_dir: Path) -> None:
    """`cls` is the last hidden state of the first token; without `normalize` the numbers are the model's."""

    async def body(found) -> None:
        async def embed(**fields) -> np.ndarray:
            request = {"model": "bert", "input": "A model reads"} | fields
            answer = await found.client.post("/v1/embeddings", json=request)
            return np.array(answer.json()["data"][0]["embedding"])

        tokenizer, model = Tokenizer.load(bert_dir), open_model(bert_dir).model
        ids = [tokenizer.cls_id, *tokenizer.encode("A model reads").tolist(), tokenizer.sep_id]
        with torch.inference_mode():
            hidden = model.hidden(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.long))[0].numpy()
        np.testing.assert_allclose(await embed(pooling="cls", normalize=False), hidden[0], atol=1e-4)
        np.testing.assert_allclose(await embed(normalize=False), hidden.mean(0), atol=1e-4)
        unit = hidden[0] / np.linalg.norm(hidden[0])
        np.testing.assert_allclose(await embed(pooling="cls"), unit, atol=1e-4)

    ask(body)


def test_classify_and_rerank_with_a_fine_tuned_head(
    judge_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Probabilities equal transformers' on the same directory: fp32 sums in another order."""
    transformers = pytest.importorskip("transformers")
    from throughline.inference.exports.export import export_onnx

    export_onnx(judge_dir, tmp_path / "onnx")
    theirs = transformers.BertForSequenceClassification.from_pretrained(str(judge_dir)).eval()
    tokenizer = Tokenizer.load(judge_dir)
    query, texts = "A model", ["reads text", "The quick brown fox jumps", "dog"]

    def shares(ids: list[int], types: list[int]) -> list[float]:
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        return torch.softmax(logits[0].double(), -1).tolist()

    async def body(found) -> None:
        framed = [[tokenizer.cls_id, *tokenizer.encode(text).tolist(), tokenizer.sep_id] for text in texts]
        first = [tokenizer.cls_id, *tokenizer.encode(query).tolist(), tokenizer.sep_id]
        for name in ("judge", "onnx"):
            listed = (await found.client.get(f"/v1/models/{name}")).json()
            reads = {"/v1/embeddings", "/embed", "/v1/score", "/tokenize", "/detokenize"}
            assert {*listed["endpoints"]} == reads | {"/v1/classify", "/v1/rerank", "/rerank"}
            answer = (await found.client.post("/v1/classify", json={"input": texts, "model": name})).json()
            for one, ids in zip(answer["data"], framed, strict=True):
                np.testing.assert_allclose(one["probs"], shares(ids, [0] * len(ids)), atol=1e-3)
                assert one["label"] == ("bad", "good")[int(np.argmax(one["probs"]))]
            request = {"query": query, "documents": texts, "model": name, "return_documents": True}
            ranked = (await found.client.post("/v1/rerank", json=request)).json()["results"]
            scores = [one["relevance_score"] for one in ranked]
            assert scores == sorted(scores, reverse=True) and len(scores) == 3
            for one in ranked:
                rest = framed[one["index"]][1:]
                expected = shares(first + rest, [0] * len(first) + [1] * len(rest))[1]
                assert one["relevance_score"] == pytest.approx(expected, abs=1e-3)
                assert one["document"]["text"] == texts[one["index"]]
            # as Text Embeddings Inference is asked and answers
            request = {"query": query, "texts": texts, "model": name, "return_text": True}
            theirs_too = (await found.client.post("/rerank", json=request)).json()
            for one, same in zip(theirs_too, ranked, strict=True):
                score, text = pytest.approx(same["relevance_score"], abs=1e-6), same["document"]["text"]
                assert one == {"index": same["index"], "score": score, "text": text}
            bare = (await found.client.post("/embed", json={"inputs": texts, "model": name})).json()
            listed = await found.client.post("/v1/embeddings", json={"input": texts, "model": name})
            whole = [one["embedding"] for one in listed.json()["data"]]
            np.testing.assert_allclose(bare, whole, atol=1e-6)
        wrong = await found.client.post("/v1/fill-mask", json={"input": "a [MASK]", "model": "judge"})
        assert (
            wrong.status_code == 400 and "does not answer /v1/fill-mask" in wrong.json()["error"]["message"]
        )

    in_thread.run_with(monkeypatch, [f"judge={judge_dir}", f"onnx={tmp_path / 'onnx'}"], body)


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
