"""Zero-shot evaluation against lm-evaluation-harness: requests per CPU second and peak memory, on the same
model and records.

    python benchmarks/eval.py SHARED [--quick] [--records N] [--pairs N] [--parts 7m] [--keep FILE --minutes
    N]

Eleven fixed tasks (LAMBADA, HellaSwag, PIQA, WinoGrande, ARC-Easy, BoolQ, COPA, OpenBookQA, SST-2, one BLiMP
paradigm, WikiText-2 by its first three articles), the first 200 records of each, and apart from them 25 questions in
MMLU's form behind its 5 examples (part `mmlu`, with the weights of 124M), in GPT-2's tokenizer on
random weights: a GPT-2 of 124M and one of 7M (4 layers of 128). Every measurement is a fresh process with one
thread; its CPU seconds are those of tokenising and scoring (imports and loading are not counted), its memory
is the process's peak. lm_eval runs its own task files (through tests/eval/harness.py) with its `hf` model in
float32 and, task by task, the batch size out of 1 and 8 that was faster on the first 24 records. SHARED is
the directory that holds data/, by default THROUGHLINE_SHARED.

`--quick` takes PIQA alone, its first 6 records, one pair, both sides with 1 layer of either width and the harness with
batches of 8.

An hour on two cores. `--keep` appends every measurement to a file and takes those that are there, so that the
same command with `--minutes` does it in pieces.
"""

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import claim, existing, finish, parser, peak_memory

HERE = Path(__file__).resolve()
TASKS = (
    "lambada_openai",
    "hellaswag",
    "piqa",
    "winogrande",
    "arc_easy",
    "boolq",
    "copa",
    "openbookqa",
    "sst2",
    "blimp_wh_island",
    "wikitext_2",
)
SHOTS = {"mmlu_astronomy": 5}  # the first records are the examples
SHOTS |= {"mmlu/default/mmlu_anatomy.yaml": 5, "gsm8k/gsm8k.yaml": 5, "mmlu_pro/mmlu_pro_law.yaml": 4}
PARTS = ("mmlu_astronomy",)  # of them what is timed
QUICK, QUICK_RECORDS, QUICK_LAYERS = ("piqa",), 6, 1  # with --quick
ARTICLES = 3  # WikiText articles stand for 200 records: 12,000 tokens
MODELS = {
    "7m": {"n_layer": 4, "n_head": 4, "n_embd": 128},
    "124m": {"n_layer": 12, "n_head": 12, "n_embd": 768},
}
MODELS["mmlu"] = MODELS["124m"]
GOALS = {"eval-124m": 4.0, "eval-7m": 7.0, "eval-memory-124m": 1.7, "eval-memory-7m": 4.0}
GOALS |= {"eval-mmlu": 6.0, "eval-memory-mmlu": 1.5}
BATCHES = (1, 8)  # of the harness
TUNED_ON = 24  # records


