"""Predictions of training on this machine, made and committed before the runs that they predict.

python benchmarks/prove_study.py predict
git add benchmarks/results/predictions && git commit
python benchmarks/prove_study.py measure

`predict` draws five configurations (rows, layers, layout: one process, copies, tensor, pipeline, sharded, each
once) from a fixed seed, studies this machine in each of the layouts at another number of rows and layers than those
drawn, and writes what the planner then says of step time and memory to `results/predictions/NAME.json`. `measure`
refuses unless that file is committed as it stands. It trains every configuration REPEATS times by the command that
users call, in turn, adds the medians and the spread of the repeats to the file, and ends with one JSON line;
`throughline plan validate --own` reads it.
Step time is the median of a run's steps after the first ones, memory the peak of the fullest process, start included.
`--quick` keeps its files under --work and trains fewer steps, once.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import claim, finish, machine_facts, parser
from throughline.core.allocator import peak_bytes
from throughline.core.recipe import load_recipe
from throughline.models.config import ModelConfig
from throughline.planner.own import GOALS, own_validation, prediction_digest, read_predictions
from throughline.train.predict import predicted_memory, predicted_step_seconds
from throughline.train.recipe import Recipe, model_config, resolve
from throughline.train.rules import RULES

SEED, REPEATS, WARM_UP, VOCABULARY = 15, 3, 4, 4096
FOLDER = Path(__file__).parent / "results" / "predictions"
SAMPLE = Path(__file__).parents[1] / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
LAYOUTS = {  # settings and number of processes
    "one process": ((), 1),
    "two copies": (("parallel.data=2",), 2),
    "two tensor ranks": (("parallel.tensor=2",), 2),
    "two pipeline ranks": (("parallel.pipeline=2", "train.micro_batch_rows=4"), 2),
    "two full shards": (("parallel.data=2", "parallel.sharding=full"), 2),
}
STUDIED = {"rows": 16, "layers": 4}
ROWS, LAYERS = (8, 12, 24), (3, 6, 8)
SHAPE = (
    "train.device=cpu", "optimizer.name=adamw", "optimizer.learning_rate=1e-3", "model.overrides.width=256",
    "train.sequence_length=128", "schedule.warmup_steps=0", "log.every_steps=1", "train.eval_every_steps=0",
    "checkpoint.save_every_steps=0", "data.validation_fraction=0",
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One configuration."""

    layout: str
    rows: int
    layers: int

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.rows} rows, {self.layers} layers"

    def settings(self) -> list[str]:
        """Overrides of the recipe, data and number of steps left out."""
        return [
            *SHAPE,
            f"train.batch_rows={self.rows}",
            f"model.overrides.layers={self.layers}",
            *LAYOUTS[self.layout][0],
        ]


def drawn() -> list[Drawn]:
    """The five, fixed by SEED."""
    draw = random.Random(SEED)
    return [Drawn(layout, draw.choice(ROWS), draw.choice(LAYERS)) for layout in LAYOUTS]


def throughline(*words: str, processes: int = 1) -> int:
    """Run the command; returns the peak memory of the fullest process of its training. Raises when it fails."""
    started = ["launch", "--nproc", str(processes), "--"] if processes > 1 else []
    command = [sys.executable, "-m", "throughline.cli.main", *started, *words]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        peak, root = 0, psutil.Process(process.pid)
        while process.poll() is None:
            try:
                ids = [process.pid, *(child.pid for child in root.children(recursive=True))]
            except psutil.NoSuchProcess:
                break
            peak = max(peak, *map(peak_bytes, ids))
            time.sleep(0.2)
        log.seek(0)
        if process.wait():
            raise SystemExit(f"{' '.join(command)}\n{log.read()}")
    return peak


def sets(settings: Sequence[str]) -> list[str]:
    """As options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def prepare(work: Path) -> Path:
    """The token store of the sample, made once."""
    store, tokenizer = work / "tokens", work / "tokenizer"
    if not store.exists():
        throughline(
            "data", "tokenizer", str(SAMPLE), "--vocab-size", str(VOCABULARY), "--out", str(tokenizer)
        )
        throughline("data", "tokenize", str(SAMPLE), "--tokenizer", str(tokenizer), "--out", str(store))
    return store


def resolved(settings: Sequence[str]) -> tuple[ModelConfig, Recipe]:
    """The recipe with these overrides, and its model."""
    recipe = resolve(load_recipe("gpt-shakespeare", Recipe, tuple(settings), RULES))
    return model_config(recipe, VOCABULARY), recipe


def without_runtime(shape: ModelConfig, recipe: Recipe) -> int:
    """The planner's memory without the program itself."""
    terms = predicted_memory(shape, recipe)
    return sum(terms.values()) - terms["runtime"]


def program_bytes(settings: Sequence[str], work: Path, processes: int) -> int:
    """What the command itself takes, its start, checkpoint and report included: the peak of a few steps of the studied
    size less what the planner has for them.
    """
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    words = ["train", "gpt-shakespeare", "--run-dir", str(run), *sets([*settings, f"train.steps={WARM_UP}"])]
    return throughline(*words, processes=processes) - without_runtime(*resolved(settings))


