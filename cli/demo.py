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
PROGRAM = [sys.executable, "-m", f"{PACKAGE}.cli.main"]
PROMPT = "ROMEO:\nO"


@click.command()
@option("--out", PATH, "Directory in which everything is written.", "runs/demo")
@option(
    "--text", click.Path(exists=True, path_type=Path), "Path of a text, instead of the shipped Shakespeare."
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
    shipped = resources.files(PACKAGE).joinpath("recipes", "samples", "tinyshakespeare", "input.txt")
    text = text or Path(str(shipped))
    check_text(out, text)
    seconds = {made: run_stage(words, out / made) for made, words in road(out, text)}
    answers = ask(out)
    facts: dict[str, Any] = {"seconds": seconds, "answers": answers}
    facts["total_seconds"] = time.monotonic() - start
    console.result(facts, summary(out, **facts))


def road(out: Path, text: Path) -> list[tuple[str, list[str]]]:
    """(directory made below `out`, words of the command) of every stage, in order."""
    stages: list[tuple[str, list[str]]] = []
    for family, vocabulary, sentences, tasks in (
        ("gpt", "--type bpe --vocab-size 1024", "", "lambada_openai,blimp_transitive"),
        ("bert", "--type wordpiece --vocab-size 2048", "--sentences --documents block", "blimp_transitive"),
    ):
        at, source = shlex.quote(str(out / family)), shlex.quote(str(text))
        commands = {
            "tokenizer": f"data tokenizer {source} {vocabulary} --out {at}-tokenizer",
            "tokens": f"data tokenize {source} --tokenizer {at}-tokenizer {sentences} --out {at}-tokens",
            "run": f"train {family}-shakespeare --set data.train={at}-tokens --run-dir {at}-run",
            "scores/scores": f"eval {at}-run --tasks {tasks} --limit 100 --out {at}-scores",
            "onnx": f"export {at}-run --to onnx --out {at}-onnx",
        }
        stages += [(f"{family}-{made}", shlex.split(words)) for made, words in commands.items()]
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
    done = subprocess.run([*PROGRAM, *words], stdout=sys.stderr)
    if done.returncode:
        why = f"exit code {done.returncode}; its message is above"
        raise Failed("a stage of the demo failed", where=shown, why=why)
    return time.monotonic() - start


def ask(out: Path) -> dict[str, Any]:
    """Serve both models and ask each one question over HTTP."""
    words = ["serve", f"gpt={out / 'gpt-onnx'}", f"bert={out / 'bert-onnx'}", "--port", "0"]
    console.say(f"\n$ throughline {shlex.join(words)}")
    server = subprocess.Popen([*PROGRAM, *words], stderr=subprocess.PIPE, text=True)
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


def summary(
    out: Path, seconds: dict[str, float | None], answers: dict[str, Any], total_seconds: float
) -> list[str]:
    """What was made, how good and how fast, and what to type next."""
    rows = []
    for made, spent in seconds.items():
        facts = read_manifest(out / made).facts
        rate = f"{facts['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in facts else ""
        time_text = "kept" if spent is None else console.duration(spent)
        rows.append((made.split("/")[0], _how_good(made, facts), time_text, rate))
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
        f"done in {console.duration(total_seconds)}. Next:",
        f"  throughline serve gpt={place}/gpt-onnx bert={place}/bert-onnx      # then open http://127.0.0.1:8000/",
        f"  throughline generate {place}/gpt-onnx --prompt 'JULIET:'",
        f"  throughline show {place}/gpt-onnx                            # what it was made from, back to the text",
        "  throughline demo --text your.txt --out runs/mine                # the same road on your own text",
    ]


def _how_good(made: str, facts: dict[str, Any]) -> str:
    if made.endswith("-tokenizer"):
        return f"{facts['vocab_size']:,} entries"
    if made.endswith("-tokens"):
        return f"{facts['tokens']:,} tokens of {facts['text_bytes'] / facts['tokens']:.2f} bytes"
    if made.endswith("/scores"):
        found = facts["scores"].items()
        return ", ".join(f"{task} {next(iter(metrics.values())):.2f}" for task, metrics in found)
    if made.endswith("-onnx"):
        return f"equals torch to {facts['parity_max_abs']:.0e} (bound {facts['parity_bound']:.0e})"
    validation = facts["validation"]
    if "perplexity" in validation:
        said = "validation perplexity {perplexity:.1f}, {bits_per_byte:.2f} bits per byte"
        return said.format(**validation)
    nsp = validation.get("nsp_accuracy", 0)
    return f"validation MLM accuracy {validation['mlm_accuracy']:.1%}, NSP accuracy {nsp:.1%}"
