"""Training to a target: whether it is reached, the published points beside what it took, and the MLPerf log of the run:
lines `:::MLLOG {json}` in `mllog.txt`, rules 1.1.0, division open.

The log is made from events.jsonl and the recipe when the run ends, so a run that was resumed has one. Samples
seen stand for epochs, as in MLPerf's BERT. The clock runs from the first batch (run_start) to the evaluation that
met the target or was the last (run_stop).
"""

import json
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.files import read_json, write_atomic
from ...core.workspace import read_records
from ...models.config import ModelConfig
from ...planner.tables import parameter_shapes
from ..recipes.recipe import Recipe, TargetSection
from ..recipes.resolved import micro_rows

FILE = "mllog.txt"
Event = dict[str, Any]
REFERENCE = Path(__file__).parents[2] / "planner" / "published" / "mlperf_bert.json"


def reached(target: TargetSection | None, figures: dict[str, Any]) -> bool:
    """Whether an evaluation meets the target: an accuracy at least, a loss at most."""
    if target is None or (figure := figures.get(target.figure)) is None:
        return False
    return figure <= target.value if target.figure.endswith("loss") else figure >= target.value


def convergence(
    target: TargetSection, figures: dict[str, Any], samples: int, batch_rows: int, seconds: float
) -> dict[str, Any]:
    """What was asked for, what it took, and the published point of the nearest batch: of BERT-Large at 512 from the
    reference's own checkpoint, beside which other runs stand, not against. A sample is a row; packed ones are fewer.
    """
    near = min(read_json(REFERENCE)["rows"], key=lambda point: abs(point["batch"] - batch_rows))
    return {
        "figure": target.figure,
        "value": target.value,
        "reached": reached(target, figures),
        "measured": figures.get(target.figure),
        "samples": samples,
        "seconds": round(seconds, 2),
        "mlperf_reference": near | {"mlm_accuracy": 0.72},
    }


def write_mllog(run: Path, recipe: Recipe, config: ModelConfig) -> Path:
    """Write `mllog.txt` of a run that has ended."""
    events = list(read_records(run / "events.jsonl"))
    lines = [f":::MLLOG {json.dumps(line)}\n" for line in log_lines(events, recipe, config)]
    write_atomic(run / FILE, "".join(lines))
    return run / FILE


def log_lines(events: list[Event], recipe: Recipe, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """The log's lines in order of time. `events` of one run: started, running, evaluation, ..."""
    started = next(event for event in events if event["event"] == "started")
    running = next(event for event in events if event["event"] == "running")
    evaluations: list[Event] = []
    for event in events:
        if event["event"] == "evaluation":  # one that a killed run made again counts once, as in its metrics
            evaluations = [known for known in evaluations if known["samples"] < event["samples"]] + [event]
    first, run_start = started["time"], running["time"]
    yield _line(first, "cache_clear", True)
    yield _line(first, "init_start", None, "INTERVAL_START")
    said = {"benchmark": "bert", "org": "throughline", "division": "open", "status": "research"}
    said["platform"] = ", ".join(started["gpus"]) or started["cpu"] or platform.machine()
    facts = {f"submission_{key}": value for key, value in said.items()} | _hyperparameters(recipe)
    for key, value in facts.items():
        yield _line(first, key, value)
    for name in parameter_shapes(config):
        yield _line(first, "weights_initialization", None, tensor=name)
    yield _line(run_start, "init_stop", None, "INTERVAL_END")
    yield _line(run_start, "run_start", None, "INTERVAL_START")
    seen, since = 0, run_start
    for event in evaluations:
        samples, stop = event["samples"], event["time"]
        start = max(stop - event["seconds"], since)
        block = {"first_epoch_num": seen, "epoch_count": max(samples - seen, 1)}
        yield _line(since, "block_start", None, "INTERVAL_START", **block)
        yield _line(start, "block_stop", None, "INTERVAL_END", first_epoch_num=seen)
        yield _line(start, "eval_start", None, "INTERVAL_START", epoch_num=samples)
        accuracy = event["figures"].get("mlm_accuracy")
        if accuracy is not None:
            yield _line(stop, "eval_accuracy", accuracy, epoch_num=samples)
        yield _line(stop, "eval_stop", None, "INTERVAL_END", epoch_num=samples)
        seen, since = samples, stop
    met = bool(evaluations) and reached(recipe.target, evaluations[-1]["figures"])
    yield _line(since, "run_stop", None, "INTERVAL_END", status="success" if met else "aborted")
    yield _line(since, "train_samples", seen)
    last = evaluations[-1]["figures"] if evaluations else {}
    yield _line(since, "eval_samples", last.get("pairs") or last.get("masked_tokens", 0))


def _hyperparameters(recipe: Recipe) -> dict[str, Any]:
    train, optimizer, schedule = recipe.train, recipe.optimizer, recipe.schedule
    return {
        "seed": train.seed,
        "global_batch_size": train.rows_per_step,
        "gradient_accumulation_steps": train.rows_per_step // (micro_rows(recipe) * recipe.parallel.data),
        "max_predictions_per_seq": math.ceil(train.sequence_length * recipe.mask_fraction),
        "opt_name": optimizer.name,
        "opt_base_learning_rate": optimizer.learning_rate,
        "opt_epsilon": optimizer.epsilon,
        "opt_lamb_beta_1": optimizer.beta1,
        "opt_lamb_beta_2": optimizer.beta2,
        "opt_lamb_weight_decay_rate": optimizer.weight_decay,
        "opt_lamb_learning_rate_decay_poly_power": schedule.power,
        "opt_learning_rate_training_steps": train.steps,
        "opt_learning_rate_warmup_steps": schedule.warmup_steps,
        "num_warmup_steps": schedule.warmup_steps,
        "start_warmup_step": schedule.warmup_start_step,
    }


def _line(time_s: float, key: str, value: Any, kind: str = "POINT_IN_TIME", **metadata: Any) -> Event:
    return {
        "namespace": "",
        "time_ms": round(1000 * time_s),
        "event_type": kind,
        "key": key,
        "value": value,
        "metadata": {"file": "train/logs/target.py", "lineno": 1, **metadata},
    }