def predict(work: Path, steps: int) -> dict[str, Any]:
    """Study every layout, then say what the five will take."""
    store, cases, studies = prepare(work), [], {}
    for config in drawn():
        out = work / f"calibration-{config.layout.replace(' ', '-')}"
        shutil.rmtree(out, ignore_errors=True)
        studied = [*Drawn(config.layout, **STUDIED).settings(), f"data.train={store}"]
        throughline(
            "study",
            "gpt-shakespeare",
            "--out",
            str(out),
            "--steps",
            str(steps),
            *sets(studied),
            processes=LAYOUTS[config.layout][1],
        )
        facts = json.loads((out / "calibration.json").read_text())
        studies[config.layout] = {
            key: facts[key]
            for key in ("probes", "all_reduce", "runs", "tflops", "constants", "runtime_bytes")
        }
        os.environ["THROUGHLINE_CALIBRATION"] = str(out)
        program = program_bytes(studied, work, LAYOUTS[config.layout][1])
        shape, recipe = resolved((*config.settings(), f"data.train={store}"))
        predicted = {
            "seconds": round(predicted_step_seconds(shape, recipe), 5),
            "bytes": program + without_runtime(shape, recipe),
        }
        cases.append({"name": config.name, "settings": config.settings(), "predicted": predicted})
        print(config.name, predicted, flush=True)
    return {
        "what": "throughline train gpt-shakespeare with these settings, after a study of this machine in that layout",
        "prepared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine_facts(),
        "digest": prediction_digest(cases),
        "cases": cases,
        "studies": studies,
    }


def committed(path: Path) -> str:
    """When this file, as it stands, was committed. Raises SystemExit when it was not."""
    git = ["git", "-C", str(path.parent)]
    found = subprocess.run(
        [*git, "log", "-1", "--format=%aI", "--", path.name], capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", path.name], capture_output=True, text=True, check=True
    ).stdout
    if not found or changed:
        raise SystemExit(f"{path}: commit the predictions first; they are to be older than the measurement")
    return found


def measure(file: Path, work: Path, steps: int, repeats: int) -> None:
    """Train every case so many times, in turn, and add what was found."""
    store, found = prepare(work), read_predictions(file)
    os.environ.pop("THROUGHLINE_CALIBRATION", None)
    seconds: dict[str, list[float]] = {case["name"]: [] for case in found["cases"]}
    peaks: dict[str, list[int]] = {name: [] for name in seconds}
    for repeat in range(repeats):
        for config, case in zip(drawn(), found["cases"], strict=True):
            assert case["settings"] == config.settings(), "the script draws other configurations now"
            run = work / "run"
            shutil.rmtree(run, ignore_errors=True)
            words = [*case["settings"], f"data.train={store}", f"train.steps={WARM_UP + steps}"]
            peak = throughline(
                "train",
                "gpt-shakespeare",
                "--run-dir",
                str(run),
                *sets(words),
                processes=LAYOUTS[config.layout][1],
            )
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            times = [
                record["step_s"]
                for record in records
                if record.get("step", 0) > WARM_UP and "step_s" in record
            ]
            seconds[case["name"]].append(statistics.median(times))
            peaks[case["name"]].append(peak)
            print(repeat, case["name"], round(seconds[case["name"]][-1], 4), peak >> 20, flush=True)
    for case in found["cases"]:
        times = seconds[case["name"]]
        middle = statistics.median(times)
        case["measured"] = {
            "seconds": round(middle, 5),
            "bytes": int(statistics.median(peaks[case["name"]])),
            "spread": round((max(times) - min(times)) / middle, 4),  # of the repeats, largest less smallest
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Predict, or measure and end with the claims."""
    options = parser(__doc__ or "")
    options.add_argument("what", choices=("predict", "measure"))
    options.add_argument("--name", default="study", help="name of the file of predictions")
    options.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "prove-study", help="folder of runs"
    )
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # of each process, so that one and two processes have the same kind of cores
    )
    folder = given.work if given.quick else FOLDER
    for made in (folder, given.work):
        made.mkdir(parents=True, exist_ok=True)
    file, steps = folder / f"{given.name}.json", 6 if given.quick else 12
    if given.what == "predict" or (given.quick and not file.exists()):
        if file.exists() and not given.quick:
            raise SystemExit(f"{file} is there; predictions are made once: choose another --name")
        file.write_text(json.dumps(predict(given.work, steps), indent=1) + "\n", encoding="utf-8")
        print(f"{file}: commit it, then measure")
    if given.what == "predict":
        return
    commit = "" if given.quick else committed(file)
    measure(file, given.work, steps, 1 if given.quick else REPEATS)
    facts, lines, _ = own_validation(folder)
    print("\n".join(lines))
    claims = []
    for kind, unit in (("seconds", "time"), ("bytes", "memory")):
        errors = [abs(row["errors"][kind]) for row in facts["predictions"] if row["file"] == file.name]
        median = statistics.median(errors)
        claims.append(
            claim(
                f"median error in {unit}",
                [median],
                [GOALS[kind]],
                peer="goal",
                unit="",
                better="lower",
                goal=1.0,
            )
        )
    finish(
        "prove_study",
        claims,
        packages=("torch",),
        kind="proof",
        predictions=file.name,
        committed_at=commit,
        cases=read_predictions(file)["cases"],
    )


if __name__ == "__main__":
    main()