def beside_tests(name: str) -> Any:
    """A helper of the parity tests: tests/eval/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, HERE.parents[1] / "tests" / "eval" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(folder: Path, shared: Path, shape: dict[str, int]) -> None:
    """A GPT-2 with random weights and GPT-2's tokenizer as a Hugging Face directory."""
    import torch
    from tokenizers.implementations import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder)
    vocabulary = shared / "data" / "gpt2-bpe"
    tokenizer = ByteLevelBPETokenizer(str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (folder / "tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )


def write_records(folder: Path, shared: Path, limit: int | None) -> dict[str, int]:
    """The records as JSON files, and how many requests the harness makes of each task's."""
    rows = beside_tests("hub").records(shared, limit)
    few = None if limit is None else SHOTS["mmlu_astronomy"] + max(2, limit // 8)
    rows["mmlu_astronomy"] = mmlu_form(shared)[:few]
    asked = {}
    for name in (*TASKS, *PARTS):
        mine = rows[name][:ARTICLES] if name == "wikitext_2" and limit else rows[name]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
        choices = {"hellaswag": 4, "lambada_openai": 1, "wikitext_2": 1}
        if name in SHOTS:
            asked[name] = 4 * (len(mine) - SHOTS[name])
            continue
        asked[name] = sum(
            len(row["choices"]["text"]) if "choices" in row else choices.get(name, 2) for row in mine
        )
    return asked


def mmlu_form(shared: Path) -> list[dict[str, Any]]:
    """Questions of ARC-Challenge that are as long as MMLU's (300 to 500 characters), in its form."""
    rows = []
    for line in (shared / "data" / "arc" / "arc_challenge.jsonl").read_text().splitlines():
        given = json.loads(line)
        question = given["query"].removeprefix("Question: ")
        if len(given["choices"]) == 4 and 300 <= len(question) + sum(map(len, given["choices"])) <= 500:
            rows.append({"question": question, "choices": given["choices"], "answer": given["gold"]})
    return rows


def measure(side: str, name: str, model: Path, records: Path, batch: int) -> dict[str, Any]:
    """One task in a fresh process: {"cpu_s": ..., "peak_bytes": ...}."""
    command = [
        sys.executable,
        str(HERE),
        "--side",
        side,
        "--task",
        name,
        "--model",
        str(model),
        "--records-dir",
        str(records),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run([*command, "--batch", str(batch)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} failed on {name}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def score(side: str, name: str, model: Path, records: Path, batch: int) -> dict[str, Any]:
    """In the measured process: load, then tokenise and score one task."""
    plain = name.replace("/", "_")
    rows = [json.loads(line) for line in (records / f"{plain}.jsonl").read_text().splitlines()]
    shots = SHOTS.get(name, 0)
    if side == "ours":
        import jinja2.sandbox  # noqa: F401 (imports are not counted; the harness has it when it starts)
        from throughline.data.records import Record
        from throughline.eval.asked import Settings
        from throughline.eval.opening import open_scorer
        from throughline.eval.runner import evaluate
        from throughline.eval.task import BoundTask, find_tasks

        class Held(BoundTask):
            def records(self, data_dir: Any, limit: int | None, *, fewshot: bool = False) -> list[Record]:
                mine = rows[:shots] if fewshot else rows[shots:]
                where = f"{name}{'-dev' * fewshot}"
                return [Record(f"{where}:{number}", row) for number, row in enumerate(mine[:limit], 1)]

        scorer = open_scorer(model).scorer
        settings = Settings(shots=shots or None)
        if name.endswith(".yaml"):
            held, settings = harness_task(name, rows, shots, records / "data", settings)
        else:
            (task,) = find_tasks([name])
            held = Held(task.name, task.group, task.task, task.source, member=task.member)
        start = time.process_time()
        (found,) = evaluate(scorer, [held], settings)
        answers = [
            [
                one if isinstance(one, str) else one[0]
                for answer in sample["answers"]
                for one in listed(answer)
            ]
            for sample in found.samples
        ]
        metrics = {metric: value["value"] for metric, value in found.summary["metrics"].items()}
    else:
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        with tempfile.TemporaryDirectory() as folder:
            manager, names = beside_tests("harness").load(Path(folder), {name: rows}, shots)
            lm = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=batch)
            start = time.process_time()
            how = {"num_fewshot": shots or None, "log_samples": True, "bootstrap_iters": 0}
            out = lm_eval.simple_evaluate(lm, tasks=list(names.values()), task_manager=manager, **how)
        # one a record, of several chains of filters too
        every = {sample["doc_id"]: sample for sample in out["samples"][names[name]]}
        samples = [sample for _, sample in sorted(every.items())]
        answers = [
            [one[0][0] if isinstance(one[0], list | tuple) else one[0] for one in sample["resps"]]
            for sample in samples
        ]
        metrics = {key.removesuffix(",none"): value for key, value in out["results"][names[name]].items()}
    spent = time.process_time() - start
    return {"cpu_s": spent, "peak_bytes": peak_memory(), "metrics": metrics, "answers": answers}


def listed(answer: Any) -> list[Any]:
    """What was scored for one question; a written answer is one text."""
    return [answer] if isinstance(answer, str) else answer


def harness_task(name: str, rows: list[Any], shots: int, data: Path, settings: Any) -> tuple[Any, Any]:
    """The harness's file as `--harness-task` reads it, and settings that find these records below `data`: of the
    evaluated split, and of the examples'.
    """
    from dataclasses import replace

    from throughline.eval.harness.reader import read_harness_task

    (task,) = read_harness_task(beside_tests("harness").task_file(name), code=True)
    source = task.source
    folder = data / source.dataset.rpartition("/")[2] / (source.config or "")
    folder.mkdir(parents=True, exist_ok=True)
    for split, own in ((source.fewshot_split, rows[:shots]), (source.split, rows[shots:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return task, replace(settings, data_dir=data, draw="harness")


def geometric(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


class Measured:
    """Measurements by (model, task, side, pair), in a file when one is given. Begins none after `minutes`."""

    def __init__(self, file: Path | None, minutes: float, records: int) -> None:
        self.file, self.end, self.records = file, time.monotonic() + 60 * minutes, records
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self.known = {tuple(key): found for key, found in map(json.loads, lines)}

    def get(self, key: tuple[str | int, ...], model: Path, folder: Path, batch: int) -> dict[str, float]:
        """The measurement of a key that begins (size, task, side)."""
        key = (self.records, *key)
        if key not in self.known:
            if time.monotonic() > self.end:
                raise SystemExit("to be continued: the same command goes on")
            _, _, task, side, *_ = key
            found = measure(str(side), str(task), model, folder, batch)
            self.known[key] = {"cpu_s": found["cpu_s"], "peak_bytes": found["peak_bytes"]}
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps([key, self.known[key]]) + "\n")
            print(
                f"{key}: {found['cpu_s']:.2f} s, {found['peak_bytes'] / 2**20:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
        return self.known[key]


def compare_model(
    size: str,
    shape: dict[str, int],
    shared: Path,
    pairs: int,
    measured: Measured,
    tasks: Sequence[str],
    batches: Sequence[int],
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Both claims of one model over these tasks, the harness with the fastest of these batch sizes; a line per task."""
    with tempfile.TemporaryDirectory() as name:
        folder, few = Path(name), Path(name) / "few"
        few.mkdir()
        model = folder / "model"
        make_model(model, shared, shape)
        asked = write_records(folder, shared, measured.records)
        write_records(few, shared, TUNED_ON)
        batch = dict.fromkeys(tasks, batches[0])
        for task in tasks if len(batches) > 1 else ():
            tried = {b: measured.get((size, task, "theirs", "tuned", b), model, few, b) for b in batches}
            batch[task] = min(tried, key=lambda b: tried[b]["cpu_s"])
        ours: list[dict[str, dict[str, float]]] = []
        theirs: list[dict[str, dict[str, float]]] = []
        for pair in range(pairs):
            ours.append({}), theirs.append({})
            for task in tasks:
                ours[-1][task] = measured.get((size, task, "ours", pair), model, folder, 0)
                theirs[-1][task] = measured.get(
                    (size, task, "theirs", pair, batch[task]), model, folder, batch[task]
                )
    rate = [
        [geometric([asked[task] / run[task]["cpu_s"] for task in tasks]) for run in side]
        for side in (ours, theirs)
    ]
    memory = [
        [geometric([run[task]["peak_bytes"] for task in tasks]) / 2**20 for run in side]
        for side in (ours, theirs)
    ]
    names = (f"eval-{size}", f"eval-memory-{size}")
    claims = [
        claim(
            names[0],
            *rate,
            peer="lm_eval hf",
            unit="requests per CPU s, geometric mean",
            better="higher",
            goal=GOALS[names[0]],
        ),
        claim(
            names[1],
            *memory,
            peer="lm_eval hf",
            unit="MiB peak, geometric mean",
            better="lower",
            goal=GOALS[names[1]],
        ),
    ]
    return claims, [_line(size, task, asked[task], batch[task], ours, theirs) for task in tasks]


def _line(
    size: str, task: str, requests: int, batch: int, ours: list[Any], theirs: list[Any]
) -> dict[str, Any]:
    """One task's medians."""
    line: dict[str, Any] = {"model": size, "task": task, "requests": requests, "their_batch": batch}
    for side, runs in (("our", ours), ("their", theirs)):
        line[f"{side}_cpu_s"] = round(statistics.median(run[task]["cpu_s"] for run in runs), 3)
        line[f"{side}_peak_mib"] = round(statistics.median(run[task]["peak_bytes"] for run in runs) / 2**20)
    return line


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "shared",
        type=existing,
        nargs="?",
        default=os.environ.get("THROUGHLINE_SHARED"),
        help="directory that holds data/ with the benchmark files",
    )
    options.add_argument("--records", type=int, default=200, help="records a task")
    options.add_argument("--pairs", type=int, default=3, help="paired measurements")
    options.add_argument("--keep", type=Path, help="file of measurements: those in it are not made again")
    options.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no measurement after so many minutes"
    )
    options.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(MODELS), help="measure only these models"
    )
    for name in ("--side", "--task", "--model", "--records-dir"):
        options.add_argument(name, help="internal: the measured process")
    options.add_argument("--batch", type=int, default=8, help="internal: the harness's batch size")
    given = options.parse_args()
    if given.side:
        print(
            json.dumps(score(given.side, given.task, Path(given.model), Path(given.records_dir), given.batch))
        )
        return
    if given.shared is None:
        options.error("give the directory that holds data/")
    if unknown := set(given.parts) - set(MODELS):
        options.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    records, pairs, tasks, batches = given.records, given.pairs, TASKS, BATCHES
    if given.quick:
        records, pairs, tasks, batches = QUICK_RECORDS, 1, QUICK, BATCHES[-1:]
    measured = Measured(given.keep, given.minutes, records)
    claims: list[Any] = []
    details = {}
    for size in given.parts:
        shape = MODELS[size] | ({"n_layer": QUICK_LAYERS} if given.quick else {})
        own = PARTS if size == "mmlu" else tasks
        more, rows = compare_model(size, shape, given.shared, pairs, measured, own, batches)
        claims += more
        details[size] = {"tasks": rows, "records": records, "pairs": pairs}
    finish("eval", claims, packages=("lm_eval", "transformers", "tokenizers"), details=details)


if __name__ == "__main__":
    main()
