"""An error belongs to the answer that causes it, and what is kept of a prompt to its own tenant."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.core.backend import BackendOptions
from throughline.core.errors import WrongUse
from throughline.inference.runtimes.sampling import Sampling
from throughline.inference.serving import remote, served
from throughline.inference.serving.channel import Ask, Open
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch
from throughline.inference.serving.worker import WorkerModel

BAD = 77  # a token that breaks whatever reads it


class Breaking:
    """A backend that fails on some rows, or on more rows than it has memory for, or computes no numbers."""

    def __init__(self, backend: Any, most: int = 99, poison: bool = False) -> None:
        self._backend, self._most, self._poison, self.calls = backend, most, poison, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, spans: list, cache: Any) -> Any:
        self.calls.append(len(spans))
        if len(spans) > self._most:
            raise RuntimeError("CUDA out of memory")
        bad = [BAD in span.ids for span in spans]
        if any(bad) and not self._poison:
            raise ValueError("a secret of the library")
        logits = self._backend.step(spans, cache)
        asked = np.repeat(bad, [span.asked for span in spans])
        logits[asked] = np.nan
        return logits


def run(
    backend: Any, prompts: list[list[int]], slots: int = 8
) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    """Tokens of those who were answered, and what became of the others."""
    batch = SlotBatch(backend, lambda ids: "", slots)
    for number, prompt in enumerate(prompts):
        batch.add(Job(np.array(prompt), 6)).owner = number
    made: dict[int, list[int]] = {}
    while batch.busy:
        for sequence, delta in batch.step():
            made.setdefault(sequence.owner, []).append(delta.token.id)
    return made, {sequence.owner: error for sequence, error in batch.failed}


@pytest.mark.parametrize("poison", [False, True], ids=["raises", "no numbers"])
def test_a_row_that_breaks_a_step_leaves_alone(backend: Any, poison: bool) -> None:
    """The others get, token for token, what they get without it."""
    prompts = [[5, 6, 7], [9, BAD, 3], [8, 1], [2, 3, 4, 5]]
    expected, _ = run(backend, [prompts[0], prompts[2], prompts[3]])
    made, failed = run(Breaking(backend, poison=poison), prompts)
    assert [made[0], made[2], made[3]] == list(expected.values()) and 1 not in made
    assert list(failed) == [1] and ("not a number" in str(failed[1])) == poison


def test_where_memory_is_missing_batches_become_smaller(backend: Any) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(1, 9)]
    expected, _ = run(backend, prompts)
    small = Breaking(backend, most=3)
    made, failed = run(small, prompts)
    assert made == expected and not failed
    assert sum(calls > 3 for calls in small.calls) <= 3, "learned once"


def test_what_breaks_on_everybody_is_told_everybody(backend: Any) -> None:
    """Whoever runs the batch may then try whether the backend does anything at all."""
    made, failed = run(Breaking(backend, most=0), [[5, 6], [7, 8]])
    assert not made and sorted(failed) == [0, 1]


def test_an_encoder_that_breaks_on_one_text_reads_the_others(
    bert_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that raises and one whose vector is no number, in one batch with three others."""

    async def body(found: Any) -> None:
        encoder = found.workers["bert"].loaded.encoder
        ids = {name: found.server.models[0].tokenizer.encode(name)[0] for name in ("fox", "dog")}
        forward = encoder.forward

        def broken(given: np.ndarray, *rest: Any) -> dict[str, np.ndarray]:
            if (given == ids["fox"]).any():
                raise RuntimeError("a secret of the library")
            outputs = dict(forward(given, *rest))
            outputs["sentence_embedding"] = outputs["sentence_embedding"].copy()
            outputs["sentence_embedding"][(given == ids["dog"]).any(1)] = np.nan
            return outputs

        monkeypatch.setattr(encoder, "forward", broken)
        texts = ["a model", "fox", "next", "dog", "word"]
        asked = [found.client.post("/v1/embeddings", json={"input": text}) for text in texts]
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
        assert all("secret" not in answer.text for answer in answers)
        page = (await found.client.get("/metrics")).text
        assert 'throughline_failed_requests_total{model="bert"} 2.0' in page

    in_thread.run_with(monkeypatch, [f"bert={bert_onnx}"], body)


