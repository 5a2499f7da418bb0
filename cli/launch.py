"""`throughline launch -- COMMAND`: the command on several processes."""

import sys
from functools import partial
from pathlib import Path

import click

from ..core import console
from .common import throughline_command

LAUNCHED = (
    "train RECIPE, finetune RECIPE, study RECIPE, eval PATH, data tokenize INPUTS..., "
    "or doctor (on this machine)"
)
ARRAY_MACHINES = 8  # of 8 processes: the 64 shards of a corpus up to 16 GiB


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--nproc",
    type=click.IntRange(1),
    help="Number of processes (default: as many as the recipe's layout needs).",
)
@click.option(
    "--emit",
    type=click.Choice(["torchrun", "slurm", "kubernetes"]),
    help="Print a job file of this kind instead of running the command.",
)
@click.option(
    "--per-machine",
    type=click.IntRange(1),
    default=8,
    help="Number of processes on each machine in the job file of --emit.",
)
@click.option(
    "--image",
    default="throughline:latest",
    help="Container image in the job file of --emit kubernetes.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=3,
    help="Maximum number of restarts in a row after a process was lost.",
)
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
              throughline launch --nproc 64 --emit slurm -- data tokenize corpus --tokenizer tok --out tokens
    A process that dies takes the others along; all start again from the last checkpoint. The exit code is the
    command's: 75 when SIGTERM stopped it with everything saved. `eval` shares its questions out, with the
    same scores. `data tokenize` becomes a job array, each machine an element of it.
    """
    from ..core.errors import WrongUse

    if arguments[:2] == ("data", "tokenize"):
        _tokenize_array(nproc or ARRAY_MACHINES * per_machine, emit, per_machine, arguments)
        return
    made = {"train": _train_job, "study": _train_job, "finetune": _finetune_job, "eval": _eval_job}.get(
        arguments[0]
    )
    if made is None and (arguments[0] != "doctor" or emit is not None):
        raise WrongUse(f"launch does not run {arguments[0]!r}", fix=f"it takes: {LAUNCHED}")
    processes, name, run_dir, about, gpus = (
        made(nproc, arguments) if made else (nproc or _devices(), "doctor", None, "", True)
    )
    if emit is None:
        from ..train.parallel.launch import run_processes

        sys.exit(run_processes(processes, arguments, restarts if made else 0))
    from ..train.parallel.jobs import Job, job_file

    job = Job(arguments, processes, per_machine, name, run_dir, about, restarts, gpus)
    text = job_file(emit, job, image)
    console.result(
        {"kind": emit, "machines": job.machines, "processes": processes, "text": text}, text.splitlines()
    )


def _devices() -> int:
    """A process for each GPU of this machine, else two."""
    from ..core.hardware import machine

    return max(len(machine().gpus), 2)


def _train_job(nproc: int | None, arguments: tuple[str, ...]) -> tuple[int, str, str | None, str, bool]:
    """(processes, name, the run's directory, the layout in words, whether on GPUs)."""
    from ..core.recipe import find_recipe, load_recipe
    from ..planner.nearest import require_world
    from ..train.recipe import Recipe, model_config, resolve
    from ..train.rules import RULES, can_be_had
    from . import study, train

    command = {"train": train, "study": study}[arguments[0]].command
    given = command.make_context(arguments[0], list(arguments[1:]), click.get_current_context()).params
    recipe = resolve(load_recipe(given["recipe"], Recipe, given["overrides"], RULES))
    layout, section = recipe.parallel.layout(), recipe.train
    rows = section.rows_per_step, section.rows_per_micro_batch
    allowed = partial(can_be_had, recipe)
    require_world(
        layout, nproc or layout.world, model_config(recipe), section.sequence_length, *rows, allowed
    )
    name = find_recipe(given["recipe"]).stem
    return (
        layout.world,
        name,
        given.get("run_dir") or f"runs/{name}",
        layout.describe(),
        section.device != "cpu",
    )


def _finetune_job(nproc: int | None, arguments: tuple[str, ...]) -> tuple[int, str, str | None, str, bool]:
    """The same of a fine-tuning, which checks the count of its processes itself, with the model."""
    from ..core.recipe import find_recipe, load_recipe
    from ..train.finetune.recipe import RULES, FinetuneRecipe
    from .finetune import command as finetune

    given = finetune.make_context("finetune", list(arguments[1:]), click.get_current_context()).params
    recipe = load_recipe(given["recipe"], FinetuneRecipe, given["overrides"], RULES)
    layout, gpus = recipe.parallel.layout(), recipe.train.device != "cpu"
    return nproc or layout.world, find_recipe(given["recipe"]).stem, None, layout.describe(), gpus


def _eval_job(nproc: int | None, arguments: tuple[str, ...]) -> tuple[int, str, str | None, str, bool]:
    """The same of an evaluation, which has no run directory: started again it asks what is not answered yet."""
    from ..core.errors import WrongUse
    from .eval import command as evaluation

    given = evaluation.make_context("eval", list(arguments[1:]), click.get_current_context()).params
    if given["path"] is None:
        raise WrongUse("nothing to evaluate", where="launch -- eval", fix="give the PATH of a model")
    processes = nproc or _devices()
    about = f"one evaluation, its questions shared by {processes} processes"
    return processes, f"eval-{Path(given['path']).name}", None, about, given["device"] != "cpu"


def _tokenize_array(processes: int, emit: str | None, per_machine: int, arguments: tuple[str, ...]) -> None:
    """Print the job array that tokenises."""
    from ..core.errors import WrongUse
    from ..data.ingest.executors import slurm_array
    from .data import tokenize

    given = tokenize.make_context("tokenize", list(arguments[2:]), click.get_current_context()).params
    if emit != "slurm":
        fix = "--emit slurm for several machines; on this one: throughline data tokenize ... --workers N"
        raise WrongUse(f"data tokenize has no {emit or 'launcher'}: it starts its processes itself", fix=fix)
    if given["task_index"] is not None or given["workers"] is not None or given["executor"] != "local":
        fix = (
            "leave out --task-index, --task-count, --workers and --executor; --nproc and --per-machine decide"
        )
        raise WrongUse("the job array divides the work itself", where="data tokenize", fix=fix)
    if given["overwrite"]:
        fix = "remove the old store, or choose another --out"
        raise WrongUse(
            "no element of a job array knows whether another has begun anew", where="--overwrite", fix=fix
        )
    elements, cores = -(-processes // per_machine), min(per_machine, processes)
    name = f"tokenize-{Path(given['out']).name}"
    text = slurm_array(arguments, elements, cores, name)
    console.result(
        {"kind": emit, "machines": elements, "processes": elements * cores, "text": text}, text.splitlines()
    )
