"""Faults against a launched run of two processes, and how long it takes until it trains again.

python benchmarks/faults.py [--quick] [--kills N] [--seed N]. Kills: a random process is killed with SIGKILL
at a random moment of its steps, or by itself at a random file operation of a save; the time runs until the
next verified checkpoint. Stall: a process is stopped with SIGSTOP. Orphans: the launcher is killed, and the
time runs until none of its processes is left. The tests use the same pieces and compare the losses.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from throughline.benchmarks.common import Claim, claim, finish, index_file, parser
from throughline.core.artifact import create_artifact, verify_artifact
from throughline.core.files import write_atomic
from throughline.core.workspace import read_records

TIMEOUT_SECONDS = 10  # of the groups: a stall is seen after it
KILL_BOUND_S, STALL_BOUND_S, ORPHAN_BOUND_S = 10.0, TIMEOUT_SECONDS + 15.0, 2.0
PATIENCE_S = 120.0  # of the driver, for a busy machine
FILE_OPERATIONS = 40  # of a process in one save, about
RECIPE = """
version = 1
[data]
train = "{store}"
[model]
overrides = {{ layers = 2, width = 32, heads = 4, dropout = 0.1 }}
[train]
steps = {steps}
sequence_length = 32
batch_rows = 8
compile = "off"
device = "cpu"
[schedule]
kind = "constant"
[parallel]
data = 2
sharding = "zero1"
timeout_seconds = {timeout}
[checkpoint]
save_every_steps = {save_every}
"""
# runs before everything else in each process: dies at the given file operation below checkpoints/ when a plan
# asks for it
SITE = """
import os, signal, sys
plan, state = os.environ["KILL_PLAN"], {"inside": False, "seen": 0}
def hook(event, arguments):
    if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") or state["inside"]:
        return
    if "/checkpoints/" not in str(arguments[0]):
        return
    state["inside"] = True
    try:
        rank, number = open(plan).read().split()
        if rank == os.environ.get("RANK"):
            state["seen"] += 1
            if state["seen"] >= int(number):
                os.unlink(plan)
                os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        state["seen"] = 0
    finally:
        state["inside"] = False