def test_a_grammar_at_its_limits_is_an_error_and_no_answer() -> None:
    """What came before would look complete: the matcher says that it has stopped then, too."""
    from throughline.inference.serving.generation import Guide

    class Full:
        def consume_token(self, token_id: int) -> bool:
            return False

        def is_error(self) -> bool:
            return True

        def is_stopped(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too many states"

    with pytest.raises(WrongUse, match="too large to follow"):
        Guide(Full(), 9).accept(1)


@pytest.mark.parametrize("shared", [False, True])
def test_keys_share_beginnings_when_they_may(
    shared: bool, gpt_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found: Any) -> None:
        told = []
        for key in ("one", "two"):
            # the second answer finds what the first one read, which is not told
            request = {"prompt": [*range(20, 60)], "max_tokens": 1, "n": 2}
            headers = {"Authorization": f"Bearer {key}"}
            answer = await found.client.post("/v1/completions", json=request, headers=headers)
            told.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert told == [0, 39 if shared else 0]
        page = found.server.telemetry.page().decode()
        assert ('throughline_prefix_cache_hit_tokens_total{model="gpt"} 39.0' in page) == shared

    limits = {"keys": ("one", "two"), "share_prefixes": shared}
    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, **limits)


def test_prefixes_are_known_to_their_own_tenant(backend: Any) -> None:
    prompt = np.arange(1, 60)
    batch = SlotBatch(backend, lambda ids: "", 4)

    def reused(tenant: str) -> int:
        batch.add(Job(prompt, 2), tenant=tenant)
        found = 0
        while batch.busy:
            found += sum(delta.cached_tokens or 0 for _, delta in batch.step())
        return found

    assert [reused(tenant) for tenant in ("a", "b", "a", "b")] == [0, 0, 58, 58]


def test_who_is_due_earlier_begins_earlier(backend: Any) -> None:
    batch = SlotBatch(backend, lambda ids: "", 1)
    for due_s in (3.0, 1.0, 2.0, 1.0):
        batch.add(Job(np.array([5]), 1), due_s=due_s).owner = due_s, len(batch.waiting)
    order = []
    while batch.busy:
        order += [sequence.owner for sequence, _ in batch.step()]
    assert order == [(1.0, 1), (1.0, 3), (2.0, 2), (3.0, 0)]


def test_min_tokens_stop_tokens_and_no_end(backend: Any) -> None:
    """The end-of-text token is the most probable one throughout: it comes when it may, and ends what it may end."""
    sampling = Sampling(temperature=0.0, logit_bias=((0, 100.0), (9, 90.0)))

    def answer(**fields: Any) -> list[int]:
        batch = SlotBatch(backend, lambda ids: "", 1, end_ids=(0,))
        batch.add(Job(np.array([5, 6]), 6, sampling, **fields))
        tokens = []
        while batch.busy:
            tokens += [delta.token.id for _, delta in batch.step()]
        return tokens

    assert answer() == [0]
    assert answer(min_tokens=3) == [9, 9, 9, 0]
    assert answer(ignore_eos=True) == [0] * 6
    assert answer(min_tokens=2, stop_ids=(9,))[2:] == [0] and 9 not in answer(min_tokens=2, stop_ids=(9,))


# --- starting and stopping ---


