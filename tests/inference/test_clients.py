"""Clients that others wrote: the official openai package unchanged, three from an environment of their own (`make
clients`), and lm_eval's local-completions, whose log-likelihoods equal ours; schemathesis on the schema.
"""

import asyncio
import json
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from throughline.data.tokenizer import Tokenizer

TEXTS = [
    ("The quick brown fox", " jumps over the lazy dog"),
    ("A model reads text and says", " which word is likely"),
    ("Wörter mit Umlauten", ", café, naïve"),
    ("", "The quick brown fox jumps"),
]


def test_the_openai_client_works_unchanged(
    gpt_onnx: Path, bert_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")

    async def body(found) -> None:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=found.client, max_retries=0
        )
        assert {model.id async for model in client.models.list()} == {"gpt", "bert"}
        assert (await client.models.retrieve("bert")).id == "bert"
        asked = {"model": "gpt", "prompt": "The quick", "max_tokens": 12, "temperature": 0, "logprobs": 2}
        whole = await client.completions.create(**asked)
        assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == 12
        stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        events = [event async for event in stream]
        assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
        assert events[-1].usage == whole.usage
        for encoding in ({}, {"encoding_format": "float"}):  # its default is base64
            embedded = await client.embeddings.create(model="bert", input=["a model", "text"], **encoding)
            vectors = np.array([item.embedding for item in embedded.data])
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("absent")
        with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
            await client.completions.create(**asked, best_of=3)
        found.remote().ready = False
        with pytest.raises(openai.InternalServerError, match="loading"):
            await client.completions.create(**asked)

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}", f"bert={bert_onnx}"], body)


CLIENTS = Path(__file__).parents[2] / "build" / "clients" / "bin" / "python"  # of `make clients`


