"""Every record of every task once, scored by us and by lm-evaluation-harness: accuracies and log-likelihoods
side by side.

    python benchmarks/eval_parity.py SHARED [--minutes 10 --models DIR] [--only TASK ...] [--out
    benchmarks/results/eval-parity.json]

Two GPT-2s (4 layers of 128, a vocabulary of 4,096 and 512 positions): one with random weights, one trained on
novels for 600 steps, which `throughline finetune` has also taught to answer ARC's questions (six tasks); a Llama of
these sizes with random weights, for 37 of the harness's task files by records of their form that hold ARC's sentences
(not ReCoRD's, whose file imports what transformers no longer has); and a BERT trained for 60 steps and spread
(`small_bert`). The harness runs its own task files (through tests/eval/harness.py) with its `hf` model in float32. It
has no pseudo-log-likelihoods: those of the BERT are compared with transformers' BertForMaskedLM, one
forward for each masked token. All tasks whose data lie below SHARED: 27 with the paradigms of BLiMP. A task that stands
in the JSON file is not scored again, so that the hour this takes may be spent in pieces: after `--minutes` no
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
import subprocess
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
STEPS = {"random": 0, "trained": 600, "tuned": 600, "llama": 0, "bert": 60}
FORMS = "llama"  # the model that is asked the harness's files
MASKED = ("copa", "openbookqa", "sst2", "blimp_wh_island", "winogrande")  # what the BERT is asked
MASKED_RECORDS = 100
TUNED = ("arc_challenge", "blimp_wh_island", "copa", "openbookqa", "piqa", "sst2")
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
    if weights == "tuned":
        return tuned(folder, make_model(folder.with_name("trained"), shared, "trained"), shared)
    novels = sorted((shared / "data" / "novels").glob("*.bz2"))[:NOVELS]
    texts = [bz2.decompress(novel.read_bytes()).decode()[:CHARACTERS] for novel in novels]
    text = "".join(texts)
    if weights == "bert":
        vocabulary = shared / "data" / "bert-base-uncased" / "vocab.txt"
        return beside_tests("small").small_bert(folder, text, vocabulary, steps=STEPS[weights])
    shape = SHAPE | (LONG if weights == FORMS else {})
    return beside_tests("small").small_model(folder, text, steps=STEPS[weights], **shape)


def tuned(folder: Path, start: Path, shared: Path) -> Path:
    """The model at `start`, fine-tuned for an epoch on questions of ARC with their answers."""
    records = folder.with_name("answers.jsonl")
    asked = map(json.loads, (shared / "data" / "arc" / "arc_easy.jsonl").read_text().splitlines())
    pairs = ({"prompt": row["query"], "response": " " + row["choices"][row["gold"]]} for row in asked)
    records.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = [sys.executable, "-m", "throughline.cli.main", "finetune", "finetune-instruction"]
    command += ["--init-from", str(start), "--out", str(folder)]
    fields = {"data.train": records, "train.epochs": 1, "optimizer.learning_rate": 1e-3}
    for name, value in (fields | {"train.compile": "off", "train.sequence_length": 256}).items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def asked(shared: Path) -> dict[str, dict[str, list[Any]]]:
    """weights -> task -> its records: all of the tasks whose data lie there; for the Llama the harness's files
    by records that are made of ARC's sentences.
    """
    records = beside_tests("hub").records(shared, None)
    sentences = [row["question"] for row in records["arc_challenge"]]
    made = beside_tests("harness_records")
    names = (name for name in made.FILES if "record" not in name)
    forms = {name: made.told(name, FORM_RECORDS, sentences) for name in names}
    own = {FORMS: forms, "bert": {name: records[name][:MASKED_RECORDS] for name in MASKED}}
    own["tuned"] = {name: records[name] for name in TUNED}
    return {weights: own.get(weights, records) for weights in STEPS}


def compared(task: str, rows: list[Any], model: Path, folder: Path) -> dict[str, Any]:
    """One task by both, each in a process of its own; a file of the harness, whose records are few, in this one."""
    one = score if task.endswith(".yaml") else measure
    (folder / f"{task.replace('/', '_')}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = one("ours", task, model, folder, BATCH)
    masked = model.name == "bert"
    theirs = one_mask_at_a_time(task, rows, model) if masked else one("theirs", task, model, folder, BATCH)
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


def one_mask_at_a_time(task: str, rows: list[Any], model: Path) -> dict[str, Any]:
    """The pseudo-log-likelihoods of the harness's prompts by transformers, and the accuracy of their arg-max."""
    import torch
    from transformers import BertForMaskedLM, PreTrainedTokenizerFast

    start = time.process_time()
    bert = BertForMaskedLM.from_pretrained(model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    with tempfile.TemporaryDirectory() as name:
        asked = beside_tests("harness").requests(Path(name), {task: rows})[task]
    inner = {number for word, number in tokenizer.get_vocab().items() if word.startswith("##")}

    @torch.inference_mode()
    def logprob(context: str, rest: str) -> float:
        before, whole = (tokenizer(text).input_ids[:-1] for text in (context, context + rest))
        whole.append(tokenizer.sep_token_id)
        total = 0.0
        for place in range(len(before), len(whole) - 1):
            ids, end = list(whole), place + 1
            while whole[end] in inner:  # later pieces of its word
                end += 1
            ids[place:end] = [tokenizer.mask_token_id] * (end - place)
            logits = bert(torch.tensor([ids])).logits[0, place]
            total += float(torch.log_softmax(logits, -1)[whole[place]])
        return total

    answers = [[logprob(*pair) for pair in one["arguments"]] for one in asked]
    golds = [one["gold"] for one in asked]  # a number, or the choice itself
    golds = [one["choices"].index(gold) if isinstance(gold, str) else gold for one, gold in zip(asked, golds)]
    right = [max(range(len(sums)), key=sums.__getitem__) == gold for sums, gold in zip(answers, golds)]
    spent = time.process_time() - start
    return {"answers": answers, "metrics": {"acc": sum(right) / len(right)}, "cpu_s": spent}


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
