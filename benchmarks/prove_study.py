"""Predictions of training on this machine, made and committed before the runs that they predict.

python benchmarks/prove_study.py predict [--cases training]
git add benchmarks/results/predictions && git commit
python benchmarks/prove_study.py measure [--cases training]

The cases are those of own_cases.py: `study`, five configurations drawn from a fixed seed, or `training`, our side of
the benchmarks and proofs that train on this machine. `predict` studies this machine for each at another number of rows
and layers, and writes what the planner then says of step time and memory to `results/predictions/NAME.json`. `measure`
refuses unless that file is committed as it stands. It trains every case REPEATS times by the command that users call,
in turn, adds the medians and the spread of the repeats to the file, and ends with one JSON line;
`throughline plan validate --own` reads it.
Step time is the median of a run's steps after the first ones, memory the peak of the fullest process, start included.
`--quick` keeps its files under --work, takes the first case alone (or those of --only) and trains fewer steps, once.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from common import claim, finish, machine_facts, parser
from own_cases import CASES, STORES, Case
from throughline.core.hardware import peak_bytes
from throughline.core.recipe import load_recipe
from throughline.models.config import ModelConfig
from throughline.prove.validate import OWN_GOALS, own_validation, prediction_digest, read_predictions
from throughline.train.corpus import open_corpus
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import model_config, predicted_memory, predicted_step_seconds, resolve
from throughline.train.recipes.rules import RULES

REPEATS = 3
FOLDER = Path(__file__).parent / "results" / "predictions"


def throughline(case: Case, *words: str) -> int:
    """Run the command with the processes and threads of a case; returns the peak memory of the fullest process of its
    training. Raises when it fails.
    """
    processes, threads = case.processes, {"OMP_NUM_THREADS": str(case.own_threads())}
    started = ["launch", "--nproc", str(processes), "--"] if processes > 1 else []
    command = [sys.executable, "-m", "throughline.cli.main", *started, *words]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | threads)
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


def prepare(case: Case, work: Path) -> tuple[str, list[str]]:
    """The recipe of a case as a command takes it, and the setting that names its token store, both made once."""
    folder = work / case.data
    if not (folder / "train").exists():
        STORES[case.data](folder)
    data = [f"data.train={folder / 'train'}"]
    if "\n" not in case.recipe:
        return case.recipe, data
    file = work / f"{case.name.replace(' ', '-')}.toml"
    file.write_text(case.recipe, encoding="utf-8")
    return str(file), data


def resolved(recipe: str, settings: Sequence[str]) -> tuple[ModelConfig, Recipe]:
    """The recipe with these overrides, and its model."""
    found = resolve(load_recipe(recipe, Recipe, tuple(settings), RULES))
    return model_config(found, open_corpus(found).vocab_size), found


def without_runtime(shape: ModelConfig, recipe: Recipe) -> int:
    """The planner's memory without the program itself."""
    terms = predicted_memory(shape, recipe)
    return sum(terms.values()) - terms.get("runtime", 0)


def train(case: Case, recipe: str, settings: Sequence[str], work: Path) -> int:
    """Train in WORK/run; the peak memory."""
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    return throughline(case, "train", recipe, "--run-dir", str(run), *sets(settings))


