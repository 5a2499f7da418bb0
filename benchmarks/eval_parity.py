"""Every record of every task once, scored by us and by lm-evaluation-harness: accuracies and log-likelihoods
side by side.

    python benchmarks/eval_parity.py SHARED [--minutes 10 --models DIR] [--only TASK ...] [--out
    benchmarks/results/eval-parity.json]

Two GPT-2s (4 layers of 128, a vocabulary of 4,096 and 512 positions): one with random weights, one trained on
novels for 600 steps; and a Llama of these sizes with random weights, for 34 of the harness's task files by records of
their form that hold ARC's sentences. The harness runs its own task files (through tests/eval/harness.py) with its
`hf` model in float32. All tasks whose data lie below SHARED: 27 with the paradigms of BLiMP. A task that stands in the
JSON file is not scored again, so that the hour this takes may be spent in pieces: after `--minutes` no
further task is begun, and `--models` keeps the models for the next piece. WikiText is compared per document.

The exit code is 1 when a task is missing or differs: an accuracy or a written answer at all, another metric by 1e-4
of itself, a log-likelihood by more than 1e-3 nats (a document's sum of thousands of tokens, which the harness adds in
float32, by more than 1e-6 of itself).
"""

import argparse
import bz2
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from common import existing, machine_facts, versions

from eval import beside_tests, measure, score

HERE = Path(__file__).parent
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 4096, "n_positions": 512}
STEPS = {"random": 0, "trained": 600, "llama": 0}
FORMS = "llama"  # the model that is asked the harness's files
LONG = {"n_positions": 4096, "llama": True}  # their answers may have 2,048 tokens
FORM_RECORDS = 16  # of each such file
NOVELS, CHARACTERS = 12, 400_000  # text of the tokenizer and of the training: the first of so many novels
BOUND_NATS, BOUND_RELATIVE = 1e-3, 1e-6
BATCH = 16  # of the harness


def make_model(folder: Path, shared: Path, weights: str) -> Path:
    """The model of this name, unless it is there: the same bits each time with one thread."""
    if (folder / "tokenizer_config.json").exists():
        return folder
    import torch

    torch.set_num_threads(1)
    novels = sorted((shared / "data" / "novels").glob("*.bz2"))[:NOVELS]
    texts = [bz2.decompress(novel.read_bytes()).decode()[:CHARACTERS] for novel in novels]
    shape = SHAPE | (LONG if weights == FORMS else {})
    return beside_tests("small").small_model(folder, "".join(texts), steps=STEPS[weights], **shape)


def asked(shared: Path) -> dict[str, dict[str, list[Any]]]:
    """weights -> task -> its records: all of the tasks whose data lie there; for the Llama the harness's files
    by records that are made of ARC's sentences.
    """
    records = beside_tests("hub").records(shared, None)
    sentences = [row["question"] for row in records["arc_challenge"]]
    made = beside_tests("harness_records")
    forms = {name: made.told(name, FORM_RECORDS, sentences) for name in made.FILES}
    return {weights: forms if weights == FORMS else records for weights in STEPS}


