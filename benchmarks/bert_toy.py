"""A small BERT on novels, judged on other novels: seconds of training until transformers' masked-token accuracy.

    python benchmarks/bert_toy.py [--minutes 20] [--seeds 3] [--out runs/bert-toy] [--quick]

transformers' BertForPreTraining trains with fused AdamW for so many minutes at each of three learning rates (linear
warm-up and decay over its time, post-norm as published, padded to the longest of a batch); its best accuracy is the
target. Ours is one recipe (below) for a third of that time, which ends where it meets the target. Both have the same
text, pairs, masking, sizes and validation rows, which our data stage makes; evaluations are outside both times. The
second claim is accuracy over always saying the most frequent token. OUT/curves.json has every curve, and OUT/seed-0
is the run whose checkpoint is judged elsewhere as a trained BERT.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, finish, parser
from throughline.core.recipe import build_recipe
from throughline.train.build import RunPlan, build_trainer, plan_run, training_rows, validation_rows
from throughline.train.evaluate import Validation
from throughline.train.loop import train
from throughline.train.metrics import read_metrics
from throughline.train.objective import IGNORED, prepare
from throughline.train.recipe import Recipe, resolve
from throughline.train.rules import RULES
from throughline.train.step import train_step

NOVELS = Path(__file__).resolve().parents[1] / "recipes" / "samples" / "novels"
HELD_OUT = ("Doyle_Hound_1902.txt.bz2", "Trollope_Warden_1855.txt.bz2")
RATES = (3e-4, 1e-3, 3e-3)
GOAL_TIME, GOAL_BASELINE = 3.0, 2.5
SHAPE = {"layers": 4, "width": 256, "heads": 4, "sequence_length": 128, "dropout": 0.0}
EVALUATIONS = 6  # of each run of theirs; ours looks eight times
Curve = list[tuple[float, float]]  # seconds of training, masked-token accuracy


def throughline(*words: object) -> None:
    command = [sys.executable, "-m", "throughline.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])


def make_stores(folder: Path) -> None:
    """Two token stores of one WordPiece tokenizer, which has seen the training novels alone."""
    kept = [path for path in sorted(NOVELS.glob("*.bz2")) if path.name not in HELD_OUT]
    how = ("--documents", "file", "--unwrap")
    throughline(
        "data", "tokenizer", *kept, *how, "--type", "wordpiece", "--vocab-size", 8192, "--out", folder / "tok"
    )
    for name, paths in (("train", kept), ("validation", [NOVELS / name for name in HELD_OUT])):
        made = ("--tokenizer", folder / "tok", "--sentences", "--out", folder / name)
        throughline("data", "tokenize", *paths, *how, *made)


def make_plan(
    folder: Path, seed: int, steps: int, target: float | None = None, packing: bool = True
) -> RunPlan:
    """Ours: hidden matrices by Muon, the rest by AdamW, packed rows; otherwise the published objective."""
    tree: dict[str, Any] = {
        "data": {"train": str(folder / "train"), "validation": str(folder / "validation")},
        "model": {"family": "bert", "overrides": SHAPE},
        "objective": {"sentences": "nsp", "packing": packing, "mask_fraction": 0.15, "pair_copies": 10},
        "train": {
            "steps": steps,
            "sequence_length": 128,
            "batch_rows": 32,
            "seed": seed,
            "eval_every_steps": max(steps // 8, 1),
            "device": "cpu",
        },
        "optimizer": {"name": "muon", "learning_rate": 3e-3, "matrix_learning_rate": 0.02, "beta2": 0.98},
        "schedule": {"kind": "linear", "warmup_steps": max(steps // 20, 1), "final_fraction": 0.0},
    }
    if target is not None:
        tree["target"] = {"figure": "mlm_accuracy", "value": target}
    return plan_run(resolve(build_recipe(tree, Recipe, RULES)))


def step_seconds(plan: RunPlan, steps: int = 6) -> float:
    """Seconds of a step of ours, the first left out."""
    trainer, rows, times = build_trainer(plan), training_rows(plan), []
    for step in range(steps):
        count = plan.recipe.train.rows_per_step
        batch = prepare(rows.batch(step * count, count), "bert", count, plan.device, torch.float32)
        start = time.perf_counter()
        train_step(trainer, batch, 0.01)
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


def our_curve(plan: RunPlan, run: Path) -> Curve:
    """Train with the product, and read the curve from its records."""
    train(plan, run, evaluators=[Validation(plan)])
    seconds, curve = 0.0, []
    for record in read_metrics(run):
        seconds += record.get("step_s", 0.0)
        if record.get("validation"):
            curve.append((seconds, record["validation"]["mlm_accuracy"]))
    return curve


def inputs(rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Our padded rows as transformers takes them, cut to the longest of the batch."""
    longest = int(rows["attention_mask"].sum(1).max())
    names = {
        "input_ids": "input_ids",
        "token_types": "token_type_ids",
        "attention_mask": "attention_mask",
        "targets": "labels",
    }
    cut = {
        theirs: torch.from_numpy(rows[ours][:, :longest].astype(np.int64)) for ours, theirs in names.items()
    }
    return cut | {"next_sentence_label": torch.from_numpy(rows["nsp_targets"])}


