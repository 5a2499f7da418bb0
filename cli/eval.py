"""`throughline eval PATH`: zero-shot and few-shot scores of anything that predicts tokens."""

from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange

from ..core import console
from .common import PATH, device_option, dtype_option, flag, is_given, option, throughline_command

# To an option those that mean nothing without it.
BELONGS = {
    "url": "model tokenizer clients",
    "against": "bound",
    "apply_chat_template": "fewshot_as_multiturn",
}


@click.command()
@click.argument("path", type=click.Path(), required=False)
@option(
    "--tasks",
    None,
    "Names of tasks or groups, or task files, separated by commas; see --list. Repeatable.",
    multiple=True,
)
@flag("--list listing", "List the tasks and the files they look for.")
@option(
    "--data-dir",
    PATH,
    "Directory that holds the tasks' files. Neither the shipped samples nor the network are then used.",
)
@option("--limit", IntRange(1), "Maximum number of records per task (default: all).")
@option(
    "--shots --num-fewshot shots",
    IntRange(0),
    "Number of solved examples before each question (default: as the task says, mostly 0).",
)
@option("--seed", int, "Seed of the draw of the solved examples (default: 0; of --draw harness 1234).")
@option(
    "--draw",
    Choice(["own", "harness"]),
    "Which solved examples: drawn by record, independent of all else, or those that lm-evaluation-harness draws.",
    "own",
)
@flag(
    "--apply-chat-template",
    "Put every question into the model's own chat template: the description as the system's turn, the question as the "
    "user's, the answer as the model's.",
)
@option(
    "--fewshot-as-multiturn/--no-fewshot-as-multiturn fewshot_as_multiturn",
    None,
    "With --apply-chat-template: solved examples are turns of their own, or one text with the question.",
    True,
)
@option(
    "--harness-task harness_tasks",
    PATH,
    "Path of a task or group file (YAML) of lm-evaluation-harness, read as it is. Repeatable.",
    multiple=True,
)
@flag(
    "--task-code",
    "Run the Python functions that a --harness-task names, which lie beside it. They can do all that you can.",
)
@flag(
    "--run-programs",
    "Run the programs that the model writes for HumanEval and MBPP, each in a process with limits.",
)
@option(
    "--url", None, "Address of a server of OpenAI's completions, whose model is scored in the place of PATH."
)
@option("--model", None, "With --url: name of the model (default: the first one that the server lists).")
@option("--tokenizer", PATH, "With --url: the model's tokenizer, a directory or a tokenizer.json.")
@option("--clients", IntRange(1), "With --url: number of requests at once.", 8)
@device_option
@dtype_option
@option(
    "--bos/--no-bos --add-bos/--no-add-bos bos",
    None,
    "Put the BOS token before every text (default: as the tokenizer's file says).",
    None,
)
@option(
    "--window --max-length window",
    IntRange(2),
    "Maximum number of tokens in an input (default: the model's context).",
)
@option("--batch-tokens", IntRange(1), "Number of tokens in a batch. It bounds memory and changes no score.")
@option(
    "--pll",
    Choice(["within_word_l2r", "original"]),
    "For a BERT at PATH: which tokens of a word are masked while one of them is scored.",
    "within_word_l2r",
)
@option(
    "--overlong",
    Choice(["truncate", "error", "skip"]),
    "What to do with a record whose context is longer than the model's: cut it on its left and count it, "
    "stop with an error, or leave it out and count it.",
    "truncate",
)
@flag("--all-checkpoints", "Evaluate every checkpoint of the run and plot the scores against the steps.")
@option(
    "--against",
    click.Path(),
    "Path of another form of the same model, scored too. Token probabilities that differ by more than "
    "--bound are an error.",
)
@option(
    "--bound",
    FloatRange(0),
    "With --against: largest difference of a token's log-probability that is accepted, in nats.",
    1e-3,
)
@option(
    "--contamination",
    click.Path(),
    "Path of a token store. Scores are reported with and without the records found in it.",
)
@option(
    "--embeddings",
    PATH,
    "Folder in MTEB's form, on which the embeddings of the model at PATH are scored instead: test.jsonl of sentence1, "
    "sentence2 and score, or train.jsonl and test.jsonl of text and label.",
)
@option("--out", PATH, "Directory of the scores (default: PATH.scores).")
@flag("--fresh", "Ask again what has stored answers of this model, and replace them by the new ones.")
@throughline_command
def command(
    path: str | None, tasks: tuple[str, ...], listing: bool, embeddings: Path | None, **given: Any
) -> None:
    """Score a run (its latest checkpoint), a checkpoint, a model directory or an ONNX artifact.

    \b
    Example:  throughline eval runs/gpt --tasks lambada_openai,blimp --limit 200
    For a run, its validation figures are printed first. The same command continues a stopped evaluation.
    """
    from ..eval.session import Request, evaluate_checkpoints, evaluate_one
    from ..eval.task import task_listing

    if listing:
        console.result(*task_listing())
        return
    all_checkpoints = given.pop("all_checkpoints")
    if path is None and given["url"] is None:
        raise click.UsageError("give the PATH of a model, --url or --list")
    if embeddings is not None:
        from ..core.backend import BackendOptions
        from ..eval.search import of_embeddings

        others = any(map(is_given, {*given, "all_checkpoints"} - {"device", "dtype"}))
        if tasks or path is None or others:
            text = "the place of --tasks, for the model at PATH: beside it are --device and --dtype alone"
            raise click.UsageError(f"--embeddings takes {text}")
        found = of_embeddings(path, embeddings, BackendOptions(given["device"], given["dtype"]))
        console.result(found, console.table(tuple(found), [tuple(found.values())]))
        return
    for of, names in BELONGS.items():
        for name in names.split():
            if is_given(name) and not given[of]:
                raise click.UsageError(f"--{name} belongs to --{of}".replace("_", "-"))
    if given["url"] is not None:
        if path or all_checkpoints:
            raise click.UsageError("--url takes the place of PATH, and a server has no checkpoints")
        if is_given("pll"):
            raise click.UsageError("--pll is for a BERT, and a server of completions has a GPT")
        if not given["against"] and (is_given("device") or is_given("dtype")):
            raise click.UsageError("with --url the server decides --device and --dtype")
    request = Request(Path(path or given["model"] or "endpoint"), ",".join(tasks), **given)
    scored = evaluate_checkpoints(request) if all_checkpoints else evaluate_one(request)
    if scored is not None:
        console.result(*scored)
