"""Job files for `throughline launch --emit`, from `templates/`: complete, commented, printed and never submitted."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import WrongUse
from ...core.files import from_template

TEMPLATES = Path(__file__).with_name("templates")
# of each kind: its template, and the shell words for a machine's number and for the first machine's name
KINDS = {
    "torchrun": ("torchrun.sh", '"$NODE_RANK"', '"$FIRST_MACHINE"'),
    "slurm": ("slurm.sh", '"$SLURM_NODEID"', '"$FIRST_MACHINE"'),
    "kubernetes": ("kubernetes.yaml", "$JOB_COMPLETION_INDEX", "{name}-0.{name}"),  # pod 0 has a fixed name
}
PORT = 29500
DRAIN_SECONDS = 90  # of a server: answers of 60 s, and before them a balancer looks elsewhere
GRACE_SECONDS = 300  # between the signal to stop and the kill: time to save
# each start has a store of its own: torch 2.13's restarts read addresses of dead processes from one that outlives them
ENVIRONMENT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@dataclass
class Job:
    """What a job file is written for; its name becomes one that Kubernetes takes."""

    arguments: Sequence[str]  # of throughline
    processes: int
    per_machine: int
    name: str
    run_dir: str | None  # of a run, which saves when it is asked to stop
    describe: str  # the layout in words
    restarts: int = 3
    gpus: bool = True  # one for each process, else one core

    def __post_init__(self) -> None:
        """Raises WrongUse when the processes are no whole number of machines."""
        self.per_machine = min(self.per_machine, self.processes)
        if self.processes % self.per_machine:
            what = f"{self.processes} processes do not fill machines of {self.per_machine}"
            raise WrongUse(what, where="--per-machine", fix=f"a divisor of {self.processes}")
        # what Kubernetes takes as the name of a Service, with room for the number of a pod in its 63 characters
        name = re.sub("[^a-z0-9]+", "-", self.name.lower())[:50].strip("-")
        self.name = name if name[:1].isalpha() else f"run-{name}".strip("-")

    @property
    def machines(self) -> int:
        return self.processes // self.per_machine

    def command(self, rank: str, first: str) -> str:
        """What each machine runs; `rank` and `first` are shell words for its number and the first one's name."""
        arguments = shlex.join(self.arguments)
        if self.machines == 1:
            return f"throughline launch --nproc {self.processes} --restarts {self.restarts} -- {arguments}"
        return (
            f"torchrun --nnodes={self.machines} --nproc-per-node={self.per_machine} --node-rank={rank} "
            f"--rdzv-backend=c10d --rdzv-endpoint={first}:{PORT} --rdzv-id={self.name} "
            f"--max-restarts={self.restarts} --shutdown-timeout={GRACE_SECONDS} "
            f"--module throughline.cli.main {arguments}"
        )


def job_file(kind: str, job: Job, image: str) -> str:
    """The file of that kind; `image` is the container of a Kubernetes job."""
    file, rank, first = KINDS[kind]
    command = job.command(rank, first.format(name=job.name))
    facts = vars(job) | {
        "machines": job.machines,
        "last": job.machines - 1,
        "several": job.machines > 1,
        "environment": ENVIRONMENT,
        "command": command,
        "quoted": shlex.quote(f"exec {command}"),
        "grace": GRACE_SECONDS,
        "events": shlex.quote(f"{job.run_dir}/events.jsonl"),
        "verb": job.arguments[0],
        "image": json.dumps(image),
    }
    return from_template(TEMPLATES / file, facts)


def service_file(arguments: Sequence[str], name: str, image: str, gpu: bool, tls: bool) -> str:
    """What runs `throughline serve` on Kubernetes: Service, Deployment, autoscaler, disruption budget. Prometheus gets
    the metrics without a key: the annotations by which it finds a pod cannot hold one.
    """
    job = Job(arguments, 1, 1, f"serve-{name}", None, "", gpus=gpu)
    words = [*arguments, *([] if "--open-metrics" in arguments else ["--open-metrics"])]
    facts = vars(job) | {"image": json.dumps(image), "arguments": json.dumps(words)}
    facts |= {"grace": DRAIN_SECONDS, "scheme": "HTTPS" if tls else "HTTP"}
    return from_template(TEMPLATES / "serve.yaml", facts)


def array_file(arguments: Sequence[str], elements: int, cores: int, name: str) -> str:
    """What runs `throughline ARGUMENTS` as a SLURM job array, each element with so many cores."""
    share = f'--workers "$SLURM_CPUS_PER_TASK" --task-index "$SLURM_ARRAY_TASK_ID" --task-count {elements}'
    name = re.sub(r"[^\w.-]+", "-", name)  # a directive ends at a space
    facts = {
        "name": name,
        "elements": elements,
        "cores": cores,
        "command": f"{shlex.join(arguments)} {share}",
    }
    return from_template(TEMPLATES / "array.sh", facts)
