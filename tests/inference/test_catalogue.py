"""Models that come, go and are replaced while requests run: runs that are followed, models loaded by name, several
processes of one name.
"""

import asyncio
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from throughline.core.artifact import create_artifact
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.inference.serving import catalogue, worker
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.calls import Server
from throughline.inference.serving.catalogue import Catalogue, Source
from throughline.inference.serving.served import ServedModel

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


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


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
    from conftest import gpt_tokenizer, opinionated, write_model
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


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "", ".", "nothing"])
def test_a_path_outside_the_directory_of_models_is_not_loaded(path: str, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "elsewhere").mkdir()
    models = Catalogue([], directory=tmp_path / "shelf")
    with pytest.raises(WrongUse, match=r"models are not loaded from there|no such model"):
        asyncio.run(models.load("gpt", path))


def test_another_content_of_a_path_is_another_version(tmp_path: Path) -> None:
    """Of every kind of path: a file in place and renamed over, a link, a directory, a run."""
    file, link, directory, run = (tmp_path / name for name in ("a.gguf", "link", "directory", "run"))
    file.write_text("one")
    link.symlink_to(file)
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    sources = [Source("name", path) for path in (file, link, directory)]
    versions = [source.version() for source in sources]
    assert [source.version() for source in sources] == versions
    assert [version.place for version in versions] == [file, file, directory]
    (tmp_path / "next").write_text("two")
    os.replace(tmp_path / "next", file)
    (directory / "model.safetensors").write_text("weights")
    changed = [source.version() for source in sources]
    assert all(old != new for old, new in zip(versions, changed, strict=True))
    other = tmp_path / "b.gguf"
    shutil.copy2(file, other)
    link.unlink()
    link.symlink_to(other)
    assert sources[1].version() != changed[1] and sources[1].version().place == other
    run.mkdir()
    (run / "recipe.toml").touch()
    training = Source("name", run)
    assert training.version() is None, "it has begun and saved nothing"
    write_checkpoint(run, "step-00000001")
    (run / "checkpoints" / "latest").write_text("step-00000001\n")
    assert training.version().place == run / "checkpoints" / "step-00000001"
    (run / "checkpoints" / "latest").write_text("step-00000009")
    with pytest.raises(Refused, match="is not there"):
        training.version()


