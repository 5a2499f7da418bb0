"""Models that come, go and are replaced while requests run: runs that are followed, models loaded by name, several
processes of one name.
"""

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from in_thread import until
from model_directories import gpt_tokenizer, opinionated, write_model
from throughline.inference.serving import catalogue, worker

ASKED = {"model": "gpt", "prompt": "The quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms at least, so that an answer of 100 tokens is in the making for a second."""
    turn = worker.CausalEngine.turn

    def slowed(engine: worker.CausalEngine) -> Any:
        time.sleep(0.01)
        return turn(engine)

    monkeypatch.setattr(worker.CausalEngine, "turn", slowed)


def save(run: Path, step: int, seed: int, tokenizer: bytes) -> None:
    """A checkpoint as training writes it, of a small GPT drawn with this seed."""
    import torch
    from throughline.models.config import GPTConfig
    from throughline.planner.layout import Layout
    from throughline.prove.proof import Case, make_trainer
    from throughline.train.checkpoints.checkpoint import CheckpointWriter
    from throughline.train.engine import Engine
    from throughline.train.parallel.mesh import Mesh

    config = GPTConfig(vocab_size=304, sequence_length=160, layers=1, width=32, heads=2)
    engine = Engine(config, Mesh(Layout(), torch.device("cpu")), "fp32", seed)
    draw = torch.Generator().manual_seed(seed)
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: 0.3 * torch.randn(shapes[name], generator=draw))
    trainer = make_trainer(Case("test", config), engine)
    trainer.step = step
    writer = CheckpointWriter(run / "checkpoints", 1, tokenizer)
    writer.save(trainer)
    writer.close()


def test_a_run_is_followed_and_no_request_is_lost(
    gpt_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: None
) -> None:
    """The server begins before the first checkpoint is there. Clients ask without a pause while a second one appears
    and the first is removed, and while a third one is damaged: everybody gets the answer of one checkpoint, an answer
    in the making that of the checkpoint that it began with.
    """
    monkeypatch.setattr(catalogue, "LOOK_S", 0.05)
    run, tokenizer = tmp_path / "run", (gpt_dir / "tokenizer.json").read_bytes()
    (run / "checkpoints").mkdir(parents=True)

    async def main() -> None:
        follow = {"watch": True}
        writing: list[Any] = [asyncio.create_task(asyncio.to_thread(save, run, 1, 1, tokenizer))]
        async with in_thread.running(monkeypatch, [f"gpt={run}"], catalogue=follow) as found:
            first, other = [await found.complete(**ASKED | {"max_tokens": size}) for size in (100, 8)]
            outcomes: list[tuple[int, list[int]]] = []
            ended = asyncio.Event()

            async def client() -> None:
                while not ended.is_set():
                    answer = await found.client.post("/v1/completions", json=ASKED)
                    outcomes.append((answer.status_code, answer.json()["choices"][0]["token_ids"]))

            clients = [asyncio.create_task(client()) for _ in range(4)]
            long = asyncio.create_task(streamed(found, 100))
            await until(lambda: found.remote().active)
            old = found.server.catalogue.find("gpt")
            await asyncio.to_thread(save, run, 2, 2, tokenizer)
            await until(lambda: found.server.catalogue.find("gpt") is not old)
            assert not long.done() and await long == ids(first)
            assert not (run / "checkpoints" / "step-00000001").exists()  # training keeps one
            after = await found.complete(**ASKED)
            assert ids(after) != ids(other)
            damaged = run / "checkpoints" / "step-00000003"
            shutil.copytree(run / "checkpoints" / "step-00000002", damaged)
            weights = damaged / "weights-00000.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"?")
            (run / "checkpoints" / "latest").write_text(damaged.name)
            await until(lambda: len(outcomes) > 100)
            ended.set()
            await asyncio.gather(*clients, *writing)
            assert {status for status, _ in outcomes} == {200}
            assert {tuple(made) for _, made in outcomes} == {tuple(ids(other)), tuple(ids(after))}
            await until(lambda: not old.remotes[0].ready)  # it has ended
            (entry,) = (await found.client.get("/v1/models")).json()["data"]
            assert entry["checkpoint"] == "step-00000002"

    asyncio.run(main())


