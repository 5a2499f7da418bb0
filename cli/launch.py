"""`throughline launch -- COMMAND`: the command on several processes."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import WrongUse
from ..core.hardware import machine
from ..core.recipe import find_recipe, load_recipe
from .common import option, pretraining_recipe, throughline_command, with_weights
from .main import main

LAUNCHED = (
    "train RECIPE, finetune RECIPE, study RECIPE, eval PATH, data tokenize INPUTS..., serve (for Kubernetes), "
    "or doctor (on this machine)"
)
# processes, name, the run's directory, the layout in words, whether on GPUs
Launched = tuple[int, str, str | None, str, bool]
ARRAY_MACHINES = 8  # of 8 processes: the 64 shards of a corpus up to 16 GiB


@click.command(context_settings={"ignore_unknown_options": True})
@option("--nproc", click.IntRange(1), "Number of processes (default: as many as the recipe's layout needs).")
@option(
    "--emit",
    click.Choice(["torchrun", "slurm", "kubernetes"]),
    "Print a job file of this kind instead of running the command.",
)
@option("--per-machine", click.IntRange(1), "Number of processes on a machine of --emit's job file.", 8)
@option("--image", None, "Container image in the job file of --emit kubernetes.", "throughline:latest")
@option("--restarts", click.IntRange(0), "Maximum number of restarts in a row after a process was lost.", 3)
@click.argument("arguments", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@throughline_command
def command(
    nproc: int | None,
    emit: str | None,
    per_machine: int,
    image: str,
    restarts: int,
    arguments: tuple[str, ...],
) -> None:
    """Run COMMAND (train, finetune, study, eval, data tokenize, doctor) on several processes of this machine, or
    print the job file that does.

    \b
    Example:  throughline launch --nproc 2 -- train gpt-shakespeare --set parallel.data=2
              throughline launch --nproc 2 -- eval runs/gpt --tasks blimp
              throughline launch --emit slurm -- train big.toml > big.sbatch
              throughline launch --emit kubernetes -- serve my=/models/my-onnx --host 0.0.0.0 > serve.yaml
              throughline launch --nproc 64 --emit slurm -- data tokenize corpus --tokenizer tok --out tokens
    A process that dies takes the others along; all start again from the last checkpoint. The exit code is the
    command's: 75 when SIGTERM or SIGHUP stopped it with everything saved. `eval` shares its questions out,
    with the same scores. `data tokenize` becomes a job array, each machine an element of it.
    """
    if arguments[:2] == ("data", "tokenize"):
        _tokenize_array(nproc or ARRAY_MACHINES * per_machine, emit, per_machine, arguments)
        return
    if arguments[0] == "serve":
        _serve_service(emit, image, arguments)
        return
    jobs = {"train": _train_job, "study": _train_job, "finetune": _finetune_job, "eval": _eval_job}
    made = jobs.get(arguments[0])
    if made is None and (arguments[0] != "doctor" or emit is not None):
        raise WrongUse(f"launch does not run {arguments[0]!r}", fix=f"it takes: {LAUNCHED}")
    doctors = (nproc or _devices(), "doctor", None, "", True)
    processes, name, run_dir, about, gpus = made(nproc, arguments) if made else doctors
    if emit is None:
        from ..train.parallel.launch import run_processes

        sys.exit(run_processes(processes, arguments, restarts if made else 0))
    from ..train.parallel.jobs import Job, job_file

    job = Job(arguments, processes, per_machine, name, run_dir, about, restarts, gpus)
    _print(job_file(emit, job, image), kind=emit, machines=job.machines, processes=processes)


def _print(text: str, **facts: Any) -> None:
    console.result(facts | {"text": text}, text.splitlines())


def _devices() -> int:
    return max(len(machine().gpus), 2)


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    """The command's options, checked as it checks them itself."""
    context = click.get_current_context()
    command = main.get_command(context, arguments[0])
    assert command is not None
    given = command.make_context(arguments[0], list(arguments[1:]), context).params
    if given.get("init_from"):
        given["overrides"] = with_weights(given["overrides"], given["init_from"])
    return given


