"""A small BERT on novels, judged on other novels: seconds of training until transformers' masked-token accuracy.

    python benchmarks/bert_toy.py [--minutes 20] [--screen 0] [--seeds 3] [--out runs/bert-toy] [--quick]

transformers' BertForPreTraining trains with fused AdamW for so many minutes at each of three learning rates (linear
warm-up and decay over its time, post-norm as published, padded to the longest of a batch); its best accuracy is the
target. Ours is one recipe (below) for a third of that time. Both have the same text, pairs, masking, sizes and
validation rows, which our data stage makes, one thread, and fp32. Seconds are those of the processor, so that other
work on the machine counts for neither; evaluations are outside both times, and theirs have their batches made
beforehand. `--screen M` stops all rates but the best after M of the minutes; `--rest` takes the same directory up
again and runs the others to their end. The second claim is accuracy over always saying the most frequent token.
OUT/curves.json and the result have every curve, and OUT/seed-0 is the run whose checkpoint is judged elsewhere as a
trained BERT. `--quick` gives transformers three seconds at one learning rate, has one seed of ours, and trains and
judges both on the beginnings of two novels.
"""

import bz2
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, finish, parser, throughline
from throughline.core.files import write_atomic
from throughline.core.hardware import keep_freed_memory
from throughline.core.recipe import build_recipe
from throughline.train.build import RunPlan, build_trainer, plan_run, training_rows, validation_rows
from throughline.train.engine import Engine
from throughline.train.evaluate import Validation
from throughline.train.loop import train
from throughline.train.objective import IGNORED, prepare
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES
from throughline.train.step import train_step

NOVELS = Path(__file__).resolve().parents[1] / "recipes" / "samples" / "novels"
HELD_OUT = ("Doyle_Hound_1902.txt.bz2", "Trollope_Warden_1855.txt.bz2")
RATES = (3e-4, 1e-3, 3e-3)
QUICK_RATES, QUICK_MINUTES, QUICK_STEPS = RATES[1:2], 0.05, 15
QUICK_CHARACTERS = {"train": 300_000, "validation": 15_000}  # of one novel each
GOAL_TIME, GOAL_BASELINE = 3.0, 2.5
SHAPE = {"layers": 4, "width": 128, "heads": 2, "sequence_length": 128, "dropout": 0.0}
EVALUATIONS = 8  # of each run
MARGIN = 0.96  # of the third of their time that ours is planned to take
Curve = list[tuple[float, float]]  # seconds of training, masked-token accuracy


def novels(folder: Path, quick: bool) -> dict[str, list[Path]]:
    """The texts of the two stores; with `quick` the beginning of a novel for each, written to the folder."""
    kept = [path for path in sorted(NOVELS.glob("*.bz2")) if path.name not in HELD_OUT]
    texts = {"train": kept, "validation": [NOVELS / name for name in HELD_OUT]}
    if not quick:
        return texts
    for name, most in QUICK_CHARACTERS.items():
        with bz2.open(texts[name][0], "rt", encoding="utf-8") as file:
            text = file.read(most)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        texts[name] = [folder / f"{name}.txt"]
    return texts


def make_stores(folder: Path, quick: bool = False) -> None:
    """Two token stores of one WordPiece tokenizer, which has seen the training novels alone."""
    texts = novels(folder, quick)
    how = ("--documents", "file", "--unwrap")
    throughline(
        "data",
        "tokenizer",
        *texts["train"],
        *how,
        "--type",
        "wordpiece",
        "--vocab-size",
        4096,
        "--out",
        folder / "tok",
    )
    for name, paths in texts.items():
        made = ("--tokenizer", folder / "tok", "--sentences", "--out", folder / name)
        throughline("data", "tokenize", *paths, *how, *made)