sys.addaudithook(hook)
"""


def make_store(path: Path) -> Path:
    """Some tokens to train on."""
    tokens = np.cumsum(np.random.default_rng(0).integers(0, 3, 6000)) % 61
    with create_artifact(path, "tokens") as draft:
        tokens.astype(np.uint16).tofile(draft.path / "00000.bin")
        index_file(draft.path / "00000.idx", np.full(60, 100), np.arange(0, 61), np.uint16)
        draft.facts |= {"vocab_size": 61, "largest_id": 60, "tokenizer": "made"}
    return path


@dataclass
class Kill:
    """One kill: what, the step that `latest` named then, and the seconds until a later one was verified."""

    what: str
    latest: int
    seconds: float


@dataclass
class Launched:
    """A run under `throughline launch`, in `directory`/run; what it started ends with the `with` block."""

    directory: Path
    store: Path
    steps: int = 1_000_000
    save_every: int = 5
    timeout: int = TIMEOUT_SECONDS
    kills: list[Kill] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def run(self) -> Path:
        return self.directory / "run"

    def start(self) -> "Launched":
        """Start it, or start it again."""
        self.directory.mkdir(exist_ok=True)
        (self.directory / "sitecustomize.py").write_text(SITE)
        recipe = self.directory / "recipe.toml"
        values = {
            "store": self.store,
            "steps": self.steps,
            "save_every": self.save_every,
            "timeout": self.timeout,
        }
        recipe.write_text(RECIPE.format(**values))
        command = [
            sys.executable,
            "-m",
            "throughline.cli.main",
            "launch",
            "--restarts",
            "100",
            "--",
            "train",
            str(recipe),
        ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.directory), "KILL_PLAN": str(self.plan)}
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(self.run)], env=os.environ | environment, stdout=log, stderr=log
            )
        return self

    @property
    def plan(self) -> Path:
        return self.directory / "kill-plan"

    def errors(self) -> str:
        """What the launcher and its processes wrote to stderr."""
        return (self.directory / "log").read_text()

    def workers(self) -> list[int]:
        """Process ids by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def latest(self) -> int:
        """The step that `latest` names; 0 before the first."""
        pointer = self.run / "checkpoints" / "latest"
        return int(pointer.read_text().strip().removeprefix("step-")) if pointer.exists() else 0

    def wait(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until the condition holds; the launcher must live."""
        begun = time.monotonic()
        while not condition():
            assert self.process.poll() is None, (
                f"the launcher ended with {self.process.returncode}:\n{self.errors()}"
            )
            assert time.monotonic() - begun < PATIENCE_S, f"waited in vain for {what}:\n{self.errors()}"
            time.sleep(0.005)
        return time.monotonic() - begun

    def wait_for_progress(self, beyond: int) -> float:
        """Seconds until `latest` names a step beyond that one."""
        return self.wait(lambda: self.latest() > beyond, f"a checkpoint beyond step {beyond}")

    def strike(self, draw: random.Random, in_save: bool) -> Kill:
        """Kill a random process in its steps or in a save, look at what is left, and wait until the run has
        gone on.
        """
        self.wait_for_progress(self.kills[-1].latest + self.save_every if self.kills else 0)
        rank = draw.randrange(2)
        what = f"process {rank} in a step"
        if in_save:
            number = draw.randint(1, FILE_OPERATIONS)
            what = f"process {rank} at file operation {number} of a save"
            write_atomic(self.plan, f"{rank} {number}")
            self.wait(lambda: not self.plan.exists(), "the kill in a save")
        else:
            time.sleep(draw.uniform(0, 0.1))
            os.kill(self.workers()[rank], signal.SIGKILL)
        before = self.latest()
        if before:
            verify_artifact(self.run / "checkpoints" / f"step-{before:08d}")
        seconds = self.wait_for_progress(before + self.save_every)
        self.kills.append(Kill(what, before, seconds))
        return self.kills[-1]

    def stop(self) -> int:
        """SIGTERM; the step at which everything was saved."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 75, self.errors()
        return self.latest()

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def events(self, name: str) -> list[int]:
        """The steps of the events of that name."""
        return [event["step"] for event in read_records(self.run / "events.jsonl") if event["event"] == name]


def stall(run: Launched, rank: int) -> float:
    """Stop a process; seconds until the run has gone on."""
    run.wait_for_progress(run.latest())  # of this start
    os.kill(run.workers()[rank], signal.SIGSTOP)
    begun = time.monotonic()
    count = len(run.events("resumed"))
    run.wait(lambda: len(run.events("resumed")) > count, "a new start")
    run.wait_for_progress(run.events("resumed")[-1])
    return time.monotonic() - begun


def orphans(run: Launched) -> float:
    """Kill the launcher; seconds until none of its processes is left."""
    run.wait_for_progress(run.latest())  # of this start
    left = run.workers()
    run.kill()
    begun = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() - begun < PATIENCE_S, "a process trains on without its launcher"
        time.sleep(0.005)
    return time.monotonic() - begun


def bounded(name: str, seconds: Sequence[float], bound: float) -> Claim:
    """The claim that all of these stay below a bound."""
    return claim(name, seconds, [bound] * len(seconds), peer="bound", unit="s", better="lower", goal=1.0)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    draw, rounds = random.Random(chosen.seed), 1 if chosen.quick else 3
    with tempfile.TemporaryDirectory() as directory:
        store = make_store(Path(directory) / "store")
        with Launched(Path(directory) / "kills", store).start() as run:
            for number in range(4 if chosen.quick else chosen.kills):
                kill = run.strike(draw, in_save=number % 2 == 1)
                print(f"{kill.seconds:6.2f} s  {kill.what}, latest step {kill.latest}", file=sys.stderr)
            run.stop()
            run.start()
            stalls = [stall(run, number % 2) for number in range(rounds)]
            gone = []
            for _ in range(rounds):
                gone.append(orphans(run))
                run.start()
    claims = [
        bounded("kill-restart", [kill.seconds for kill in run.kills], KILL_BOUND_S),
        bounded("stall-restart", stalls, STALL_BOUND_S),
        bounded("orphans", gone, ORPHAN_BOUND_S),
    ]
    finish("faults", claims, details={"kills": [asdict(kill) for kill in run.kills]})


if __name__ == "__main__":
    main()