def predict(work: Path, cases: list[Case], steps: int) -> dict[str, Any]:
    """Study what each case rests on, then say what the case will take.

    The program itself, its start, last checkpoint and report included, is the peak of a few steps of the studied size
    less what the planner has for them. A case that WORK has from a run that was cut off is not studied again.
    """
    said, studies = [], {}
    for case in cases:
        recipe, data = prepare(case, work)
        out = work / f"calibration-{case.study.replace(' ', '-')}"
        kept = work / f"predicted-{case.name.replace(' ', '-')}.json"
        if kept.exists() and (known := json.loads(kept.read_text()))["case"].items() >= case.facts().items():
            said.append(known["case"])
            studies[case.study] = known["study"]
            print(case.name, "as predicted before", flush=True)
            continue
        shutil.rmtree(out, ignore_errors=True)
        length = f"train.steps={case.warm_up + case.steps}"
        studied = [*case.studied, *data, length]
        few = str(min(steps, max(case.steps, 4)))
        os.environ.pop("THROUGHLINE_CALIBRATION", None)
        throughline(case, "study", recipe, "--out", str(out), "--steps", few, *sets(studied))
        facts = json.loads((out / "calibration.json").read_text())
        studies[case.study] = {
            key: facts[key]
            for key in ("probes", "all_reduce", "runs", "tflops", "constants", "runtime_bytes")
        }
        os.environ["THROUGHLINE_CALIBRATION"] = str(out)
        peak = train(case, recipe, [*studied, f"train.steps={case.warm_up}"], work)
        program = peak - without_runtime(*resolved(recipe, studied))
        shape, chosen = resolved(recipe, [*case.settings, *data, length])
        predicted = {
            "seconds": round(predicted_step_seconds(shape, chosen), 5),
            "bytes": program + without_runtime(shape, chosen),
        }
        said.append(case.facts() | {"predicted": predicted})
        kept.write_text(json.dumps({"case": said[-1], "study": studies[case.study]}))
        print(case.name, predicted, flush=True)
    return {
        "what": "throughline train RECIPE with these settings, after a study of this machine at another size",
        "prepared": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine_facts(),
        "digest": prediction_digest(said),
        "cases": said,
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


def measure(file: Path, cases: list[Case], work: Path, repeats: int) -> None:
    """Train every case so many times, in turn, and add what was found."""
    found = read_predictions(file)
    os.environ.pop("THROUGHLINE_CALIBRATION", None)
    for case, said in zip(cases, found["cases"], strict=True):
        if {key: said[key] for key in said if key in case.facts()} != {
            key: value for key, value in case.facts().items() if key in said
        }:
            raise SystemExit(f"{file}: {said['name']} is another run now: predict anew under another --name")
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    peaks: dict[str, list[int]] = {case.name: [] for case in cases}
    for repeat in range(repeats):
        for case in cases:
            recipe, data = prepare(case, work)
            settings = [*case.settings, *data, f"train.steps={case.warm_up + case.steps}"]
            peaks[case.name].append(train(case, recipe, settings, work))
            lines = (work / "run" / "metrics.jsonl").read_text().splitlines()
            times = [
                record["step_s"]
                for record in map(json.loads, lines)
                if record.get("step", 0) > case.warm_up and "step_s" in record
            ]
            seconds[case.name].append(statistics.median(times))
            print(repeat, case.name, round(seconds[case.name][-1], 4), peaks[case.name][-1] >> 20, flush=True)
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
    options.add_argument("--cases", choices=sorted(CASES), default="study", help="runs to predict")
    options.add_argument("--only", action="append", help="with --quick: cases whose name has this in it")
    options.add_argument(
        "--name", default=None, help="name of the file of predictions (default: that of --cases)"
    )
    options.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "prove-study", help="folder of runs"
    )
    given = options.parse_args()
    if given.only and not given.quick:
        options.error("--only is for --quick: a file of predictions has all cases")
    folder, cases = given.work if given.quick else FOLDER, CASES[given.cases]()
    if given.quick:
        cases = [replace(case, steps=min(case.steps, 3), warm_up=2) for case in cases]
        wanted = given.only or [cases[0].name]
        cases = [case for case in cases if any(part in case.name for part in wanted)]
    for made in (folder, given.work):
        made.mkdir(parents=True, exist_ok=True)
    file = folder / f"{given.name or given.cases}.json"
    if given.quick and file.exists():
        names = [said["name"] for said in read_predictions(file)["cases"]]
        if names != [case.name for case in cases]:
            file.unlink()  # an earlier quick run of other cases
    if given.what == "predict" or (given.quick and not file.exists()):
        if file.exists() and not given.quick:
            raise SystemExit(f"{file} is there; predictions are made once: choose another --name")
        said = predict(given.work, cases, 6 if given.quick else 12)
        file.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        for kept in given.work.glob("predicted-*.json"):  # the next predictions are made anew
            kept.unlink()
        print(f"{file}: commit it, then measure")
    if given.what == "predict":
        return
    commit = "" if given.quick else committed(file)
    measure(file, cases, given.work, 1 if given.quick else REPEATS)
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
                [OWN_GOALS[kind]],
                peer="goal",
                unit="",
                better="lower",
                goal=1.0,
            )
        )
    finish(
        f"prove_{given.cases}",
        claims,
        packages=("torch",),
        kind="proof",
        predictions=file.name,
        committed_at=commit,
        cases=read_predictions(file)["cases"],
    )


if __name__ == "__main__":
    main()