@pytest.mark.parametrize("name", ["langchain", "llamaindex", "litellm"])
def test_other_clients_get_what_the_server_says(
    name: str, gpt_dir: Path, bert_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Completions, chat, streams and embeddings through a client are those of plain HTTP."""
    import httpx
    from foreign_clients import MESSAGE, PROMPT

    if not CLIENTS.is_file():
        pytest.skip("needs the clients' own environment: make clients")
    for file in gpt_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with in_thread.on_a_port_with(monkeypatch, [f"gpt={tmp_path}", f"bert={bert_dir}"]) as (base, _):
        asked = {"model": "gpt", "temperature": 0, "max_tokens": 8}

        def post(path: str, **body) -> dict:
            return httpx.post(f"{base}v1/{path}", json=body, timeout=60).raise_for_status().json()

        chat = post("chat/completions", messages=[{"role": "user", "content": MESSAGE}], **asked)
        vectors = post("embeddings", model="bert", input=["a model", "text"])["data"]
        expected = {
            "completion": post("completions", prompt=PROMPT, **asked)["choices"][0]["text"],
            "chat": chat["choices"][0]["message"]["content"],
            "stream": chat["choices"][0]["message"]["content"],
            "tokens": chat["usage"]["completion_tokens"],
        }
        # its table of prices, which LiteLLM asks the network for otherwise
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment.pop("PYTHONPATH", None)
        script = Path(__file__).with_name("foreign_clients.py")
        done = subprocess.run(
            [CLIENTS, script, name, f"{base}v1"], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    found = got.pop("vectors", [one["embedding"] for one in vectors])
    np.testing.assert_allclose(found, [one["embedding"] for one in vectors], atol=1e-6)
    assert got == {key: expected[key] for key in got} and {"completion", "chat", "stream"} <= got.keys()


def test_lm_evals_loglikelihoods_through_the_server_equal_ours(
    text_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within 1e-3 nats, the bound of the comparison without a server; greedy flags equal."""
    api = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm_eval")
    from lm_eval.api.instance import Instance
    from throughline.eval.causal import CausalScorer
    from throughline.inference.runtimes.source import open_model

    tokenizer_dir = tmp_path / "tokenizer"
    tokenizer_dir.mkdir()
    (tokenizer_dir / "tokenizer.json").write_bytes((text_dir / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(text_dir)
    names = {token_id: name for name, token_id in tokenizer.vocab.items()}
    roles = {f"{role}_token": names[token_id] for role, token_id in tokenizer.special.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | roles
    (tokenizer_dir / "tokenizer_config.json").write_text(json.dumps(config))
    scorer = CausalScorer(open_model(text_dir).model, tokenizer)
    questions = scorer.encode([[pair] for pair in TEXTS])
    ours = {number: scores[0] for answered in scorer.score(questions) for number, scores in answered}
    with in_thread.on_a_port_with(monkeypatch, [f"gpt={text_dir}"]) as (base, _):
        theirs = api.LocalCompletionsAPI(
            base_url=f"{base}v1/completions",
            model="gpt",
            tokenizer=str(tokenizer_dir),
            tokenizer_backend="huggingface",
            max_length=159,  # lm_eval asks for one token more than it scores
            batch_size=2,
        )
        asked = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=number)
            for number, pair in enumerate(TEXTS)
        ]
        answers = theirs.loglikelihood(asked, disable_tqdm=True)
    for number, (logprob, greedy) in enumerate(answers):
        assert logprob == pytest.approx(ours[number].logprob, abs=1e-3) and logprob < -1
        assert greedy == ours[number].greedy


def test_no_request_that_the_schema_allows_is_a_server_error(
    gpt_onnx: Path, bert_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies drawn from /openapi.json, and bodies that break it: never a 5xx, always JSON."""
    schemathesis = pytest.importorskip("schemathesis")
    specs = [f"gpt={gpt_onnx}", f"bert={bert_onnx}"]
    with in_thread.on_a_port_with(monkeypatch, specs, queue=64) as (base, server):
        schema = schemathesis.openapi.from_url(f"{base}openapi.json")
        statuses: dict[str, set[int]] = {}
        for result in schema.get_all_operations():
            statuses[result.ok().path] = seen = set()
            _try_all(result.ok(), seen)
        assert statuses["/health"] == {200} and 400 in statuses["/v1/completions"]
        assert all(model.count("waiting") == 0 for model in server.models)


def _try_all(operation, seen: set[int]) -> None:
    """Calls an operation with 25 bodies that its schema allows and notes the statuses."""
    from hypothesis import HealthCheck, Phase, given, settings

    @given(case=operation.as_strategy())
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case) -> None:
        answer = case.call()
        assert answer.status_code < 500, (answer.text, case.body)
        assert operation.path == "/metrics" or "error" in answer.json() or answer.status_code == 200
        seen.add(answer.status_code)

    check()


@pytest.mark.slow
def test_ten_thousand_bad_requests_leave_nothing_behind(
    gpt_onnx: Path, bert_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken bodies of every kind, on kept connections: no 5xx, and less than 30 MB more memory than after
    the first thousand (the allocator's own rounding; a leak of one body of 1 KB each would be 9 MB a KB).
    """
    import gc

    import httpx
    import psutil

    draw = random.Random(5)
    bodies = [
        lambda: b"[" * draw.randrange(50_000),
        lambda: b'{"prompt": NaN, "model": "gpt"}',
        lambda: bytes(draw.randrange(256) for _ in range(draw.randrange(2000))),
        lambda: json.dumps(
            {"prompt": "x" * draw.randrange(3000), "model": draw.choice(["gpt", "no"])}
        ).encode(),
        lambda: json.dumps({"input": ["y"] * draw.randrange(300), "model": "bert"}).encode(),
        lambda: b'{"prompt": "\xff\xfe", "model": "gpt"}',
        lambda: json.dumps(
            {"prompt": "x", "model": "gpt", "max_tokens": draw.choice([-1, 1e9, "1", [], 3])}
        ).encode(),
        lambda: json.dumps(
            {"prompt": [draw.randrange(-5, 400)], "model": "gpt", "temperature": "hot"}
        ).encode(),
    ]
    paths = [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/fill-mask",
        "/tokenize",
        "/nowhere",
    ]
    statuses: set[int] = set()

    async def storm(base: str, requests: int) -> None:
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            for _ in range(requests):
                body, path = draw.choice(bodies)(), draw.choice(paths)
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                statuses.add(answer.status_code)
                assert answer.status_code < 500 and answer.headers["content-type"] == "application/json"

    async def all_of(base: str, requests: int) -> None:
        await asyncio.gather(*(storm(base, requests // 8) for _ in range(8)))

    specs = [f"gpt={gpt_onnx}", f"bert={bert_onnx}"]
    with in_thread.on_a_port_with(monkeypatch, specs, queue=64) as (base, server):
        asyncio.run(all_of(base, 1000))
        gc.collect()
        before = psutil.Process().memory_info().rss
        asyncio.run(all_of(base, 9000))
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 30e6
        assert all(model.count("waiting") == 0 for model in server.models)
    assert {200, 400, 404} <= statuses
