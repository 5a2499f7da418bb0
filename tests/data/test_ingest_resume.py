"""A tokenisation that is killed, shared, hindered or changed: the same command then gives the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from throughline.core.artifact import verify_artifact
from throughline.core.errors import Failed, Refused, Stopped, WrongUse
from throughline.data.ingest import tasks as tasks_module
from throughline.data.ingest import tokenize as tokenize_module
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.tokenize import Work
from throughline.data.ingest.tokenize import tokenize as tokenize_text

BLOCKS = ReadOptions("block")  # as the stage's own commands read
tokenize = partial(tokenize_text, options=BLOCKS)


class Killed(BaseException):
    """Stands for a kill that nothing can catch."""


PHASES = {
    "before the shard is opened": ("ShardWriter.__init__", 2),
    "while tokens are written": ("ShardWriter.write", 3),
    "before the index": ("write_index", 1),
    "between the two renames": ("os.replace", 4),
    "before the record": ("write_atomic", 1),
    "before the manifest": ("seal", 1),
    "before the last rename": ("os.rename", 1),
    "while clearing up": ("shutil.rmtree", 1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_in_every_phase_then_continue(stage: Any, plain: Path, tmp_path: Path, phase: str) -> None:
    """kill -9 (os.kill from inside) at each step of a task and of the end; the same command then gives the
    same bytes.
    """
    target, count = PHASES[phase]
    module = "tokenize" if target in ("seal", "shutil.rmtree") else "tasks"
    code = f"""
import os, signal, sys, throughline.data.ingest.{module} as module
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.tokenize import Work, tokenize
owner, name = module, {target!r}
while "." in name:
    first, name = name.split(".", 1)
    owner = getattr(owner, first)
real, left = getattr(owner, name), [{count}]
def planted(*args, **kwargs):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(owner, name, planted)
tokenize([{str(stage.place / "corpus")!r}], {str(stage.place / "bpe")!r}, {str(tmp_path / "out")!r}, shard_bytes=20_000,
         options=ReadOptions("block"))
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stage.run(tmp_path / "out", shard_bytes=20_000)
    assert stage.files_hash(tmp_path / "out") == stage.files_hash(plain)
    verify_artifact(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_what_is_committed_is_not_done_again(
    stage: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    real = tasks_module.ShardWriter.commit

    def commit(self):
        if len(written) == 5:
            raise Killed
        written.append(self._name)
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Killed):
        stage.run(tmp_path / "out", shard_bytes=20_000)
    monkeypatch.setattr(
        tasks_module.ShardWriter, "commit", lambda self: written.append(self._name) or real(self)
    )
    stage.run(tmp_path / "out", shard_bytes=20_000)
    assert len(written) == len(set(written)) and stage.files_hash(tmp_path / "out") == stage.files_hash(plain)


def test_two_builders_at_once(stage: Any, plain: Path, tmp_path: Path) -> None:
    builders = [
        subprocess.Popen(stage.command(tmp_path / "out"), stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for builder in builders:
        _, said = builder.communicate(timeout=500)
        assert builder.returncode == 0, said
    assert stage.files_hash(tmp_path / "out") == stage.files_hash(plain)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_another_builder_completes_before_the_first_look(
    stage: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", tokenize_module.write_plan

    def late(folder, plan) -> None:
        monkeypatch.setattr(tokenize_module, "write_plan", real)
        stage.run(out, shard_bytes=20_000)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(tokenize_module, "write_plan", late)
    assert tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, shard_bytes=20_000) is not None
    assert stage.files_hash(out) == stage.files_hash(plain) and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("left", [False, True])
def test_another_builder_completes_first(
    stage: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """The store appears, and the directory of work goes, between this builder's last task and its look at the
    records.
    """
    out, real = tmp_path / "out", tokenize_module._run

    def late(*args) -> None:
        monkeypatch.setattr(tokenize_module, "_run", real)
        stage.run(out, shard_bytes=20_000)
        if left:  # this one was writing while the other removed
            (tmp_path / "out.partial").mkdir()
            (tmp_path / "out.partial" / ".00003.bin.host.1.tmp").touch()

    monkeypatch.setattr(tokenize_module, "_run", late)
    assert tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, shard_bytes=20_000) is not None
    assert stage.files_hash(out) == stage.files_hash(plain) and os.listdir(tmp_path) == ["out"]


def test_sigterm_exits_75_and_the_same_command_continues(stage: Any, plain: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(stage.command(tmp_path / "out"), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out.partial/0*.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=500)
    if process.returncode != 0:  # it may have been done before the signal came
        assert process.returncode == 75 and "run the same command again" in said, said
    assert subprocess.run(stage.command(tmp_path / "out"), capture_output=True).returncode == 0
    assert stage.files_hash(tmp_path / "out") == stage.files_hash(plain)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_keeps_the_committed_shards(
    number: signal.Signals, stage: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost terminal is as good a stop as a scheduler's: the same call goes on after the shards that are done."""
    out, real = tmp_path / "out", tokenize_module.run_task
    done = []

    def stopping(*arguments: Any) -> None:
        real(*arguments)
        done.append(1)
        if len(done) == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(tokenize_module, "run_task", stopping)
    how = {"shard_bytes": 20_000, "work": tokenize_module.Work(workers=1)}
    with pytest.raises(Stopped, match=f"stopped by {number.name}"):
        tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, **how)
    assert len(list(tmp_path.glob("out.partial/0*.json"))) == 2
    assert tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, **how) is not None
    assert stage.files_hash(out) == stage.files_hash(plain)


def test_full_disk_keeps_committed_shards(stage: Any, plain: Path, tmp_path: Path) -> None:
    """A file-size limit stops the writing for real (EFBIG); without it the same command completes the store."""
    sized = [*stage.command(tmp_path / "out"), "--shard-bytes", "60000"]
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); {sized[2]}"
    process = subprocess.run([sized[0], "-c", limited, *sized[3:]], capture_output=True, text=True)
    assert (
        process.returncode == 1 and "file-size limit" in process.stderr and "Traceback" not in process.stderr
    )
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.partial/.*.tmp"))
    assert subprocess.run(sized, capture_output=True).returncode == 0
    assert stage.tokens_hash(tmp_path / "out") == stage.tokens_hash(plain)


def test_other_settings_do_not_continue_a_build(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed tokenizer, shard size or input is refused by name; --overwrite starts again."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("some text here\n\n" * 2000)
    real = tasks_module.ShardWriter.commit
    calls = []

    def commit(self):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Killed):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=9000)
    monkeypatch.undo()
    with pytest.raises(Refused, match="the tokenizer has changed"):
        tokenize([str(corpus)], stage.place / "wp", tmp_path / "out", append_eos=None, shard_bytes=9000)
    with pytest.raises(Refused, match="shard_bytes was 9000"):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=8000)
    (corpus / "b.txt").write_text("other text\n\n" * 2000)
    with pytest.raises(Refused, match=r"b\.txt has changed"):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=9000)
    (corpus / "b.txt").unlink()
    with pytest.raises(Refused, match=r"b\.txt is gone"):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=9000)
    assert (
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=9000, overwrite=True)
        is not None
    )
    with pytest.raises(WrongUse, match="already exists"):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=8000)


