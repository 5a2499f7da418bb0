"""Job files for `throughline launch --emit`: complete, commented, printed and never submitted.

One machine runs `throughline launch`; several run torchrun, whose agents meet on the first one.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import WrongUse

PORT = 29500
GRACE_SECONDS = 300  # between the signal to stop and the kill: time to save
# torch 2.13's restarts read the addresses of dead processes from a store that outlives them, unless each
# start has its own
ENVIRONMENT = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@dataclass(frozen=True)
class Job:
    """What a job file is written for."""

    arguments: Sequence[str]  # of throughline
    processes: int
    per_machine: int
    name: str
    run_dir: str | None  # of a run, which saves when it is asked to stop
    describe: str  # the layout in words
    restarts: int = 3
    gpus: bool = True  # one for each process, else one core

    @property
    def machines(self) -> int:
        return self.processes // self.per_machine

    @property
    def later(self) -> str:
        """What becomes of a job whose time is over."""
        return "a longer run continues after each requeue" if self.run_dir else "submitted again it continues"

    def torchrun(self, rank: str, first: str) -> str:
        """The command on each machine; `rank` and `first` are shell words for its number and the first
        machine's name.
        """
        words = [
            "torchrun",
            f"--nnodes={self.machines}",
            f"--nproc-per-node={self.per_machine}",
            f"--node-rank={rank}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first}:{PORT}",
            f"--rdzv-id={self.name}",
            f"--max-restarts={self.restarts}",
            f"--shutdown-timeout={GRACE_SECONDS}",
            "--module throughline.cli.main",
        ]
        return " ".join([*words, shlex.join(self.arguments)])

    def command(self, rank: str, first: str) -> str:
        """What each machine runs."""
        if self.machines == 1:
            launch = f"throughline launch --nproc {self.processes} --restarts {self.restarts}"
            return f"{launch} -- {shlex.join(self.arguments)}"
        return self.torchrun(rank, first)


def make_job(
    arguments: Sequence[str],
    processes: int,
    per_machine: int,
    name: str,
    run_dir: str | None,
    describe: str,
    restarts: int = 3,
    gpus: bool = True,
) -> Job:
    """Raises WrongUse when the processes are no whole number of machines."""
    per_machine = min(per_machine, processes)
    if processes % per_machine:
        raise WrongUse(
            f"{processes} processes do not fill machines of {per_machine}",
            where="--per-machine",
            fix=f"a divisor of {processes}",
        )
    # what Kubernetes takes as the name of a Service, with room for the number of a pod in its 63 characters
    name = re.sub("[^a-z0-9]+", "-", name.lower())[:50].strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".strip("-")
    return Job(arguments, processes, per_machine, name, run_dir, describe, restarts, gpus)


def job_file(kind: str, job: Job, image: str) -> str:
    """The file of that kind; `image` is the container of a Kubernetes job."""
    if kind == "kubernetes":
        return kubernetes_manifest(job, image)
    return slurm_script(job) if kind == "slurm" else torchrun_script(job)


def torchrun_script(job: Job) -> str:
    """A shell script to run on every machine."""
    several = f"""\
: "${{NODE_RANK:?set NODE_RANK to 0, 1, ... {job.machines - 1}, another one on each machine}}"
: "${{FIRST_MACHINE:?set FIRST_MACHINE to the name or address of the machine with NODE_RANK 0}}"
"""
    return f"""\
#!/bin/bash
# {job.describe}
# Run this on {f"each of {job.machines} machines" if job.machines > 1 else "one machine"}: {job.per_machine}
# processes there.
set -euo pipefail
{several if job.machines > 1 else ""}{ENVIRONMENT}
exec {job.command('"$NODE_RANK"', '"$FIRST_MACHINE"')}
"""


def slurm_script(job: Job) -> str:
    """A batch file for sbatch. A run goes back into the queue; of anything else the same command continues."""
    signal = f"""\
# SIGTERM to the steps {GRACE_SECONDS} s before the time is over: the run saves, and the job goes back into
# the queue
#SBATCH --signal=TERM@{GRACE_SECONDS}
"""
    begin = f"""\
events={shlex.quote(f"{job.run_dir}/events.jsonl")}
begun=$(date +%s)
"""
    # srun asks for its cores itself (Slurm 22.05), and would give all processes of a machine one
    cores = "" if job.gpus else f"--cpus-per-task={job.per_machine} "
    again = """\
# stopped by this job with everything saved: the same command continues
if [ -e "$events" ] && [ "$(stat -c %Y "$events")" -ge "$begun" ] &&
    tail -n 1 "$events" | grep -q '"event": "stopped"'; then
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
    return f"""\
#!/bin/bash
# {job.describe}
# Submit with: sbatch {job.name}.sbatch
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.machines}
#SBATCH --ntasks-per-node=1
#SBATCH --{"gpus-per-node" if job.gpus else "cpus-per-task"}={job.per_machine}
#SBATCH --time=24:00:00 # what your partition allows; {job.later}
{signal if job.run_dir else ""}#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
{ENVIRONMENT}
{begin if job.run_dir else ""}FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FIRST_MACHINE
srun --kill-on-bad-exit=1 {cores}bash -c {shlex.quote("exec " + job.command('"$SLURM_NODEID"', '"$FIRST_MACHINE"'))}
code=$?
{again if job.run_dir else ""}exit "$code"
"""


def kubernetes_manifest(job: Job, image: str) -> str:
    """A Service and an indexed Job: pod i is machine i, and pod 0 is found under a fixed name."""
    first = f"{job.name}-0.{job.name}"
    lines = [ENVIRONMENT, f"exec {job.command('$JOB_COMPLETION_INDEX', first)}"]
    script = textwrap.indent("\n".join(lines), " " * 14)
    return f"""\
# {job.describe}
# Create with: kubectl apply -f {job.name}.yaml
apiVersion: v1
kind: Service # names the pods for one another
metadata:
  name: {job.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true # they meet before any of them is ready
  selector:
    job-name: {job.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completionMode: Indexed
  completions: {job.machines}
  parallelism: {job.machines}
  backoffLimit: 10 # pods that failed, over the whole job
  template:
    metadata:
      labels:
        job-name: {job.name}
    spec:
      subdomain: {job.name}
      restartPolicy: OnFailure # what was stopped goes on where it was
      terminationGracePeriodSeconds: {GRACE_SECONDS}
      containers:
        - name: {job.arguments[0]}
          image: {json.dumps(image)}
          command:
            - bash
            - -c
            - |
{script}
          resources:
            limits:
              {"nvidia.com/gpu" if job.gpus else "cpu"}: {job.per_machine}
          volumeMounts:
            - name: work # recipe, tokens and runs; every pod must see the same files
              mountPath: /work
            - name: shm # NCCL between the GPUs of a machine
              mountPath: /dev/shm
          workingDir: /work
      volumes:
        - name: work
          persistentVolumeClaim:
            claimName: {job.name} # a claim that exists, ReadWriteMany with several machines
        - name: shm
          emptyDir:
            medium: Memory
"""
