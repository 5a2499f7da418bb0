"""Who runs the tasks changes no byte: an emitted job array, run for real element by element; a Ray cluster
that loses a node.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.data.ingest.tokenize import Work, tokenize
from throughline.data.new_tokenizer import train_tokenizer

SHARD = 20_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of drawn words, a tokenizer, and the store that one local process makes of them."""
    folder = tmp_path_factory.mktemp("executors")
    words = np.random.default_rng(5).choice(
        ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog"], (4000, 12)
    )
    lines = [" ".join(row) for row in words]
    (folder / "my corpus").mkdir()
    for name, part in (("a", lines[:2000]), ("b", lines[2000:])):
        records = [json.dumps({"text": line}) + "\n" for line in part]
        (folder / "my corpus" / f"{name}.jsonl").write_text("".join(records))
    train_tokenizer(lines[:100], "bpe", 300).save(folder / "tok")
    tokenize(
        [str(folder / "my corpus")],
        folder / "tok",
        folder / "plain",
        shard_bytes=SHARD,
        work=Work(backend="tokenizers"),
    )
    return folder


def files_hash(store: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in store.iterdir()
        if file.name != "manifest.json"
    }


def emit(place: Path, *options: str) -> str:
    inputs = [str(place / "my corpus"), "--tokenizer", str(place / "tok")]
    command = ["data", "tokenize", *inputs, "--out", "my tokens", "--shard-bytes", str(SHARD)]
    done = CliRunner().invoke(main, ["launch", *options, "--", *command])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with srun (runs its command here) and scontrol (writes down what it was asked)."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\n[ -z "$STOPPED" ] || exit 75\nshift\nexec "$@"\n')
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> "{tmp_path}/asked"\n')
    (tools / "throughline").write_text(f'#!/bin/bash\nexec {sys.executable} -m throughline.cli.main "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_ARRAY_JOB_ID": "7",
    }


def test_an_emitted_job_array_makes_the_same_store(
    place: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    script = emit(place, "--nproc", "3", "--per-machine", "1", "--emit", "slurm")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if tool := shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
        "shellcheck"
    ):
        subprocess.run([tool, "--severity=warning", "-"], input=script, text=True, check=True)
    assert "#SBATCH --job-name=tokenize-my-tokens\n" in script
    assert "#SBATCH --array=0-2\n" in script and "#SBATCH --cpus-per-task=1\n" in script
    out = tmp_path / "my tokens"

    def element(index: int, **more: str) -> int:
        variables = cluster | {"SLURM_ARRAY_TASK_ID": str(index)} | more
        return subprocess.run(
            ["bash"], input=script, text=True, cwd=tmp_path, env=variables, capture_output=True
        ).returncode

    assert element(1) == 0 and not out.exists()
    assert element(2, STOPPED="1") == 75, "as after SIGTERM"
    assert (tmp_path / "asked").read_text() == "requeue 7_2\n"
    assert element(0) == 0 and not out.exists()
    assert element(2) == 0
    assert files_hash(out) == files_hash(place / "plain") and len(list(out.glob("*.bin"))) > 5
    assert element(1) == 0, "once more when all is done"


def test_elements_may_run_at_once(place: Path, tmp_path: Path, cluster: dict[str, str]) -> None:
    script = emit(place, "--nproc", "2", "--per-machine", "1", "--emit", "slurm")
    each = [cluster | {"SLURM_ARRAY_TASK_ID": str(index)} for index in range(2)]
    running = [
        subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
        for env in each
    ]
    assert [process.wait(120) for process in running] == [0, 0]
    assert files_hash(tmp_path / "my tokens") == files_hash(place / "plain")


@pytest.mark.parametrize(
    ("options", "command", "words"),
    [
        (["--emit", "kubernetes"], [], "has no kubernetes"),
        ([], [], "--out o --workers "),
        (["--emit", "slurm"], ["--task-index", "1", "--task-count", "2"], "divides the work itself"),
        (["--emit", "slurm"], ["--workers", "2"], "divides the work itself"),
        (["--emit", "slurm"], ["--overwrite"], "remove the old store"),
    ],
)
def test_what_an_array_cannot_do_is_refused(options: list[str], command: list[str], words: str) -> None:
    arguments = [
        "launch",
        *options,
        "--",
        "data",
        "tokenize",
        "x",
        "--tokenizer",
        "t",
        "--out",
        "o",
        *command,
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and words in done.stderr, done.output


KILLED_ONCE = """
import os, signal

real = os.replace
def replace(source, target):
    if str(target).endswith("00003.bin"):
        try:
            os.close(os.open(os.environ["KILLED"], os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    return real(source, target)
os.replace = replace
"""


def test_a_killed_worker_is_replaced(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first worker that commits shard 3 is killed by signal 9 (planted where Python starts): its task is
    tried again.
    """
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(KILLED_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "start"))
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    work = Work(workers=2, backend="tokenizers")
    tokenize([str(place / "my corpus")], place / "tok", tmp_path / "out", shard_bytes=SHARD, work=work)
    assert (tmp_path / "killed").exists() and "died with signal 9 in task 3" in capsys.readouterr().err
    assert files_hash(tmp_path / "out") == files_hash(place / "plain")


WAITING = """
import os, time

real = os.replace
def replace(source, target):
    name = os.path.basename(str(target))
    while name.endswith(".bin") and name > "00005" and not os.path.exists(os.environ["LOST"]):
        time.sleep(0.01)
    return real(source, target)
os.replace = replace
"""

CLUSTER = """
import os, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from throughline.data.ingest.tokenize import Work, tokenize

corpus, tokenizer, out, shard = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
try:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)

    def lose():
        while len(list(Path(out + ".partial").glob("0*.json"))) < 4:
            time.sleep(0.01)
        cluster.remove_node(nodes[0], allow_graceful=False)
        Path(os.environ["LOST"]).touch()

    threading.Thread(target=lose, daemon=True).start()
    tokenize([corpus], tokenizer, out, shard_bytes=int(shard), work=Work(executor="ray", backend="tokenizers"))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_gives_the_same_bytes(place: Path, tmp_path: Path) -> None:
    """Two one-core nodes beside a head without cores; one is taken away without grace. No process is left
    behind.

    Shards from 5 on wait (planted where Python starts) until the node is gone, so that it always goes in the
    middle.
    """
    pytest.importorskip("ray", reason="ray is not installed (extra ray; it has no wheel for some Pythons)")
    assert len(list((place / "plain").glob("*.bin"))) > 8
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(WAITING)
    arguments = [str(place / "my corpus"), str(place / "tok"), str(tmp_path / "out"), str(SHARD)]
    with tempfile.TemporaryDirectory(
        prefix="ray-", ignore_cleanup_errors=True
    ) as short:  # its sockets' paths are limited
        planted = {"PYTHONPATH": str(tmp_path / "start"), "LOST": str(tmp_path / "lost")}
        variables = os.environ | planted | {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-c", CLUSTER, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=variables)
        assert done.returncode == 0, done.stderr[-3000:]
        assert (tmp_path / "lost").exists()
        assert files_hash(tmp_path / "out") == files_hash(place / "plain")
        deadline = time.monotonic() + 20
        while left := processes_naming(short):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


def processes_naming(text: str) -> list[str]:
    """Command lines of running processes that name `text`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:  # it ended meanwhile
            continue
        if text in line:
            found.append(line[:200])
    return found
