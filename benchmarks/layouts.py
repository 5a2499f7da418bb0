"""Steps of each two-process layout against torch's own parts in the same layout.

    python benchmarks/layouts.py [--quick] [--parts ddp2,tp2-bf16] [--tiny]

A GPT as wide as GPT-2 124M (768, 12 heads) with 4 layers, its vocabulary and a head of its own, 4 rows of 256
tokens a step, one thread a process, in fp32 and in bf16 with fp32 masters. Ours is `throughline launch
--nproc 2 -- train`, theirs `torchrun layouts_peers.py`: the same model, first values, rows, matrix products
and loss under DistributedDataParallel, fully_shard, torch's tensor-parallel plan or
torch.distributed.pipelining, so that only the layout differs. Both clip the gradient, move with fused AdamW
and read the loss at every step. The losses of both must agree, or nothing is measured. Of several ways to
write a peer the fastest is measured.

`details` gives the share of a step in which a collective is under way on the first process, from a trace of
each side; what is hidden behind products is in it, and so is the wait of a pipeline's receive for its sender.
`--tiny` takes a model of two small layers: it shows that both sides agree, and its times say nothing.
`--quick` takes it too, rows of 32 tokens, fewer steps, the first way to write a peer and no traces; the
processes of both sides are forked from this one instead of launched, because their start is most of such a run.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from common import claim, finish, paired, parser, throughline
from throughline.core.recipe import load_recipe
from throughline.prove.forked import run_ranks, warm
from throughline.train.logs.profile import ACTIVE, SKIPPED, WARMUP
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES
from train_gpt import SAMPLES

PEERS = Path(__file__).parent / "layouts_peers.py"
PROCESSES = 2
SHAPE: dict[str, object] = {  # of every case, as keys of a recipe
    "version": 1,
    "data.train": "tokens",
    "data.validation_fraction": 0,
    "model.preset": "gpt2-124m",
    "model.overrides.layers": 4,
    "model.overrides.tied": False,
    "train.sequence_length": 256,
    "train.batch_rows": 4,
    "train.compile": "off",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.0,
    "schedule.kind": "constant",
    "log.every_steps": 1,
}
TINY: dict[str, object] = {"model.overrides.layers": 2, "model.overrides.width": 96}
QUICK: dict[str, object] = {"train.sequence_length": 32}  # most of a tiny step is its head
CASES: dict[str, dict[str, object]] = {
    "ddp2": {"train.precision": "fp32", "parallel.data": 2},
    "fsdp2": {"train.precision": "fp32", "parallel.data": 2, "parallel.sharding": "full"},
    "tp2": {"train.precision": "fp32", "parallel.tensor": 2},
    "pp2": {"train.precision": "fp32", "parallel.pipeline": 2, "train.micro_batch_rows": 1},
    "ddp2-bf16": {"train.precision": "bf16", "parallel.data": 2},
    "fsdp2-bf16": {"train.precision": "bf16", "parallel.data": 2, "parallel.sharding": "full"},
    "tp2-bf16": {"train.precision": "bf16", "parallel.tensor": 2},
    "pp2-bf16": {"train.precision": "bf16", "parallel.pipeline": 2, "train.micro_batch_rows": 1},
}
PEERS_OF: dict[str, tuple[str, ...]] = {  # where there is more than one way to write it
    "tp2": ("tp2", "tp2-sequence"),
    "tp2-bf16": ("tp2", "tp2-sequence"),
    "ddp2-bf16": ("ddp2", "ddp2-autocast"),
}
# Largest relative difference of a loss: rounding to 24 and to 8 bits, over a dozen steps of AdamW, which
# moves a weight by the sign of its gradient at first, however small that is
AGREE = {"fp32": 1e-4, "bf16": 5e-3}


def recipe_text(settings: dict[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def ours(place: Path, recipe: Path, name: str, *flags: str) -> tuple[list[float], list[float]]:
    """Losses, and seconds of the steps, of a run in place/name."""
    command = ("launch", "--nproc", PROCESSES, "--", "train", recipe, "--run-dir", name, *flags)
    throughline(*command, cwd=place)
    return steps_of(place / name)


def steps_of(run: Path) -> tuple[list[float], list[float]]:
    """Losses, and seconds of the steps, that a run of ours wrote down."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    records = [record for record in lines if "step_s" in record]
    return [record["loss"] for record in records], [record["step_s"] for record in records]