def our_tree(seed: int, steps: int, theirs: bool = False) -> dict[str, Any]:
    """The recipe without its data; see `make_plan`."""
    return {
        "model": {"family": "bert", "overrides": SHAPE},
        "objective": {
            "sentences": "nsp",
            "packing": not theirs,
            "mask_fraction": 0.15 if theirs else 0.3,
            "pair_copies": 10,
        },
        "train": {
            "steps": steps,
            "sequence_length": 128,
            "batch_rows": 16 if theirs else 8,
            "seed": seed,
            "eval_every_steps": max(steps // 8, 1),
            "device": "cpu",
        },
        "optimizer": {"name": "muon", "learning_rate": 3e-3, "matrix_learning_rate": 0.02, "beta2": 0.98},
        "schedule": {"kind": "linear", "warmup_steps": max(steps // 20, 1), "final_fraction": 0.0},
    }


def make_plan(
    folder: Path, seed: int, steps: int, target: float | None = None, theirs: bool = False
) -> RunPlan:
    """Ours: hidden matrices by Muon, the rest by AdamW, packed rows, 30 % of the tokens masked. With `theirs` the
    batches of the peer, and what both are judged on: padded, 15 % masked, as published.
    """
    tree = our_tree(seed, steps, theirs)
    tree["data"] = {"train": str(folder / "train"), "validation": str(folder / "validation")}
    if target is not None:
        tree["target"] = {"figure": "mlm_accuracy", "value": target}
    return plan_run(resolve(build_recipe(tree, Recipe, RULES)))


def our_seconds(plan: RunPlan, steps: int = 60) -> tuple[float, float]:
    """Processor seconds of a step of ours, the first ones left out, and of finding the pairs of all rows."""
    keep_freed_memory()  # as training does
    begun = time.process_time()
    rows, found = training_rows(plan), time.process_time() - begun
    trainer, times = build_trainer(plan), []
    for step in range(steps):
        start = time.process_time()
        count = plan.recipe.train.rows_per_step
        batch = prepare(rows.batch(step * count, count), "bert", count, plan.device, 0.3)
        train_step(trainer, batch, 0.01)
        times.append(time.process_time() - start)
    return float(np.mean(times[5:])), found


class Judge:
    """Evaluator of a run of ours: the curve over its processor seconds, from the call of `train` on.

    `away` are the seconds that do not count: finding the pairs, which both sides do, and evaluations.
    """

    def __init__(self, plan: RunPlan, away: float) -> None:
        self.validation = Validation(plan)
        self.curve: Curve = []
        self.away, self.start = away, time.process_time()

    def __call__(self, engine: Engine, step: int) -> dict[str, float]:
        entered = time.process_time()
        figures = self.validation(engine, step)
        self.curve.append((round(entered - self.start - self.away, 2), figures["mlm_accuracy"]))
        self.away += time.process_time() - entered
        return figures


def our_curve(folder: Path, seed: int, steps: int, away: float, target: float | None = None) -> Curve:
    """Train with the product, which ends where it meets the target."""
    judge = Judge(make_plan(folder, 0, steps, theirs=True), away)
    train(make_plan(folder, seed, steps, target), folder / f"seed-{seed}", evaluators=[judge])
    return judge.curve


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


class Peer:
    """transformers' BertForPreTraining, trained with fused AdamW over so many seconds."""

    def __init__(self, plan: RunPlan, rate: float, seconds: float) -> None:
        from transformers import BertConfig, BertForPreTraining

        config = plan.config
        torch.manual_seed(plan.recipe.train.seed)
        self.plan, self.rate, self.seconds = plan, rate, seconds
        self.model = BertForPreTraining(
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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01, fused=True)
        self.rows, self.spent, self.step = training_rows(plan), 0.0, 0
        self.curve: Curve = []

    def until(self, share: float) -> None:
        """Train to this share of the time, looking at the accuracy on the way."""
        count = self.plan.recipe.train.rows_per_step
        while (done := self.spent / self.seconds) < share:
            batch = inputs(self.rows.batch(self.step * count, count))
            start = time.process_time()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(max(done, 0.001) / 0.05, 1 - done)
            self.model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.spent, self.step = self.spent + time.process_time() - start, self.step + 1
            if self.spent >= self.seconds * (len(self.curve) + 1) / EVALUATIONS:
                self.curve.append((round(self.spent, 2), their_accuracy(self.model, self.plan)))

    def save(self, path: Path) -> None:
        state = self.model.state_dict(), self.optimizer.state_dict(), self.spent, self.step, self.curve
        torch.save(state, path)

    def load(self, path: Path) -> None:
        model, optimizer, self.spent, self.step, self.curve = torch.load(path, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


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
    most = np.bincount(np.concatenate([store.read(0, store.tokens) for store in plan.corpus.train])).argmax()
    ids = np.concatenate([store.read(0, store.tokens) for store in plan.corpus.validation])
    return float((ids == most).mean())


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


def run_theirs(folder: Path, record: dict[str, Any], rates: Sequence[float], share: float) -> None:
    """Bring these rates to a share of the time, from where they were left."""
    plan = make_plan(folder, 0, 1000, theirs=True)
    for rate in rates:
        peer, state = Peer(plan, rate, 60 * record["minutes"]), folder / f"transformers-{rate}.pt"
        if state.exists():
            peer.load(state)
        peer.until(share)
        peer.save(state)
        record["transformers"][str(rate)] = peer.curve
        keep(folder, record)


def keep(folder: Path, record: dict[str, Any]) -> None:
    """Write curves.json."""
    write_atomic(folder / "curves.json", json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["transformers"]), json.dumps(record["ours"]), flush=True)


def best_rate(record: dict[str, Any]) -> float:
    tried = [rate for rate in RATES if str(rate) in record["transformers"]]
    return max(tried, key=lambda rate: record["transformers"][str(rate)][-1][1])


def measure(folder: Path, minutes: float, screen: float, seeds: int, quick: bool) -> dict[str, Any]:
    """All runs, one of ours first; after `screen` minutes only the best of their rates goes on."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_stores(folder, quick)
    steps, pairs = our_steps(folder, minutes, QUICK_STEPS if quick else 60)
    baseline = unigram(make_plan(folder, 0, steps))
    record: dict[str, Any] = {"minutes": minutes, "screen_minutes": screen, "steps": steps}
    record |= {"baseline": baseline, "transformers": {}, "ours": [our_curve(folder, 0, steps, pairs)]}
    keep(folder, record)
    run_theirs(folder, record, QUICK_RATES if quick else RATES, screen / minutes if screen else 1.0)
    run_theirs(folder, record, [best_rate(record)], 1.0)
    for seed in range(1, seeds):
        record["ours"].append(our_curve(folder, seed, steps, pairs))
        keep(folder, record)
    return record


def our_steps(folder: Path, minutes: float, timed: int = 60) -> tuple[int, float]:
    """Steps of ours that fit in a third of their time, and seconds of finding the pairs, which do not count."""
    seconds, pairs = our_seconds(make_plan(folder, 0, 1000), timed)
    return max(int(MARGIN * 60 * minutes / GOAL_TIME / seconds), 20), pairs


def run_ours(folder: Path, record: dict[str, Any], seeds: int) -> None:
    """Our runs once more, beside their curves."""
    record["steps"], pairs = our_steps(folder, record["minutes"])
    record["ours"] = []
    for seed in range(seeds):
        shutil.rmtree(folder / f"seed-{seed}", ignore_errors=True)
        record["ours"].append(our_curve(folder, seed, record["steps"], pairs))
        keep(folder, record)


def claims_of(record: dict[str, Any]) -> list[Claim]:
    """Time to their best accuracy, and accuracy over the baseline: the ratios are those of our worst seed."""
    best, limit, baseline = best_rate(record), 60 * record["minutes"], record["baseline"]
    target = max(accuracy for _, accuracy in record["transformers"][str(best)])
    spent = [seconds_to(curve, target) for curve in record["ours"]]
    times = sorted(limit / seconds if seconds else 0.0 for seconds in spent)
    reached = sorted(max(accuracy for _, accuracy in curve) / baseline for curve in record["ours"])
    slowest = round(limit / times[0], 1) if times[0] else 0.0
    peer = f"transformers AdamW {best}: {target:.4f} in {record['minutes']:g} minutes"
    over = (
        round(reached[0] * baseline, 4),
        "the most frequent token",
        round(baseline, 4),
        "accuracy",
        "higher",
    )
    return [
        Claim("bert-toy-time", slowest, peer, limit, "s", "lower", *judged(times, GOAL_TIME)),
        Claim("bert-toy-over-unigram", *over, *judged(reached, GOAL_BASELINE)),
    ]


def judged(ratios: list[float], goal: float) -> tuple[float, tuple[float, float], float, bool]:
    """Ratio, spread, goal and met, of ratios in order."""
    low, high = round(ratios[0], 3), round(ratios[-1], 3)
    return low, (low, high), goal, low >= goal


def main() -> None:
    arguments = parser((__doc__ or "").split("\n")[0])
    arguments.add_argument("--minutes", type=float, default=20.0, help="of each run of transformers")
    arguments.add_argument(
        "--screen", type=float, default=0.0, help="minutes after which only their best rate goes on; 0 = all"
    )
    arguments.add_argument("--rest", action="store_true", help="only bring the other rates to their end")
    arguments.add_argument("--again", action="store_true", help="only ours, beside their curves as they are")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--out", type=Path, default=Path("runs/bert-toy"))
    args = arguments.parse_args()
    torch.set_num_threads(1)
    if args.rest or args.again:
        record = json.loads((args.out / "curves.json").read_text())
        if args.rest:
            run_theirs(args.out, record, RATES, 1.0)
            record["screen_minutes"] = 0.0
            keep(args.out, record)
        if args.again:
            run_ours(args.out, record, args.seeds)
    else:
        if args.quick:
            args.minutes, args.screen, args.seeds = QUICK_MINUTES, 0.0, 1
        record = measure(args.out, args.minutes, args.screen, args.seeds, args.quick)
    facts = {name: value for name, value in record.items() if name != "baseline"}
    finish("bert_toy", claims_of(record), packages=("transformers",), threads=1, **facts)


if __name__ == "__main__":
    main()
