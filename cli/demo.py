"""`throughline demo`: the whole road on the shipped sample, each stage as the command a user would type."""

import json
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.artifact import is_artifact, read_manifest
from ..core.errors import Failed, WrongUse
from ..core.files import sha256_file, walk_files
from .common import PATH, option, throughline_command

PACKAGE = __package__.rsplit(".", 1)[0]
PROMPT = "ROMEO:\nO"


@click.command()
@option("--out", PATH, "Directory in which everything is written.", "runs/demo")
@option(
    "--text",
    click.Path(exists=True, path_type=Path),
    "Path of a text to use instead of the shipped Shakespeare.",
)
@throughline_command
def command(out: Path, text: Path | None) -> None:
    """Text to served endpoint: tokenizers, tokens, a small GPT and a small BERT, scores, ONNX, one question
    to each.

    It takes minutes on two CPU cores. What an interrupted demo has finished is kept.

    \b
    Example:  throughline demo --out runs/demo
    """
    start = time.monotonic()
    samples = Path(str(resources.files(PACKAGE).joinpath("recipes", "samples")))
    text = text or samples / "tinyshakespeare" / "input.txt"
    stages = road(out, text)
    check_text(out, text)
    seconds = {made: run_stage(words, out / made) for made, words in stages}
    answers = ask(out)
    lines = summary(out, seconds, answers, time.monotonic() - start)
    console.result({"seconds": seconds, "answers": answers, "total_seconds": time.monotonic() - start}, lines)


def road(out: Path, text: Path) -> list[tuple[str, list[str]]]:
    """(directory made below `out`, words of the command) of every stage, in order."""
    stages: list[tuple[str, list[str]]] = []
    plans: tuple[tuple[str, list[str], list[str], str], ...] = (
        ("gpt", ["--type", "bpe", "--vocab-size", "1024"], [], "lambada_openai,blimp_transitive"),
        ("bert", ["--type", "wordpiece", "--vocab-size", "2048"], ["--sentences"], "blimp_transitive"),
    )
    for family, vocabulary, sentences, tasks in plans:
        tokenizer, tokens, run, scores, onnx = (
            str(out / f"{family}-{name}") for name in ("tokenizer", "tokens", "run", "scores", "onnx")
        )
        commands = {
            "tokenizer": ["data", "tokenizer", str(text), *vocabulary, "--out", tokenizer],
            "tokens": ["data", "tokenize", str(text), "--tokenizer", tokenizer, *sentences, "--out", tokens],
            "run": ["train", f"{family}-shakespeare", "--set", f"data.train={tokens}", "--run-dir", run],
            "scores/scores": ["eval", run, "--tasks", tasks, "--limit", "100", "--out", scores],
            "onnx": ["export", run, "--to", "onnx", "--out", onnx],
        }
        stages += [(f"{family}-{made}", words) for made, words in commands.items()]
    return stages


def check_text(out: Path, text: Path) -> None:
    """Refuse a directory whose kept stages were made from another text: their figures are not this one's."""
    made = out / "gpt-tokenizer"
    if not is_artifact(made):
        return
    here = {sha256_file(file) for file in ([text] if text.is_file() else walk_files(text))}
    others = [item.path for item in read_manifest(made).inputs if item.hash and item.hash not in here]
    if others:
        why, fix = f"{made} was made from {others[0]}", "choose another --out, or remove that directory"
        raise WrongUse("the demo there is of another text", where=out, why=why, fix=fix)


def run_stage(words: list[str], made: Path) -> float | None:
    """Run one command and return its seconds; None when its output is already there."""
    shown = "throughline " + shlex.join(words)
    if is_artifact(made):
        console.say(f"\n$ {shown}\n  have {made}")
        return None
    console.say(f"\n$ {shown}")
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"{PACKAGE}.cli.main", *words], stdout=sys.stderr)
    if done.returncode:
        why = f"exit code {done.returncode}; its message is above"
        raise Failed("a stage of the demo failed", where=shown, why=why)
    return time.monotonic() - start


