"""Runs of several processes from the command line: the same run as one process, stopped and gone on with."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from common import index_file
from throughline.cli.common import throughline_command
from throughline.core.artifact import create_artifact, verify_artifact
from throughline.core.errors import EXIT_FILE, Stopped
from throughline.train.logs.metrics import read_metrics
from throughline.train.parallel import launch
from throughline.train.parallel.ranks import Lost

RECIPE = """
version = 1
[data]
train = "{store}"
[model]
overrides = {{ layers = 4, width = 32, heads = 4 }}
[train]
steps = {steps}
sequence_length = 32
batch_rows = 8
compile = "off"
device = "cpu"
precision = "fp64"
eval_every_steps = 3
[schedule]
kind = "constant"
[checkpoint]
save_every_steps = 3
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "store"
    draw = np.random.default_rng(0)
    tokens = np.cumsum(draw.integers(0, 3, 6000)) % 61
    with create_artifact(path, "tokens") as draft:
        tokens.astype(np.uint16).tofile(draft.path / "00000.bin")
        index_file(draft.path / "00000.idx", np.full(60, 100), np.arange(0, 61), np.uint16)
        draft.facts |= {"vocab_size": 61, "largest_id": 60, "tokenizer": "made"}
    return path


def start(
    store: Path, directory: Path, *options: str, steps: int = 6, launched: bool = True
) -> subprocess.Popen:
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(store=store, steps=steps))
    command = [
        sys.executable,
        "-m",
        "throughline.cli.main",
        *(["launch", "--"] if launched else []),
        "train",
        str(recipe),
    ]
    overrides = [word for option in options for word in (["--set", option] if "=" in option else [option])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--run-dir", str(directory / "run"), *overrides]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, errors = process.communicate(timeout=150)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{errors}"
    return errors


def losses(directory: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(directory / "run") if "loss" in record}


def wait_for_a_checkpoint(directory: Path) -> None:
    end = time.monotonic() + 100
    while not (directory / "run" / "checkpoints" / "latest").exists():
        assert time.monotonic() < end, "no checkpoint"
        time.sleep(0.05)


def test_same_run_as_one_process_and_goes_on_in_another_layout(store: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    finish(start(store, tmp_path / "one", steps=9, launched=False))
    finish(start(store, tmp_path / "two", "parallel.tensor=2"))
    errors = finish(start(store, tmp_path / "two", "parallel.data=2", 'parallel.sharding="zero1"', steps=9))
    assert "resumed at step 6" in errors
    assert errors.count("not to the last bit: layout was") == 1
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert sorted(one) == sorted(two) == list(range(1, 10))
    assert max(abs(one[step] - two[step]) for step in one) < 1e-12
    validation = [
        [r["validation"] for r in read_metrics(tmp_path / name / "run") if "validation" in r]
        for name in ("one", "two")
    ]
    for first, second in zip(*validation, strict=True):
        assert first == pytest.approx(second, rel=1e-12)
    assert verify_artifact(tmp_path / "two" / "run").facts["step"] == 9


def test_wrong_world_and_refused_layout_say_what_is_legal(store: Path, tmp_path: Path) -> None:
    errors = finish(start(store, tmp_path, "parallel.tensor=2", launched=False), 2)
    assert "pipeline 1 x data 1 x context 1 x tensor 2 = 2" in errors
    assert "throughline launch --nproc 2" in errors
    v = ("parallel.pipeline=2", 'parallel.schedule="zero-bubble-v"', "parallel.stages_per_process=2")
    errors = finish(start(store, tmp_path, *v, 'parallel.sharding="full"'), 2)
    assert "gradients of the split backward" in errors
    assert 'sharding = "zero2"' in errors


def watched(*ends: str, file: Path) -> tuple[list[int], int]:
    """Exit codes, and which failed first, of processes that end so."""
    running = [subprocess.Popen([sys.executable, "-c", f"import time; {end}"]) for end in ends]
    try:
        return launch._watch(running, file)
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_one_that_is_done_hurries_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process hashes the whole run when the others have ended: it is not killed for it, only for a
    failure of theirs.
    """
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    file = tmp_path / "exit"
    assert watched("time.sleep(2)", "", file=file)[0] == [0, 0]
    assert watched("time.sleep(100)", "exit(3)", file=file) == ([-signal.SIGKILL, 3], 1)
    assert watched("time.sleep(1); exit(1)", "", file=file) == ([1, 0], 0)


@pytest.mark.parametrize("how", ["1 Failed", "2 WrongUse", "3 Refused"])
def test_why_a_command_failed_is_said_once(how: str, tmp_path: Path) -> None:
    """What the first process has said is final: the others, which would say it two seconds later, end at
    once.
    """
    code, file = int(how.split()[0]), tmp_path / "exit"
    begun = time.monotonic()
    assert watched(
        f"open({str(file)!r}, 'w').write({how!r}); exit({code})", "time.sleep(100)", file=file
    ) == ([code, -9], 0)
    assert time.monotonic() - begun < launch.GRACE_SECONDS


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
@pytest.mark.parametrize(
    ("end", "code"), [(KeyboardInterrupt(), 130), (Stopped("stopped by SIGTERM"), 75)], ids=["130", "75"]
)
def test_where_all_were_stopped_is_said_once(
    end: BaseException, code: int, rank: str, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first process; the others end at once and in order, with what they may have to close."""

    @click.command()
    @throughline_command
    def stop() -> None:
        raise end

    monkeypatch.setenv("RANK", rank)
    begun = time.monotonic()
    done = CliRunner().invoke(stop, ["--json"])
    assert (done.exit_code, bool(done.stderr)) == (code, speaks)
    assert (done.stdout != "") == (speaks and code == 75)
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize("launched", [True, False])
def test_a_start_that_is_lost_is_not_yet_the_answer(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json stdout has one object: that of the start that came to an end. Without a launcher there is
    no other start.
    """

    @click.command()
    @throughline_command
    def lose() -> None:
        raise Lost("the processes of the run no longer work together")

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv(EXIT_FILE, raising=False)
    if launched:
        monkeypatch.setenv(EXIT_FILE, str(tmp_path / "exit"))
    done = CliRunner().invoke(lose, ["--json"])
    assert done.exit_code == 1 and "no longer work together" in done.stderr
    assert (done.stdout == "") == launched


def test_each_start_has_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun gives it: by it a run that may only begin (`--resume never`) goes on after a fault."""
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\necho $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/starts\n"
        "test $TORCHELASTIC_RESTART_COUNT = 2 || kill -9 $$\necho 0 done > $THROUGHLINE_EXIT_FILE\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert launch.run_processes(1, ["train"], restarts=3) == 0
    assert (tmp_path / "starts").read_text().split() == ["0", "1", "2"]


def test_a_start_that_lived_long_makes_the_count_of_restarts_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One restart in a row is allowed, and three are needed: each start here counts as a steady one."""
    monkeypatch.setattr(launch, "STEADY_SECONDS", 0.0)
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\ntest $TORCHELASTIC_RESTART_COUNT = 3 || kill -9 $$\necho 0 done > $THROUGHLINE_EXIT_FILE\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert launch.run_processes(1, ["train"], restarts=1) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_is_passed_on_and_the_command_ends_with_75(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's SIGTERM and a lost terminal's SIGHUP reach the processes, which save; none starts again."""
    program = tmp_path / "program"
    trap = f"trap 'echo 75 done > $THROUGHLINE_EXIT_FILE; exit 75' {number.name.removeprefix('SIG')}"
    program.write_text(f"#!/bin/sh\n{trap}\nkill -{number.value} $PPID\nwhile true; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert launch.run_processes(1, ["train"], restarts=1) == 75


@pytest.mark.parametrize(("code", "starts", "answer"), [(2, 1, 2), (3, 1, 3), (1, 2, 1)])
def test_a_users_error_on_any_process_is_final(
    code: int, starts: int, answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user has to mend is not tried again, also when only the second process met it; a failure is."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\ntest $RANK = 1 || exec sleep 100\n"
        f"echo $TORCHELASTIC_RESTART_COUNT >> {tmp_path}/starts\nexit {code}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert launch.run_processes(2, ["train"], restarts=1) == answer
    assert len((tmp_path / "starts").read_text().split()) == starts


def test_a_dry_run_is_said_once(store: Path, tmp_path: Path) -> None:
    out, errors = start(store, tmp_path, "parallel.data=2", "--dry-run").communicate(timeout=150)
    assert out.count("parameters on cpu") == 1, errors


@pytest.mark.slow
def test_sigterm_saves_on_all_and_exits_75(store: Path, tmp_path: Path) -> None:
    process = start(store, tmp_path, "parallel.pipeline=2", "train.eval_every_steps=0", steps=1_000_000)
    wait_for_a_checkpoint(tmp_path)
    process.send_signal(signal.SIGTERM)
    errors = finish(process, 75)
    assert errors.count("stopped by SIGTERM") == 1, errors
    saved = int(re.search(r"at step ([\d,]+), saved", errors)[1].replace(",", ""))
    run = tmp_path / "run"
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{saved:08d}"
    verify_artifact(run / "checkpoints" / f"step-{saved:08d}")
    errors = finish(
        start(store, tmp_path, "parallel.pipeline=2", "train.eval_every_steps=0", steps=saved + 2)
    )
    assert f"resumed at step {saved:,}" in errors
