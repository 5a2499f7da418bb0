"""Run every benchmark and keep their JSON lines: python benchmarks/run_all.py [--only NAME] [--nanogpt PATH]
[--shared PATH].

Results go to benchmarks/results/<machine>.json, one entry a benchmark; an entry is replaced when its
benchmark has run.
"""

import json
import os
import re
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

from common import LEFT_OUT, machine_facts, parser
from throughline.core.console import duration, table

HERE = Path(__file__).parent
# benchmark -> the options it needs beyond --quick; {nanogpt} is a checkout, {shared} the shared data
# directory
BENCHMARKS: dict[str, list[str]] = {
    "tokenization": [
        "--text",
        "{shared}/data/novels",
        "--multilingual",
        "{shared}/data/multilingual",
        "{shared}/data/squad",
    ],
    "data_order": [],
    "train_gpt": ["--nanogpt", "{nanogpt}"],
    "eval": ["{shared}"],
    "layouts": [],
    "long_attention": [],
    "latency": [],
    "documents": [],
    "optimizers": [],
    "bert_pretrain": [],
    "bert_toy": [],
    "search": [],
    "serve": [],
    "checkpoints": [],
    "faults": [],
    "prove_layouts": [],
    "prove_compression": [],
    "prove_scale": [],
    "prove_study": ["measure"],
}
# fewer repetitions or parts of the long ones, so that all together end within the hour; named with --only, they
# are measured in full
IN_AN_HOUR: dict[str, list[str]] = {
    "tokenization": ["--pairs", "2"],
    "train_gpt": ["--pairs", "1", "--seeds", "1"],
    "eval": ["--pairs", "1", "--parts", "7m", "--records", "100"],
    "layouts": ["--pairs", "0", "--parts", "ddp2-bf16,fsdp2-bf16,tp2-bf16,pp2-bf16"],
    "latency": ["--pairs", "7"],
    "bert_pretrain": ["--parts", "bert-128,bert-512,bert-full-rows"],
    "serve": ["--pairs", "1"],
    "faults": ["--kills", "6"],
}
MINUTES, MINUTES_QUICK = 60, 10  # that all of them may take
# those with --parts
PARTED = ("train_gpt", "tokenization", "eval", "latency", "bert_pretrain", "serve", "layouts")
# those with a make target of their own, and what trains for longer than a comparison takes: only when named, or
# with --quick
ON_REQUEST = ("bert_toy", "search", "prove_layouts", "prove_compression", "prove_scale", "prove_study")


def machine_name() -> str:
    """A file name for this machine: its first GPU, or its processor and cores."""
    facts = machine_facts()
    name = facts["gpus"][0] if facts["gpus"] else f"{facts['cpu']}-{facts['cores']}-cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def last_json_line(text: str) -> dict:
    """The JSON object on the last line that holds one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise ValueError("no JSON line in the output")


def merged(old: dict, new: dict) -> dict:
    """A benchmark measured in parts: the newer line with those claims of the older one that it does not
    measure again.
    """
    names = {claim["name"] for claim in new["claims"]}
    kept = [claim for claim in old["claims"] if claim["name"] not in names]
    return (
        old
        | new
        | {"claims": kept + new["claims"], "details": old.get("details", {}) | new.get("details", {})}
    )


def unnamed(benchmark: str, line: dict, committed: list[dict]) -> list[str]:
    """Claims of a committed result of this benchmark that the line lacks: a quick run measures the same ones, but for
    those of a peer that is not installed here, which `details` says.
    """
    known = {
        claim["name"] for results in committed for claim in results.get(benchmark, {"claims": []})["claims"]
    }
    told = {name for name, said in line.get("details", {}).items() if str(said).startswith(LEFT_OUT)}
    return sorted(known - told - {claim["name"] for claim in line["claims"]})


def run_one(task: tuple[str, list[str]]) -> tuple[str, int, str, float]:
    """(name, exit code, what it printed, seconds) of one benchmark."""
    name, command = task
    begun = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return name, done.returncode, done.stdout, time.monotonic() - begun


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument(
        "--only", action="append", choices=sorted(BENCHMARKS), help="run this one; repeatable"
    )
    options.add_argument(
        "--nanogpt", default=os.environ.get("NANOGPT", ""), help="path of a nanoGPT checkout"
    )
    options.add_argument(
        "--shared",
        default=os.environ.get("THROUGHLINE_SHARED", ""),
        help="directory with data/novels and so on",
    )
    options.add_argument(
        "--parts",
        help=f"of {', '.join(PARTED)}: measure these, keep the others of an earlier run",
    )
    options.add_argument("--results", type=Path, default=HERE / "results" / f"{machine_name()}.json")
    chosen = options.parse_args()
    committed = [json.loads(file.read_text()) for file in sorted((HERE / "results").glob("*.json"))]
    failed, lacking, spent = [], [], {}
    begun = time.monotonic()
    commands = {}
    for name, needs in BENCHMARKS.items():
        if name not in chosen.only if chosen.only else name in ON_REQUEST and not chosen.quick:
            continue
        paths = {"nanogpt": chosen.nanogpt, "shared": chosen.shared}
        missing = [path for path, given in paths.items() if not given and f"{{{path}}}" in " ".join(needs)]
        if missing:
            print(f"{name}: left out, it needs --{missing[0]} PATH", file=sys.stderr)
            continue
        command = [sys.executable, str(HERE / f"{name}.py"), *(word.format(**paths) for word in needs)]
        command += ["--parts", chosen.parts] * (name in PARTED and chosen.parts is not None)
        if not (chosen.quick or chosen.only or chosen.parts):
            command += IN_AN_HOUR.get(name, [])
        commands[name] = command + ["--quick"] * chosen.quick
    # a quick run keeps no figure, so that two may share the machine
    with ThreadPool(2 if chosen.quick else 1) as pool:
        for name, code, output, seconds in pool.imap(run_one, commands.items()):
            print(output, f"{name}: {duration(seconds)}", sep="\n", flush=True)
            spent[name] = seconds
            if code:
                failed.append(name)
                continue
            # as it is now: others may have written
            results = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
            line = last_json_line(output) | {"quick": chosen.quick, "wall_s": round(seconds)}
            in_part = "--parts" in commands[name] and name in results
            results[name] = merged(results[name], line) if in_part else line
            lacking += [f"{name}: {claim}" for claim in unnamed(name, results[name], committed)]
            chosen.results.parent.mkdir(parents=True, exist_ok=True)
            chosen.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    wall = time.monotonic() - begun
    limit = MINUTES_QUICK if chosen.quick else MINUTES
    rows = [(name, duration(seconds)) for name, seconds in spent.items()]
    rows.append((f"all (limit {limit} min)", duration(wall)))
    print("\n".join(table(("benchmark", "wall time"), rows)))
    if wall > 60 * limit:
        print(f"the benchmarks took longer than {limit} minutes", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    if lacking:
        aside = "" if chosen.quick else " (each is with --only NAME)"
        print(f"claims that were not measured{aside}: {', '.join(lacking)}", file=sys.stderr)
    return 1 if failed or (lacking and chosen.quick) else 0


if __name__ == "__main__":
    sys.exit(main())