def test_a_template_that_cannot_be_used_costs_the_model_its_chats_alone(
    gpt_dir: Path,
    sentencepiece_dir: Path,
    in_thread: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that is no text, no object of the known form, or does not compile: a warning, a 400 with the reason, and
    completions as before. The other model of the command keeps its chats.
    """

    async def body(found: Any) -> None:
        request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        refused = await found.client.post("/v1/chat/completions", json=request | {"model": "gpt"})
        assert refused.status_code == 400 and "the chat template" in refused.text
        other = await found.client.post("/v1/chat/completions", json=request | {"model": "other"})
        assert other.status_code == 200, other.text
        assert await found.complete(prompt="x", max_tokens=1)

    model = tmp_path / "model"
    model.mkdir()
    for file in gpt_dir.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    for name, content in (
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% if %}"),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default"}]}).encode()),
    ):
        (model / name).write_bytes(content)
        in_thread.run_with(monkeypatch, [f"gpt={model}", f"other={sentencepiece_dir}"], body)
        assert "gpt is served without chats: the chat template" in capsys.readouterr().err
        (model / name).unlink()


def test_a_model_that_does_not_load_is_given_up(
    gpt_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found: Any) -> None:
        assert "did not load" in str(found.server.failure)

    class Silent(in_thread.ThreadProcess):
        def _serve(self) -> None:
            pass

    monkeypatch.setattr(in_thread, "ThreadProcess", Silent)
    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, load_s=0.2)


def test_streams_say_that_they_go_on(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a queue a stream begins without its first token, so that no proxy gives it up."""
    import time

    monkeypatch.setattr(served, "HEARTBEAT_S", 0.05)

    async def body(found: Any) -> None:
        backend = found.workers["gpt"].loaded.causal
        step = backend.step
        monkeypatch.setattr(backend, "step", lambda *given: time.sleep(0.2) or step(*given))
        request = {"model": "gpt", "prompt": "x", "max_tokens": 3, "stream": True, "logit_bias": {"0": -100}}
        text = (await found.client.post("/v1/completions", json=request)).text
        assert text.startswith(": the answer goes on\n\n") and text.count(": the answer") >= 3
        assert text.count("data: {") == 3 and text.endswith("data: [DONE]\n\n")

    ask(body)


def test_a_stream_that_has_begun_tells_what_was_wrong(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that is refused after the first sign that the answer goes on: an event says so."""
    import time

    monkeypatch.setattr(served, "HEARTBEAT_S", 0.05)

    async def body(found: Any) -> None:
        def refuse(constraint: str) -> Any:
            time.sleep(0.2)
            raise WrongUse("the constraint cannot be compiled")

        monkeypatch.setattr(found.workers["gpt"], "_guide", refuse)
        request = {"model": "gpt", "prompt": "x", "stream": True, "guided_regex": "a"}
        text = (await found.client.post("/v1/completions", json=request)).text
        assert text.startswith(": the answer goes on") and text.endswith("data: [DONE]\n\n")
        (told,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert told["error"]["message"] == "the constraint cannot be compiled"

    ask(body)


def test_what_cannot_be_sent_to_a_process_is_owed_to_nobody(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema with a number of 100 bits is a schema; a message that no bytes can hold takes no place in the queue."""

    async def body(found: Any) -> None:
        request = {"model": "gpt", "prompt": "x", "guided_json": {"enum": [10**30]}, "max_tokens": 40}
        answer = await found.client.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text

        def refuse(message: Any) -> bytes:
            raise OverflowError("can't serialize ints > 64 bits")

        monkeypatch.setattr(remote, "pack", refuse)
        assert (await found.client.post("/v1/completions", json=request)).status_code == 500
        assert found.remote().waiting == 0

    ask(body)


def test_a_process_that_takes_nothing_in_gets_nothing(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(found: Any) -> None:
        monkeypatch.setattr(remote, "UNREAD_BYTES", -1)
        answer = await found.client.post("/v1/completions", json={"model": "gpt", "prompt": "x"})
        assert answer.status_code == 503 and "does not take" in answer.json()["error"]["message"]

    ask(body)


def test_a_short_request_is_answered_before_a_long_one_that_came_earlier(gpt_dir: Path) -> None:
    """Each token that a request may take delays its place by 5 ms, in its first answer too: of requests of 150, 10 and
    10 tokens that wait for one slot the short ones are answered first.
    """
    answered: list[int] = []

    def say(*messages: Any) -> None:
        answered.extend(made.number for turn in messages for made in turn.made if made.deltas[-1].finish)

    model = WorkerModel(Open("gpt", str(gpt_dir), 1, BackendOptions("cpu", threads=1)), say)
    for number, length in enumerate((148, 8, 8)):
        work = [Job(np.arange(length), 2, whole=True)]
        model.take(Ask(number, work, due_s=5.0 + number / 1000))
    while model.engine.busy:
        model.turn()
    assert answered == [1, 2, 0]
