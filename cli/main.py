"""`throughline`: one command with a verb per stage, imported when it is called: `--help` takes no time."""

import importlib
import sys
from typing import Any

import click

from ..core.artifact import version
from ..core.errors import did_you_mean

# verb -> (file in cli/, one-line help); the help stands here so that listing the verbs imports nothing
VERBS = {
    "data": ("data", "Tokenizers and token stores: train, tokenise, inspect, deduplicate, export."),
    "plan": ("plan", "What fits, how long it takes and what it costs, before it is paid for."),
    "study": ("training", "Measure this machine, so that plans for it rest on measurements."),
    "train": ("training", "Pretrain a GPT or a BERT from a recipe."),
    "finetune": ("training", "Fine-tune a model on labelled records: classes, spans, embeddings, responses."),
    "eval": ("eval", "Evaluate a run, checkpoint, model directory or ONNX artifact."),
    "export": ("export", "Write a checkpoint as ONNX or as a Hugging Face directory, with a parity report."),
    "generate": ("texts", "Continue text with a GPT."),
    "embed": ("texts", "Embed texts with a BERT."),
    "search": ("texts", "Score search by words, by embeddings and by both."),
    "serve": ("serve", "Serve models over HTTP (OpenAI-compatible)."),
    "bench": ("bench", "Measure the latency of your own artifact, or load on your own server."),
    "prove": ("training", "Show on this CPU that a recipe's layout trains the same model as one process."),
    "launch": ("launch", "Run a command on several processes, or write the job file that does."),
    "demo": ("demo", "The whole road on the shipped sample: text to served endpoint in minutes."),
    "show": ("artifacts", "Print what an artifact is and what it was made from."),
    "verify": ("artifacts", "Re-hash an artifact against its manifest."),
    "report": ("artifacts", "Write a run's report.html again."),
    "compare": ("artifacts", "Compare two runs or two score files; the exit code says whether they agree."),
    "recipe": ("recipe", "List, show, check and write recipes."),
    "doctor": ("bench", "Versions, hardware and optional packages of this machine."),
}


# what people look for under other names -> the command, or the sentence, that says what there is
ELSEWHERE = {
    "throughline serve RUN, and then its page at http://127.0.0.1:8000/": "chat ui web webui api gradio server",
    "throughline generate RUN --prompt TEXT": "complete completion infer inference predict run sample ask prompt",
    "throughline export RUN --to onnx --out DIR (or --to huggingface, gguf)": "convert quantize onnx gguf save",
    "the same `throughline train` command continues a run that was stopped": "resume continue restart",
    "throughline train RECIPE": "pretrain fit pretraining",
    "throughline finetune RECIPE --init-from MODEL": "sft tune instruct lora dpo fine-tune",
    "throughline eval MODEL --tasks TASK": "evaluate score test lm-eval lm_eval perplexity ppl",
    "throughline data tokenize TEXT --tokenizer TOKENIZER --out TOKENS": "prepare preprocess encode ingest dataset",
    "throughline show PATH": "info describe cat view provenance",
    "throughline doctor": "env version versions check-env status gpu gpus",
    "throughline recipe list": "list ls recipes models presets configs",
    "throughline recipe new --model MODEL --data TOKENS --machine cpu --out my.toml": "init config create",
    "throughline embed MODEL FILE": "embeddings vectors embedding",
    "throughline report RUN": "plot dashboard tensorboard curves logs",
    "throughline bench latency MODEL": "benchmark perf profile",
    "hf download NAME --local-dir DIRECTORY, and then that directory": "download pull get fetch login",
    "throughline --help": "help man usage commands",
}
GROUPS = ("data", "recipe", "plan", "bench")


def _instead(name: str) -> str:
    """The command that does what an unknown one is for: the nearest, one of a group, or what has another name."""
    nearest = did_you_mean(name, VERBS)
    for sentence, names in ELSEWHERE.items():
        if name.lower() in names.split():
            return sentence
    for group in GROUPS:
        command = main.get_command(click.Context(main), group)
        if isinstance(command, click.Group) and name in command.commands:
            return f"throughline {group} {name}"
    return nearest or f"there are {', '.join(VERBS)}"


class Verbs(click.Group):
    """A group whose commands are imported on demand: `command` of the verb's own file, or its name in a shared one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        file = VERBS[name][0]
        module = importlib.import_module(f".{file}", __package__)
        return getattr(module, "command" if file == name else name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in VERBS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            ctx.fail(f"no such command {args[0]!r}: {_instead(args[0])}")
        return super().resolve_command(ctx, args)


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(version(), prog_name="throughline")
def main() -> None:
    """Carry a language model from raw text to a served endpoint.

    \b
    A first look, two minutes:   throughline demo
    Then, for example:           throughline train gpt-shakespeare --set data.train=my/tokens
    """


if __name__ == "__main__":
    sys.exit(main())