def their_curve(plan: RunPlan, rate: float, seconds: float) -> Curve:
    """transformers for so many seconds of training."""
    from transformers import BertConfig, BertForPreTraining

    config = plan.config
    torch.manual_seed(plan.recipe.train.seed)
    model = BertForPreTraining(
        BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward_size,
            max_position_embeddings=config.sequence_length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    data, count, spent, step = training_rows(plan), plan.recipe.train.rows_per_step, 0.0, 0
    curve: Curve = []
    while spent < seconds:
        batch = inputs(data.batch(step * count, count))
        start = time.perf_counter()
        share = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = rate * min(max(share, 0.001) / 0.05, 1 - share)
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent, step = spent + time.perf_counter() - start, step + 1
        if spent >= seconds * (len(curve) + 1) / EVALUATIONS:
            curve.append((spent, their_accuracy(model, plan)))
    return curve


@torch.no_grad()
def their_accuracy(model: Any, plan: RunPlan) -> float:
    """Over the rows that ours is judged on."""
    right = count = 0
    model.eval()
    for dataset in validation_rows(plan):
        for start in range(0, dataset.rows, 32):
            batch = inputs(dataset.batch(start, min(32, dataset.rows - start)))
            labels = batch.pop("labels")
            batch.pop("next_sentence_label")
            best = model(**batch).prediction_logits.argmax(-1)
            right += int(((best == labels) & (labels != IGNORED)).sum())
            count += int((labels != IGNORED).sum())
    model.train()
    return right / count


def unigram(plan: RunPlan) -> float:
    """Accuracy of always saying the most frequent token of the training text, on the validation text."""
    most = np.bincount(np.concatenate([store.read(0, store.tokens) for store in plan.train_stores])).argmax()
    ids = np.concatenate([store.read(0, store.tokens) for store in plan.validation_stores])
    return float((ids == most).mean())


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


def main() -> None:
    arguments = parser((__doc__ or "").split("\n")[0])
    arguments.add_argument("--minutes", type=float, default=20.0, help="of each run of transformers")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("runs/bert-toy"))
    args = arguments.parse_args()
    minutes, seeds = (0.5, 1) if args.quick else (args.minutes, args.seeds)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    make_stores(args.out)
    padded = make_plan(args.out, 0, 1000, packing=False)
    theirs = {str(rate): their_curve(padded, rate, 60 * minutes) for rate in RATES}
    best = max(theirs, key=lambda rate: max(accuracy for _, accuracy in theirs[rate]))
    target = max(accuracy for _, accuracy in theirs[best])
    baseline = unigram(padded)
    print(
        f"transformers: {target:.4f} at a rate of {best}; the most frequent token: {baseline:.4f}", flush=True
    )
    steps = max(int(60 * minutes / GOAL_TIME / step_seconds(make_plan(args.out, 0, 1000))), 20)
    ours = [
        our_curve(make_plan(args.out, seed, steps, target), args.out / f"seed-{seed}")
        for seed in range(seeds)
    ]
    curves = {"target": target, "baseline": baseline, "steps": steps, "transformers": theirs, "ours": ours}
    (args.out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    limit = 60 * minutes
    spent = [seconds_to(curve, target) for curve in ours]
    ratios = sorted(limit / seconds if seconds else 0.0 for seconds in spent)
    reached = sorted(max(accuracy for _, accuracy in curve) / baseline for curve in ours)
    middle = len(ratios) // 2
    claims = [
        Claim(
            "bert-toy-time",
            round(limit / ratios[middle], 1) if ratios[middle] else 0.0,
            f"transformers AdamW {best}",
            limit,
            "s",
            "lower",
            round(ratios[middle], 3),
            (round(ratios[0], 3), round(ratios[-1], 3)),
            GOAL_TIME,
            ratios[0] >= GOAL_TIME,
        ),
        Claim(
            "bert-toy-over-unigram",
            round(reached[middle] * baseline, 4),
            "the most frequent token",
            round(baseline, 4),
            "accuracy",
            "higher",
            round(reached[middle], 3),
            (round(reached[0], 3), round(reached[-1], 3)),
            GOAL_BASELINE,
            reached[0] >= GOAL_BASELINE,
        ),
    ]
    finish("bert_toy", claims, packages=("transformers",), minutes=minutes, steps=steps)


if __name__ == "__main__":
    main()