def compared(task: str, rows: list[Any], model: Path, folder: Path) -> dict[str, Any]:
    """One task by both, each in a process of its own; a file of the harness, whose records are few, in this one."""
    one = score if task.endswith(".yaml") else measure
    (folder / f"{task.replace('/', '_')}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours, theirs = (one(side, task, model, folder, BATCH) for side in ("ours", "theirs"))
    if task.startswith("wikitext"):  # a document's windows against its sum
        ours["answers"] = [[sum(windows)] for windows in ours["answers"]]
    both = [
        pair
        for mine, peer in zip(ours["answers"], theirs["answers"], strict=True)
        for pair in zip(mine, peer, strict=True)
    ]
    metrics = {
        name: [value, theirs["metrics"][name]]
        for name, value in ours["metrics"].items()
        if name in theirs["metrics"]
    }
    spent = [round(ours["cpu_s"], 2), round(theirs["cpu_s"], 2)]
    return {"records": len(rows)} | judged(task, both, metrics) | {"cpu_s_ours_theirs": spent}


def judged(task: str, both: list[tuple[Any, Any]], metrics: dict[str, list[float]]) -> dict[str, Any]:
    """Whether the log-likelihoods (ours, theirs) are near enough, or all written answers the same, and the scores."""
    if isinstance(both[0][0], str):
        same = sum(a == b for a, b in both)
        equal = bool(metrics) and all(a == b for a, b in metrics.values())
        found = {"written": len(both), "written_alike": same, "metrics_ours_theirs": metrics}
        return found | {"accuracies_equal": equal, "equal": equal and same == len(both)}
    worst = max(abs(a - b) for a, b in both)
    largest = max(abs(b) for _, b in both)
    near = BOUND_RELATIVE * largest if task.startswith("wikitext") else BOUND_NATS
    counted = {name: pair for name, pair in metrics.items() if name.startswith("acc") and "mc2" not in task}
    equal = all(a == b for a, b in counted.values())
    equal &= all(math.isclose(a, b, rel_tol=1e-4) for a, b in metrics.values())
    return {
        "loglikelihoods": len(both),
        "metrics_ours_theirs": metrics,
        "accuracies_equal": equal,
        "largest_difference_nats": worst,
        "largest_loglikelihood_nats": largest,
        "equal": equal and worst <= near,
    }


def open_points(line: dict[str, Any], tasks: Mapping[str, Collection[str]]) -> tuple[list[str], list[str]]:
    """(weights and task that were not scored, those in which the two differ)."""
    left = [
        f"{name} {task}"
        for name, listed in tasks.items()
        for task in listed
        if task not in line["models"].get(name, {})
    ]
    scored = line["models"].items()
    return left, [f"{name} {task}" for name, found in scored for task in found if not found[task]["equal"]]


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("shared", type=existing, nargs="?", default=os.environ.get("THROUGHLINE_SHARED"))
    options.add_argument("--out", type=Path, default=HERE / "results" / "eval-parity.json")
    options.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no task after so many minutes"
    )
    options.add_argument("--models", type=Path, help="directory that keeps the models")
    options.add_argument("--only", nargs="+", help="only these tasks")
    options.add_argument("--weights", choices=STEPS, nargs="+", default=list(STEPS), help="only these models")
    given = options.parse_args()
    if given.shared is None:
        options.error("give the directory that holds data/")
    shared = Path(given.shared)
    end = time.monotonic() + 60 * given.minutes
    rows = asked(shared)
    line: dict[str, Any] = {
        "proof": "eval_parity",
        "claims": [],
        "shape": SHAPE,
        "steps": STEPS,
        "sha256": {},
        "models": {},
    }
    if given.out.exists():
        line = json.loads(given.out.read_text())["eval_parity"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for weights in given.weights:
            done = line["models"].setdefault(weights, {})
            missing = [task for task in rows[weights] if task not in done and task in (given.only or [task])]
            if not missing or time.monotonic() > end:
                continue
            model = make_model((given.models or folder) / weights, shared, weights)
            mark = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
            if line["sha256"].setdefault(weights, mark) != mark:
                raise SystemExit(
                    f"the {weights} weights are not those that {given.out} was begun with: remove it to begin again"
                )
            for task in missing:
                if time.monotonic() > end:
                    break
                done[task] = compared(task, rows[weights][task], model, folder)
                print(f"{weights} {task}: {done[task]}", file=sys.stderr, flush=True)
                line |= {
                    "machine": machine_facts(),
                    "versions": versions(("lm_eval", "transformers", "tokenizers")),
                }
                line |= {"date": time.strftime("%Y-%m-%d")}
                given.out.write_text(json.dumps({"eval_parity": line}, indent=1, sort_keys=True) + "\n")
    left, differ = open_points(line, rows)
    print(f"left: {', '.join(left) or 'nothing'}; different: {', '.join(differ) or 'nothing'}")
    return 1 if left or differ else 0


if __name__ == "__main__":
    sys.exit(main())
