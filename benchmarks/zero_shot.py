"""The zero-shot tasks of Megatron-Turing NLG on a small model: our scores and lm-evaluation-harness's, side by side.

python benchmarks/zero_shot.py [SHARED] [--records 200] [--model DIR] [--quick]

The first records of each task whose data lie below SHARED (by default THROUGHLINE_SHARED): LAMBADA, BoolQ, PIQA,
HellaSwag and WinoGrande. RACE, ANLI, HANS and WiC have task files too and were not at hand as data; without SHARED
LAMBADA is asked, which ships. The model is a GPT-2 of 1.5 million parameters, trained here on shipped novels for 600
steps, or any Hugging Face directory by --model. The harness runs its own task files. Accuracies must be equal and
each log-likelihood within 1e-3 nats.
"""

import bz2
import json
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import claim, existing, finish, parser, throughline
from eval_parity import BOUND_NATS, SHAPE, STEPS, compared

from eval import beside_tests

SAMPLES = Path(__file__).resolve().parents[1] / "recipes" / "samples"
TASKS = ("lambada_openai", "boolq", "piqa", "hellaswag", "winogrande")
NOT_AT_HAND = ("race", "anli_r1", "anli_r2", "anli_r3", "hans", "wic")
CHARACTERS = 400_000  # of each novel


def rows_of(shared: Path | None, count: int) -> dict[str, list[dict[str, Any]]]:
    """The first records of each task that there is data for."""
    if shared is not None:
        found = beside_tests("hub").records(shared, count)
        return {task: found[task] for task in TASKS}
    with (SAMPLES / "lambada" / "lambada_test.jsonl").open() as file:
        return {"lambada_openai": [json.loads(line) for line in islice(file, count)]}


def small_model(folder: Path) -> Path:
    torch.set_num_threads(1)
    novels = sorted((SAMPLES / "novels").glob("*.bz2"))
    text = "".join(bz2.decompress(novel.read_bytes()).decode()[:CHARACTERS] for novel in novels)
    return beside_tests("small").small_model(folder, text, steps=STEPS["trained"], **SHAPE)


def megatron_forms(model: Path, shared: Path | None, count: int, place: Path) -> dict[str, float]:
    """Megatron-LM's own forms, which are no tasks of the harness: strict LAMBADA, and where the data are the first
    lines of WikiText-2's test as one stream of overlapping windows. The stream is one record, which `--limit` would
    not shorten.
    """
    tasks: dict[str, tuple[Any, ...]] = {"lambada_megatron_strict": ()}
    if shared is not None:
        text = (Path(shared) / "data" / "wikitext-2" / "test.txt").read_text()
        (place / "wikitext-2").mkdir()
        (place / "wikitext-2" / "test.txt").write_text("".join(text.splitlines(keepends=True)[:count]))
        tasks["wikitext_megatron_2"] = ("--data-dir", place)
    found = {}
    for task, options in tasks.items():
        told = json.loads(
            throughline("eval", model, "--tasks", task, "--limit", count, *options, "--json", "--fresh")
        )
        found[task] = {name: value["value"] for name, value in told["tasks"][0]["metrics"].items()}
    made = {"lambada_pct": 100 * found["lambada_megatron_strict"]["acc"]}
    if "wikitext_megatron_2" in found:
        made["wikitext_ppl"] = found["wikitext_megatron_2"]["adjusted_perplexity"]
    return made


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("shared", type=existing, nargs="?", default=os.environ.get("THROUGHLINE_SHARED"))
    options.add_argument("--records", type=int, default=200, help="of each task")
    options.add_argument(
        "--model", type=existing, help="a Hugging Face directory (default: one trained here)"
    )
    given = options.parse_args()
    count = 20 if given.quick else given.records
    rows, found = rows_of(given.shared and Path(given.shared), count), {}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        model = given.model or small_model(folder / "model")
        for task, records in rows.items():
            found[task] = compared(task, records, model, folder)
            print(f"{task}: {found[task]['metrics_ours_theirs']}", file=sys.stderr, flush=True)
        megatron = megatron_forms(model, given.shared, count, folder)
    equal = sum(result["equal"] for result in found.values())
    apart = max(result["largest_difference_nats"] for result in found.values())
    claims = [
        claim(
            "zero-shot-tasks-equal",
            [equal],
            [len(found)],
            peer="lm_eval hf",
            unit="tasks",
            better="higher",
            goal=1.0,
        ),
        claim(
            "zero-shot-nats",
            [apart or 1e-12],
            [BOUND_NATS],
            peer="bound",
            unit="nats",
            better="lower",
            goal=1.0,
        ),
    ]
    details = {
        "records": count,
        "accuracy_pct": {
            task: round(100 * r["metrics_ours_theirs"]["acc"][0], 2) for task, r in found.items()
        },
        "accuracy_pct_harness": {
            task: round(100 * r["metrics_ours_theirs"]["acc"][1], 2) for task, r in found.items()
        },
        "not_at_hand": [task for task in (*TASKS, *NOT_AT_HAND) if task not in found],
        "largest_difference_nats": apart,
        "megatron": megatron,
    }
    finish("zero_shot", claims, packages=("lm_eval", "transformers"), kind="proof", details=details)
    return 0 if equal == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