def ask(out: Path) -> dict[str, Any]:
    """Serve both models and ask each one question over HTTP."""
    words = ["serve", f"gpt={out / 'gpt-onnx'}", f"bert={out / 'bert-onnx'}", "--port", "0"]
    console.say(f"\n$ throughline {shlex.join(words)}")
    server = subprocess.Popen(
        [sys.executable, "-m", f"{PACKAGE}.cli.main", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        url = _address(server)
        start = time.monotonic()
        body = {"model": "gpt", "prompt": PROMPT, "max_tokens": 60, "seed": 2, "temperature": 0.7}
        gpt = _post(f"{url}v1/completions", body)
        tokens_per_second = gpt["usage"]["completion_tokens"] / (time.monotonic() - start)
        bert = _post(f"{url}v1/fill-mask", {"model": "bert", "input": "my lord, the [MASK] is here."})
    finally:
        server.send_signal(signal.SIGINT)  # without the seconds for load balancers
        server.communicate(timeout=30)
    completion = gpt["choices"][0]["text"]
    return {"completion": completion, "tokens_per_second": tokens_per_second, "fill_mask": bert}


def _address(server: subprocess.Popen) -> str:
    """The address the server prints when it is ready to answer."""
    assert server.stderr is not None
    for line in server.stderr:
        console.say(line.rstrip())
        if " at http" in line:
            return line.split(" at ")[1].strip()
    raise Failed("the server did not start", why=f"exit code {server.wait()}; its message is above")


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.loads(answer.read())


def summary(out: Path, seconds: dict[str, float | None], answers: dict[str, Any], total: float) -> list[str]:
    """What was made, how good and how fast, and what to type next."""
    rows = []
    for family in ("gpt", "bert"):
        names = ("tokenizer", "tokens", "run", "scores/scores", "onnx")
        facts = {name.split("/")[0]: read_manifest(out / f"{family}-{name}").facts for name in names}
        tokens = facts["tokens"]
        good = {
            "tokenizer": f"{facts['tokenizer']['vocab_size']:,} entries",
            "tokens": f"{tokens['tokens']:,} tokens of {tokens['text_bytes'] / tokens['tokens']:.2f} bytes",
            "run": _trained(facts["run"]),
            "scores": _scored(facts["scores"]["scores"]),
            "onnx": "equals torch to {parity_max_abs:.0e} (bound {parity_bound:.0e})".format(**facts["onnx"]),
        }
        rate = {"run": f"{facts['run']['tokens_per_s']:,.0f} tokens/s"}
        for name, text in good.items():
            spent = next(value for made, value in seconds.items() if made.split("/")[0] == f"{family}-{name}")
            time_text = "kept" if spent is None else console.duration(spent)
            rows.append((f"{family}-{name}", text, time_text, rate.get(name, "")))
    place = shlex.quote(str(out))
    words = ", ".join(choice["text"] for choice in answers["fill_mask"]["data"][0]["candidates"][:3])
    gpt = (PROMPT + answers["completion"]).splitlines()
    return [
        "",
        *console.table(("made in " + str(out), "how good", "took", "how fast"), rows),
        "",
        f"asked over HTTP ({answers['tokens_per_second']:.0f} tokens/s):",
        "  GPT   " + " / ".join(line for line in gpt if line)[:110],
        f"  BERT  my lord, the [MASK] is here.  ->  {words}",
        "",
        f"done in {console.duration(total)}. Next:",
        f"  throughline serve gpt={place}/gpt-onnx bert={place}/bert-onnx      # then open http://127.0.0.1:8000/",
        f"  throughline generate {place}/gpt-onnx --prompt 'JULIET:'",
        f"  throughline show {place}/gpt-onnx                            # what it was made from, back to the text",
        "  throughline demo --text your.txt --out runs/mine                # the same road on your own text",
    ]


def _trained(facts: dict[str, Any]) -> str:
    validation = facts["validation"]
    if "perplexity" in validation:
        return f"validation perplexity {validation['perplexity']:.1f}, {validation['bits_per_byte']:.2f} bits per byte"
    nsp = validation.get("nsp_accuracy", 0)
    return f"validation MLM accuracy {validation['mlm_accuracy']:.1%}, NSP accuracy {nsp:.1%}"


def _scored(scores: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{task} {next(iter(metrics.values())):.2f}" for task, metrics in scores.items())