# --- models that cannot be read or opened; they are stand-ins of no processes ---


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model opens unless its directory holds a file called `broken`."""

    async def start(self: ServedModel, place: Path | None = None) -> None:
        path = place or Path(self.remotes[0].path)
        if (path / "broken").exists():
            raise Failed("the weights are damaged", where=path)
        self.tokenizer = SimpleNamespace(mask_id=None)
        self.facts = {"context": 8, "outputs": ["sentence_embedding"], "family": "bert"}
        self.remotes[0].path = str(path)
        for remote in self.remotes:
            remote.ready = True

    monkeypatch.setattr(ServedModel, "start", start)
    monkeypatch.setattr(ServedModel, "endpoints", ["/v1/embeddings"])
    monkeypatch.setattr(catalogue, "LOOK_S", 0.005)


def write_checkpoint(run: Path, name: str, *files: str) -> None:
    with create_artifact(run / "checkpoints" / name, "checkpoint") as draft:
        for file in ("weights", *files):
            (draft.path / file).write_text(name)


def test_a_pointer_that_cannot_be_read_is_read_again_and_a_broken_checkpoint_when_it_changes(
    stand_ins: None, tmp_path: Path
) -> None:
    """What is served stays meanwhile; the log, a counter, /ready and /v1/models say why."""
    from throughline.inference.serving.server import build_app

    run, latest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "latest"
    write_checkpoint(run, "step-00000001")
    latest.write_text("step-00000001")

    async def main() -> None:
        import httpx

        telemetry = Telemetry()
        server = Server(Catalogue([f"gpt={run}"], watch=True), ServerLimits(), telemetry)
        app = build_app(server)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        async with app.router.lifespan_context(app), client:
            models = server.catalogue

            def served() -> str:
                return Path(models.find("gpt").remotes[0].path).name

            await until(lambda: models.find("gpt").ready)
            latest.write_bytes(b"\xff\xfe")
            await until(lambda: "gpt" in models.watch_errors)
            state = (await client.get("/ready")).json()
            assert state["ready"] and state["watch_errors"] == ["gpt"], "no place: it needs no key"
            assert "cannot be read" in (await client.get("/v1/models")).json()["data"][0]["watch_error"]
            assert models.totals["gpt"].watch_failures > 0
            assert 'throughline_watch_failures_total{model="gpt"}' in telemetry.page().decode()
            write_checkpoint(run, "step-00000002", "broken")
            latest.write_text("step-00000002")
            await until(lambda: "damaged" in models.watch_errors.get("gpt", ""))
            assert served() == "step-00000001"
            shutil.rmtree(run / "checkpoints" / "step-00000002")
            write_checkpoint(run, "step-00000002")
            await until(lambda: served() == "step-00000002")
            assert not models.watch_errors and (await client.get("/ready")).json()["watch_errors"] == []

    asyncio.run(main())


def test_a_model_that_cannot_be_opened_does_not_end_the_others(stand_ins: None, tmp_path: Path) -> None:
    """Its requests get 503 with the reason; it is loaded when it has been mended."""
    from throughline.inference.serving.server import build_app

    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "bad" / "broken").touch()

    async def main() -> None:
        import httpx

        specs = [str(tmp_path / name) for name in ("good", "bad")]
        server = Server(Catalogue(specs, directory=tmp_path), ServerLimits(), Telemetry())
        app = build_app(server)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        async with app.router.lifespan_context(app), client:
            await until(lambda: server.models[1].failure)
            ready = await client.get("/ready")
            assert ready.status_code == 200 and ready.json()["failed"] == {"bad": "the weights are damaged"}
            answer = await client.post("/v1/embeddings", json={"model": "bad", "input": "a"})
            assert (
                answer.status_code == 503 and "the weights are damaged" in answer.json()["error"]["message"]
            )
            listed = {model["id"]: model["status"] for model in server.catalogue.describe()}
            assert listed["good"]["value"] == "loaded" and listed["bad"]["value"] == "failed"
            assert server.failure is None
            (tmp_path / "bad" / "broken").unlink()
            assert (await client.post("/models/load", json={"model": "bad"})).status_code == 200
            assert (await client.get("/ready")).json()["failed"] == {}

    asyncio.run(main())


def test_a_run_that_is_replaced_before_its_first_checkpoint_is_never_served(
    stand_ins: None, tmp_path: Path
) -> None:
    """No process of it is left when the checkpoint comes after all."""
    run, other = tmp_path / "run", tmp_path / "other"
    for directory in (run, other):
        directory.mkdir()
    (run / "recipe.toml").touch()

    async def main() -> None:
        models = Catalogue([f"gpt={run}"], watch=True, directory=tmp_path)
        replaced = models.models[0]
        starting = asyncio.create_task(models.start())
        await models.load("gpt", "other")
        write_checkpoint(run, "step-00000001")
        (run / "checkpoints" / "latest").write_text("step-00000001")
        await starting
        assert models.find("gpt").ready and not replaced.ready
        await models.close()

    asyncio.run(main())


def test_when_no_model_can_be_opened_the_server_ends_with_the_first_error(
    stand_ins: None, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "broken").touch()

    async def main() -> None:
        specs = [str(tmp_path / name) for name in ("one", "two")]
        server = Server(Catalogue(specs), ServerLimits(), Telemetry())
        await server.start()
        assert server.failure is not None and server.failure.what == "the weights are damaged"

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


def test_a_model_is_named_with_its_devices(gpt_onnx: Path, tmp_path: Path) -> None:
    known = gpt_onnx.name
    for spec, name, devices in [
        (f"{gpt_onnx}", known, ()),
        (f"{gpt_onnx}@cuda:1", known, ("cuda:1",)),
        (f"a={gpt_onnx}@cuda:0,cuda:1", "a", ("cuda:0", "cuda:1")),
        (f"a={gpt_onnx}@cuda,cpu", "a", ("cuda", "cpu")),
    ]:
        assert Source.of(spec) == Source(name, gpt_onnx, devices)
    odd = tmp_path / "a=b@cpu"
    odd.mkdir()
    assert Source.of(str(odd)) == Source("a=b@cpu", odd)
    with pytest.raises(WrongUse, match="no such model"):
        Source.of(f"a={gpt_onnx}@cuda:x")
