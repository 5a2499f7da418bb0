"""A path of a model has a version and devices; one that leads outside, cannot be read or does not open is told."""

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_thread import until
from throughline.core.artifact import create_artifact
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.inference.serving import catalogue
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.calls import Server
from throughline.inference.serving.catalogue import Catalogue, Source
from throughline.inference.serving.served import ServedModel


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "", ".", "nothing"])
def test_a_path_outside_the_directory_of_models_is_not_loaded(path: str, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "elsewhere").mkdir()
    models = Catalogue([], directory=tmp_path / "shelf")
    with pytest.raises(WrongUse, match=r"models are not loaded from there|no such model"):
        asyncio.run(models.load("gpt", path))


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


def write_checkpoint(run: Path, name: str, *files: str) -> None:
    with create_artifact(run / "checkpoints" / name, "checkpoint") as draft:
        for file in ("weights", *files):
            (draft.path / file).write_text(name)


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