def test_any_kind_of_model_is_replaced_and_no_request_is_lost(
    gpt_dir: Path, gpt_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: None
) -> None:
    """Clients ask without a pause while a watched link leads from one Hugging Face directory to another, while its
    files are written anew, and while /models/load puts an ONNX artifact there: each gets the answer of one of them.
    """
    from throughline.models.config import GPTConfig
    from throughline.models.init import build

    monkeypatch.setattr(catalogue, "LOOK_S", 0.02)
    shelf, link = tmp_path / "shelf", tmp_path / "current"
    shelf.mkdir()
    config = GPTConfig(vocab_size=304, sequence_length=160, layers=1, width=32, heads=4, tied=False)
    for seed in (4, 5):
        write_model(shelf / f"v{seed}", opinionated(build(config, seed)), gpt_tokenizer())
    (shelf / "artifact").symlink_to(gpt_onnx)
    link.symlink_to(gpt_dir)

    async def main() -> None:
        watching = {"watch": True, "directory": shelf}
        async with in_thread.running(monkeypatch, [f"gpt={link}"], catalogue=watching) as found:
            answers = [ids(await found.complete(**ASKED))]
            outcomes: list[tuple[int, list[int]]] = []
            ended = asyncio.Event()

            async def client() -> None:
                while not ended.is_set():
                    answer = await found.client.post("/v1/completions", json=ASKED)
                    outcomes.append((answer.status_code, answer.json()["choices"][0]["token_ids"]))

            async def replaced(act: Any) -> None:
                old = found.server.catalogue.find("gpt")
                await act()
                await until(lambda: found.server.catalogue.find("gpt") is not old)
                answers.append(ids(await found.complete(**ASKED)))

            async def switch_link() -> None:
                (tmp_path / "next").symlink_to(shelf / "v4")
                os.replace(tmp_path / "next", link)

            async def write_anew() -> None:
                shutil.copy(shelf / "v5" / "model.safetensors", shelf / "v4" / "model.safetensors")

            async def load() -> None:
                body = {"name": "gpt", "path": "artifact"}
                answer = await found.client.post("/models/load", json=body)
                assert answer.status_code == 200, answer.text

            clients = [asyncio.create_task(client()) for _ in range(3)]
            for act in (switch_link, write_anew, load):
                await replaced(act)
            ended.set()
            await asyncio.gather(*clients)
            assert {status for status, _ in outcomes} == {200}
            assert answers[0] == answers[3] and len({tuple(answer) for answer in answers}) == 3
            assert {tuple(made) for _, made in outcomes} <= {tuple(answer) for answer in answers}
            (model,) = (await found.client.get("/v1/models")).json()["data"][:1]
            assert model["id"] == "gpt" and model["backend"] == "onnxruntime" and "watch_error" not in model

    asyncio.run(main())


def ids(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


async def streamed(found: Any, max_tokens: int) -> list[int]:
    """The token ids of a stream."""
    body = ASKED | {"max_tokens": max_tokens, "stream": True}
    events = (await found.client.post("/v1/completions", json=body)).text.split("\n\n")[:-2]
    return [token for event in events for token in ids(json.loads(event.removeprefix("data: ")))]


def test_models_are_loaded_and_unloaded_by_name(
    gpt_onnx: Path,
    bert_onnx: Path,
    in_thread: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    slow: None,
) -> None:
    """By names of the directory and of the command alone; an answer in the making is given."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    os.symlink(bert_onnx, shelf / "bert")
    (shelf / "broken").mkdir()

    async def main() -> None:
        async with in_thread.running(
            monkeypatch, [f"gpt={gpt_onnx}"], catalogue={"directory": shelf}
        ) as found:

            async def post(path: str, **body: Any) -> int:
                return (await found.client.post(path, json=body)).status_code

            async def states() -> dict[str, str]:
                data = (await found.client.get("/v1/models")).json()["data"]
                return {entry["id"]: entry["status"]["value"] for entry in data}

            assert await states() == {"gpt": "loaded", "bert": "unloaded", "broken": "unloaded"}
            for name in ("..", "../shelf/bert", str(bert_onnx), "shelf/bert", "bert/", "nothing", ""):
                assert await post("/models/load", model=name) in (400, 404)
            assert await post("/v1/embeddings", model="bert", input="a") == 404
            both = await asyncio.gather(*(post("/models/load", model="bert") for _ in range(2)))
            assert sorted(both) == [200, 400]
            assert await post("/v1/embeddings", model="bert", input="a") == 200
            assert await post("/models/load", model="broken") == 400
            assert (await states())["broken"] == "unloaded"
            long = asyncio.create_task(streamed(found, 50))
            await until(lambda: found.remote().active)
            leaving = found.remote()
            assert await post("/models/unload", model="gpt") == 200
            assert await post("/models/unload", model="gpt") == 404
            assert await post("/v1/completions", **ASKED) == 404
            assert len(await long) == 50
            await until(lambda: not leaving.ready)
            assert await post("/models/load", model="gpt") == 200
            assert await post("/v1/completions", **ASKED) == 200

    asyncio.run(main())


def test_without_a_directory_nothing_is_loaded(ask: Any) -> None:
    async def body(found: Any) -> None:
        answer = await found.client.post("/models/unload", json={"model": "gpt"})
        assert answer.status_code == 404 and found.server.catalogue.find("gpt").ready

    ask(body)


def test_a_name_has_several_processes_and_the_least_busy_one_answers(
    gpt_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch, slow: None
) -> None:
    async def body(found: Any) -> None:
        one, other = found.server.catalogue.find("gpt").remotes
        long = asyncio.create_task(found.complete(**ASKED | {"max_tokens": 100}))
        await until(lambda: one.accepted + other.accepted == 1)
        busy, idle = (one, other) if one.accepted else (other, one)
        for _ in range(3):
            await found.complete(**ASKED)
        assert (busy.accepted, idle.accepted) == (1, 3)
        idle.ready = False  # it has died: the other one takes the requests of the name
        assert (await found.client.get("/ready")).status_code == 200
        await found.complete(**ASKED)
        assert busy.accepted == 2
        await long
        assert (
            'throughline_worker_restarts_total{model="gpt"} 0.0' in (await found.client.get("/metrics")).text
        )
        assert (await found.client.get("/v1/models/gpt")).json()["device"] == "cpu, cpu"

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}@cpu,cpu"], body)