def theirs(place: Path, recipe: Path, kind: str, *flags: object) -> tuple[list[float], list[float]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", PROCESSES]
    words = [str(word) for word in (*torchrun, PEERS, kind, recipe, *flags)]
    done = subprocess.run(words, cwd=place, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr[-6000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return told["losses"], told["step_s"]


def forked(
    place: Path, file: Path, name: str, kind: str
) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """What `ours` and `theirs` return, from processes forked from this one."""
    import torch
    from layouts_peers import measure
    from throughline.train.build import plan_run
    from throughline.train.loop import train

    given = load_recipe(file, Recipe, (), RULES)
    with chdir(place):
        recipe = resolve(given)

    def our_rank() -> None:
        torch.set_num_threads(1)
        train(plan_run(recipe), place / name)

    def their_rank() -> tuple[list[float], list[float]]:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        return measure(kind, recipe)

    run_ranks(PROCESSES, our_rank)
    return steps_of(place / name), run_ranks(PROCESSES, their_rank)[0]


def agree(mine: Sequence[float], peer: Sequence[float], bound: float, name: str) -> float:
    """The largest relative difference of two runs' losses. Ends the benchmark above the bound."""
    worst = max(abs(a - b) / b for a, b in zip(mine, peer, strict=True))
    if worst > bound:
        raise SystemExit(f"{name}: losses differ by {worst:.1e}, more than {bound:g}\n{mine}\n{peer}")
    return worst


def collective_share(trace: Path) -> float:
    """The share of the traced steps in which a collective was under way."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep")]
    first = min(event["ts"] for event in steps)
    last = max(event["ts"] + event["dur"] for event in steps)
    spans = sorted(
        (max(event["ts"], first), min(event["ts"] + event["dur"], last))
        for event in events
        if re.match(r"gloo:|nccl:|c10d::", event["name"])
    )
    busy, reached = 0.0, first
    for start, end in spans:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return busy / (last - first)


def main() -> None:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--parts", default=",".join(CASES), help="cases to measure")
    options.add_argument(
        "--tiny", action="store_true", help="two small layers: agreement only; --quick has them too"
    )
    options.add_argument(
        "--pairs", type=int, default=3, help="paired measurements; 0: the runs that must agree are the pair"
    )
    chosen = options.parse_args()
    parts = chosen.parts.split(",")
    if unknown := set(parts) - set(CASES):
        options.error(f"--parts: there is no {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    chosen.tiny |= chosen.quick
    steps, skip = (4, 1) if chosen.quick else (12, 3)
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.quick:
        warm()
    claims, details = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        throughline("data", "tokenizer", SAMPLES / "gpt2-bpe", "--type", "import", "--out", "tok", cwd=place)
        text = SAMPLES / "tinyshakespeare" / "input.txt"
        throughline(
            "data",
            "tokenize",
            text,
            "--documents",
            "block",
            "--tokenizer",
            "tok",
            "--out",
            "tokens",
            cwd=place,
        )
        for name in parts:
            settings = SHAPE | (TINY if chosen.tiny else {}) | (QUICK if chosen.quick else {}) | CASES[name]
            recipe, traced = place / f"{name}.toml", place / f"{name}-traced.toml"
            recipe.write_text(recipe_text(settings | {"train.steps": steps}))
            traced.write_text(recipe_text(settings | {"train.steps": SKIPPED + WARMUP + ACTIVE}))
            bound = AGREE[str(CASES[name]["train.precision"])]
            kinds = PEERS_OF.get(name, (name.partition("-")[0],))
            if chosen.quick:
                (mine, seconds), peer = forked(place, recipe, f"{name}-agrees", kinds[0])
                tried = {kinds[0]: peer}
            else:
                tried = {kind: theirs(place, recipe, kind) for kind in kinds}
                mine, seconds = ours(place, recipe, f"{name}-agrees")
            best = min(tried, key=lambda kind: statistics.median(tried[kind][1][skip:]))
            differences = {kind: agree(mine, tried[kind][0], bound, f"{name}, {kind}") for kind in tried}
            details[name] = {"peer": best, "losses_differ": differences}
            if chosen.quick or not chosen.pairs:
                first, second = (
                    [statistics.median(seconds[skip:])],
                    [statistics.median(tried[best][1][skip:])],
                )
            else:
                count = iter(range(1000))
                first, second = paired(
                    lambda: statistics.median(ours(place, recipe, f"{name}-{next(count)}")[1][skip:]),  # noqa: B023
                    lambda: statistics.median(theirs(place, recipe, best)[1][skip:]),  # noqa: B023
                    chosen.pairs,
                )
                ours(place, traced, f"{name}-traced", "--profile")
                theirs(place, traced, best, "--trace", place / f"{name}.json")
                details[name] |= {
                    "collectives_ours": round(
                        collective_share(place / f"{name}-traced/profile/trace.json"), 3
                    ),
                    "collectives_theirs": round(collective_share(place / f"{name}.json"), 3),
                }
            print(name, details[name], file=sys.stderr, flush=True)
            what = f"torch's {best} over our model, {CASES[name]['train.precision']}, fused AdamW"
            claims.append(
                claim(
                    name,
                    first,
                    second,
                    peer=what,
                    unit="s/step",
                    better="lower",
                    goal=None if chosen.tiny else 1.0,
                )
            )
    finish("layouts", claims, details=details)


if __name__ == "__main__":
    main()