def _train_job(nproc: int | None, arguments: tuple[str, ...]) -> Launched:
    from ..train.recipes.resolved import is_text, model_config
    from ..train.recipes.rules import wrong_processes

    given = _given(arguments)
    if is_text(given["recipe"]):
        text = shlex.quote(given["recipe"])
        commands = [
            f"throughline data tokenizer {text} --vocab-size 4096 --out tok",
            f"throughline data tokenize {text} --tokenizer tok --out tokens",
            "throughline launch --nproc 2 -- train gpt-15min-cpu --set data.train=tokens --set parallel.data=2",
            f"or on one process: throughline train {text}",
        ]
        raise WrongUse("launch takes a recipe, not a text", where=given["recipe"], fix="\n".join(commands))
    recipe = pretraining_recipe(given["recipe"], given["overrides"])
    layout = recipe.parallel.layout()
    if nproc and nproc != layout.world:
        raise wrong_processes(recipe, model_config(recipe), nproc)
    name = find_recipe(given["recipe"]).stem
    run_dir = given.get("run_dir") or f"runs/{name}"
    return layout.world, name, run_dir, layout.describe(), recipe.train.device != "cpu"


def _finetune_job(nproc: int | None, arguments: tuple[str, ...]) -> Launched:
    """A fine-tuning checks the count of its processes itself, with the model."""
    from ..train.finetune.recipe import RULES, FinetuneRecipe

    given = _given(arguments)
    recipe = load_recipe(given["recipe"], FinetuneRecipe, given["overrides"], RULES)
    layout, gpus = recipe.parallel.layout(), recipe.train.device != "cpu"
    return nproc or layout.world, find_recipe(given["recipe"]).stem, None, layout.describe(), gpus


def _eval_job(nproc: int | None, arguments: tuple[str, ...]) -> Launched:
    """An evaluation has no run directory: started again it asks what is not answered yet."""
    given = _given(arguments)
    if given["path"] is None:
        raise WrongUse("nothing to evaluate", where="launch -- eval", fix="give the PATH of a model")
    processes = nproc or _devices()
    about = f"one evaluation, its questions shared by {processes} processes"
    return processes, f"eval-{Path(given['path']).name}", None, about, given["device"] != "cpu"


def _serve_service(emit: str | None, image: str, arguments: tuple[str, ...]) -> None:
    from ..train.parallel.jobs import service_file

    given = _given(arguments)
    if emit != "kubernetes":
        fix = f"on this machine: throughline {shlex.join(arguments)}\non Kubernetes: --emit kubernetes"
        raise WrongUse("a server is one process, which launch does not start", where="serve", fix=fix)
    if given["host"] != "0.0.0.0" or given["port"] != 8000:  # noqa: S104 - inside a pod
        fix = "add --host 0.0.0.0 and leave --port out"
        raise WrongUse("probes reach a pod from outside, at port 8000", where="serve", fix=fix)
    name = Path(given["paths"][0].partition("=")[0]).name if given["paths"] else "models"
    text = service_file(arguments, name, image, given["device"] != "cpu", bool(given["tls_cert"]))
    _print(text, kind=emit)


def _tokenize_array(processes: int, emit: str | None, per_machine: int, arguments: tuple[str, ...]) -> None:
    from ..train.parallel.jobs import array_file
    from .data import tokenize

    given = tokenize.make_context("tokenize", list(arguments[2:]), click.get_current_context()).params
    if emit != "slurm":
        words = shlex.join(arguments)
        fix = f"for several machines: --emit slurm\non this one: throughline {words} --workers {processes}"
        raise WrongUse(f"data tokenize has no {emit or 'launcher'}: it starts its processes itself", fix=fix)
    if given["task_index"] is not None or given["workers"] is not None or given["executor"] != "local":
        fix = "leave out --task-index, --task-count, --workers, --executor; --nproc and --per-machine decide"
        raise WrongUse("the job array divides the work itself", where="data tokenize", fix=fix)
    if given["overwrite"]:
        fix = "remove the old store, or choose another --out"
        what = "no element of a job array knows whether another has begun anew"
        raise WrongUse(what, where="--overwrite", fix=fix)
    elements, cores = -(-processes // per_machine), min(per_machine, processes)
    text = array_file(arguments, elements, cores, f"tokenize-{Path(given['out']).name}")
    _print(text, kind=emit, machines=elements, processes=elements * cores)