def test_an_input_that_goes_or_grows_while_it_is_read(
    stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text("some text here\n\n" * 2000)
    real = tasks_module.ShardWriter.commit

    def commit(self):
        (corpus / "b.txt").unlink(missing_ok=True)
        return real(self)

    monkeypatch.setattr(tasks_module.ShardWriter, "commit", commit)
    with pytest.raises(Failed, match=r"cannot open an input(.|\n)*b\.txt"):
        tokenize([str(corpus)], stage.place / "bpe", tmp_path / "out", shard_bytes=20_000)


def test_job_array_completes_whoever_is_last(stage: Any, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "array"
    common = {"shard_bytes": 20_000}
    for index in (2, 0):
        assert (
            tokenize(
                [str(stage.place / "corpus")], stage.place / "bpe", out, work=Work(share=(index, 3)), **common
            )
            is None
        )
        assert not out.exists()
    assert (
        tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, work=Work(share=(1, 3)), **common)
        is not None
    )
    assert stage.files_hash(out) == stage.files_hash(plain)
    # and once more by anyone: it is complete, nothing is done
    assert (
        tokenize([str(stage.place / "corpus")], stage.place / "bpe", out, work=Work(share=(0, 3)), **common)
        is not None
    )


def test_the_same_text_at_another_place_is_complete_and_other_text_is_not(stage: Any, tmp_path: Path) -> None:
    shutil.copytree(stage.place / "corpus", tmp_path / "corpus")
    before = tokenize([str(stage.place / "corpus")], stage.place / "bpe", tmp_path / "out")
    made = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    for file in (tmp_path / "corpus").iterdir():
        os.utime(file)
    again = tokenize([str(tmp_path / "corpus")], stage.place / "bpe", tmp_path / "out")
    assert again == before and (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == made
    with pytest.raises(WrongUse, match="already exists"):
        tokenize([str(tmp_path / "corpus")], stage.place / "bpe", tmp_path / "out", sentences=True)
    changed = (tmp_path / "corpus" / "a.txt").read_text().replace("cat", "cow", 1)
    (tmp_path / "corpus" / "a.txt").write_text(changed)
    with pytest.raises(WrongUse, match="already exists"):
        tokenize([str(tmp_path / "corpus")], stage.place / "bpe", tmp_path / "out")
