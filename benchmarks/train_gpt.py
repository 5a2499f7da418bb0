"""Training speed and quality of a small GPT against nanoGPT and transformers, on the same text.

    python benchmarks/train_gpt.py --nanogpt PATH_OF_CHECKOUT [--quick] [--parts tokens,loss,novel,gpt124]

tokens  nanoGPT's CPU configuration (4 layers, 4 heads, width 128, context 64, batch 12, fp32): tokens/s of ours,
        of nanoGPT's train.py and of the transformers Trainer, from the times that each writes down for its
        steps
loss    time from command to result until nanoGPT's loss after its 2,000 steps: train.py against gpt-shakespeare-fast,
        with an empty compile cache; both models scored by one function on the whole validation split, three
        seeds
novel   the same two commands, untouched, on a novel
gpt124  GPT-2 124M, 4 x 256 and 1 x 1024 tokens a step: tokens/s against transformers, its faster mode

Ours of `loss`, `novel` and `gpt124`, and the peer of `gpt124`, compute in bf16, on a processor without bf16 products
in fp32.

A run of ours that does not reach nanoGPT's loss counts as ratio 0.

--quick runs every part once, both sides on one thread: 12 steps for tokens/s, 20 of nanoGPT against 10 of ours for the
loss, the first 200,000 characters of each text, and gpt124 with 1 layer of 64.
"""

import bz2
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from common import Claim, claim, existing, finish, paired, parser, run, throughline
from throughline.core.hardware import machine

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "recipes" / "samples"
RECIPE = ROOT / "recipes" / "gpt-shakespeare-fast.toml"
PEERS = Path(__file__).parent / "train_gpt_peers.py"
CONTEXT = 64
NANOGPT = [  # the command of its README for a CPU
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--eval_iters=20",
    "--log_interval=1",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
]
LIKE_NANOGPT = {
    "model.preset": "gpt-shakespeare",
    "train.precision": "fp32",
    "train.batch_rows": "12",
    "train.compile": "off",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": "1e-3",
    "optimizer.beta2": "0.99",
    "log.every_steps": "1",
}

PRECISION = "bf16" if "bf16" in machine().cpu.dtypes else "fp32"
NO_WARM_UP = {"schedule.warmup_steps": 0}  # of runs too short for the recipe's
QUICK_CHARACTERS = 200_000
GPT124_ROWS = ((4, 256, 1.3), (1, 1024, 1.2))  # rows, length, goal
QUICK_SHAPE = {"layers": 1, "width": 64, "heads": 1}  # of gpt124


def gpt124(rows: int, length: int, precision: str = "bf16") -> dict[str, object]:
    """Changes of RECIPE for GPT-2 124M, without the number of steps."""
    return {
        "model.preset": "gpt2-124m",
        "train.sequence_length": length,
        "train.batch_rows": rows,
        "train.precision": precision,
        "train.compile": os.environ.get("GPT124_COMPILE", "off"),
        "optimizer.name": "adamw",
        "data.validation_fraction": 0,
        "log.every_steps": 1,
    }


def prepare(text: str, directory: Path, nanogpt: Path) -> Path:
    """A directory in which both can train on this text: our token store, and nanoGPT's files with its ids
    beside its code.
    """
    directory.mkdir()
    (directory / "text.txt").write_text(text, encoding="utf-8")
    throughline(
        "data",
        "tokenizer",
        "text.txt",
        "--documents",
        "file",
        "--type",
        "char",
        "--out",
        "tok",
        cwd=directory,
    )
    throughline(
        "data",
        "tokenize",
        "text.txt",
        "--documents",
        "file",
        "--no-eos",
        "--tokenizer",
        "tok",
        "--out",
        "tokens",
        cwd=directory,
    )
    data = directory / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for file in ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_bytes((nanogpt / file).read_bytes())
    ids = their_ids(text)
    cut = int(len(ids) * 0.9)
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    import pickle  # the only form in which train.py takes the size of a vocabulary

    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": int(ids.max()) + 1}))
    return directory


def their_ids(text: str) -> np.ndarray:
    """Characters numbered in sorted order, as nanoGPT's prepare.py does."""
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return np.array([number[character] for character in text], np.uint16)


def train_ours(place: Path, name: str, settings: dict[str, object]) -> float:
    """Wall seconds of one `throughline train`, with an empty compile cache."""
    changed = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        throughline(
            "train",
            RECIPE,
            "--set",
            "data.train=tokens",
            "--run-dir",
            name,
            *changed,
            cwd=place,
            TORCHINDUCTOR_CACHE_DIR=cache,
        )
        return time.perf_counter() - start


def train_nanogpt(place: Path, name: str, steps: int, seed: int) -> tuple[float, str]:
    """Wall seconds and output of one run of its train.py; its fixed seed is moved, nothing else."""
    seeded = (
        "import runpy, sys, torch; real = torch.manual_seed; "
        f"torch.manual_seed = lambda seed: real(seed + {1000 * seed}); sys.argv = ['train.py'] + sys.argv[1:]; "
        "sys.path.insert(0, '.'); runpy.run_path('train.py', run_name='__main__')"
    )
    lengths = [f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--out_dir={name}"]
    if steps < 250:  # its own interval, after which it writes a checkpoint
        lengths.append(f"--eval_interval={steps}")
    start = time.perf_counter()
    text = run([sys.executable, "-c", seeded, *NANOGPT, *lengths], place)
    return time.perf_counter() - start, text


def step_seconds_ours(run_dir: Path, skip: int) -> float:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_s"] for record in records[skip:] if "step_s" in record)


def step_seconds_nanogpt(text: str, skip: int) -> float:
    lines = [line for line in text.splitlines() if line.startswith("iter ")]
    return statistics.median(float(line.split("time ")[1].split("ms")[0]) / 1000 for line in lines[skip:])


def score(logits: Callable, ids: np.ndarray) -> float:
    """Mean cross-entropy per character over all whole windows of 64, side by side: the one function that
    judges both.
    """
    import torch

    windows = (len(ids) - 1) // CONTEXT
    stream = torch.from_numpy(ids.astype(np.int64))
    inputs, targets = (
        stream[: windows * CONTEXT].view(-1, CONTEXT),
        stream[1 : windows * CONTEXT + 1].view(-1, CONTEXT),
    )
    total = 0.0
    with torch.inference_mode():
        for x, y in zip(inputs.split(256), targets.split(256), strict=True):
            total += torch.nn.functional.cross_entropy(
                logits(x).flatten(0, 1).float(), y.flatten(), reduction="sum"
            ).item()
    return total / targets.numel()


def score_ours(run_dir: Path, text: str) -> float:
    from throughline.data.tokenizer import Tokenizer
    from throughline.train.checkpoints.checkpoint import load_model

    model, tokenizer = load_model(run_dir)
    assert tokenizer is not None
    return score(model, Tokenizer.load(tokenizer).encode(text[int(len(text) * 0.9) :]))


def score_nanogpt(place: Path, name: str, text: str) -> float:
    import importlib.util

    import torch

    spec = importlib.util.spec_from_file_location("nanogpt_model", place / "model.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    saved = torch.load(place / name / "ckpt.pt", map_location="cpu", weights_only=True)
    model = theirs.GPT(theirs.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    # without targets it computes the last position only; any targets make it give all logits
    return score(lambda x: model(x, x)[0], their_ids(text)[int(len(text) * 0.9) :])


def tokens_claims(place: Path, pairs: int, steps: int) -> list[Claim]:
    """Steps of the same shape and dtype."""
    skip, tokens = steps // 4, 12 * CONTEXT
    count = iter(range(1000))

    def ours() -> float:
        name = f"tokens-{next(count)}"
        lengths = {"train.steps": steps, "schedule.decay_steps": min(steps, 120)}
        train_ours(place, name, LIKE_NANOGPT | NO_WARM_UP | lengths)
        return tokens / step_seconds_ours(place / name, skip)

    def nanogpt() -> float:
        return tokens / step_seconds_nanogpt(train_nanogpt(place, "tokens", steps, 0)[1], skip)

    def trainer() -> float:
        return tokens / float(
            run([sys.executable, PEERS, "trainer", place / "data", steps, skip], place).split()[-1]
        )

    common = {"unit": "tokens/s", "better": "higher"}
    return [
        claim(
            "gpt-tokens-vs-nanogpt",
            *paired(ours, nanogpt, pairs),
            peer="nanoGPT train.py, fp32",
            goal=1.3,
            **common,
        ),
        claim(
            "gpt-tokens-vs-trainer",
            *paired(ours, trainer, pairs),
            peer="transformers Trainer, fp32",
            goal=1.5,
            **common,
        ),
    ]


def loss_claim(
    name: str, place: Path, text: str, seeds: int, goal: float, quick: bool
) -> tuple[Claim, list[dict]]:
    """Time to nanoGPT's loss after its 2,000 steps, one pair a seed; `quick` stops both early, and ours is eager."""
    steps = 20 if quick else 2000
    short = {"train.steps": 10, "schedule.decay_steps": 10} | NO_WARM_UP if quick else {}
    ours_s, theirs_s, details = [], [], []
    for seed in range(seeds):
        run_name = f"{name}-{seed}"
        seconds = train_ours(place, run_name, {"train.seed": seed, "train.precision": PRECISION} | short)
        their_seconds, _ = train_nanogpt(place, f"nano-{run_name}", steps, seed)
        ours, theirs = score_ours(place / run_name, text), score_nanogpt(place, f"nano-{run_name}", text)
        details.append(
            {
                "seed": seed,
                "ours_loss": round(ours, 4),
                "theirs_loss": round(theirs, 4),
                "ours_s": round(seconds, 1),
                "theirs_s": round(their_seconds, 1),
            }
        )
        print(details[-1], file=sys.stderr)
        ours_s.append(seconds if ours <= theirs else float("inf"))
        theirs_s.append(their_seconds)
    made = claim(
        name, ours_s, theirs_s, peer=f"nanoGPT train.py, {steps} steps", unit="s", better="lower", goal=goal
    )
    return made, details


def gpt124_claims(
    directory: Path, pairs: int, steps: int, kinds: Sequence[str], shape: dict[str, int]
) -> list[Claim]:
    """GPT-2 124M, or of another `shape`, on Shakespeare in GPT-2's tokens, against the fastest of these
    kinds of transformers.
    """
    directory.mkdir()
    throughline("data", "tokenizer", SAMPLES / "gpt2-bpe", "--type", "import", "--out", "tok", cwd=directory)
    corpus = SAMPLES / "tinyshakespeare" / "input.txt"
    throughline(
        "data",
        "tokenize",
        corpus,
        "--documents",
        "block",
        "--tokenizer",
        "tok",
        "--out",
        "tokens",
        cwd=directory,
    )
    claims = []
    overrides = {f"model.overrides.{key}": value for key, value in shape.items()}
    for rows, length, goal in GPT124_ROWS:
        count = iter(range(1000))
        base = gpt124(rows, length, PRECISION) | overrides | NO_WARM_UP
        base |= {"train.steps": steps, "schedule.decay_steps": steps}

        def ours(length=length, base=base, count=count) -> float:
            name = f"gpt124-{length}-{next(count)}"
            train_ours(directory, name, base)
            return 1024 / step_seconds_ours(directory / name, 3)

        def transformers(kind: str, rows=rows, length=length) -> float:
            return 1024 / float(
                run(
                    [sys.executable, PEERS, kind, PRECISION, rows, length, steps, *shape.values()], directory
                ).split()[-1]
            )

        best = max(kinds, key=transformers) if len(kinds) > 1 else kinds[0]
        mine, theirs = paired(ours, lambda best=best, ask=transformers: ask(best), pairs)
        how = " autocast" if PRECISION == "bf16" else ""
        peer = f"transformers GPT2LMHeadModel, {best}, {PRECISION}{how}, fused AdamW"
        name = f"gpt124-{length}-vs-transformers"
        claims.append(claim(name, mine, theirs, peer=peer, unit="tokens/s", better="higher", goal=goal))
    return claims


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--nanogpt", type=existing, required=True, help="a checkout of karpathy/nanoGPT")
    options.add_argument(
        "--novel", type=existing, default=SAMPLES / "novels" / "Cbronte_Jane_1847.txt.bz2", help="a .txt.bz2"
    )
    options.add_argument("--parts", default="tokens,loss,novel,gpt124", help="what to measure")
    options.add_argument("--seeds", type=int, default=3, help="pairs of runs to a loss")
    options.add_argument("--pairs", type=int, default=3, help="pairs of tokens a second")
    chosen = options.parse_args()
    parts, quick = chosen.parts.split(","), chosen.quick
    if quick:
        os.environ["OMP_NUM_THREADS"] = "1"  # of every run below: two quick benchmarks share the cores
    claims: list[Claim] = []
    details: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        shakespeare = (SAMPLES / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
        novel = bz2.decompress(chosen.novel.read_bytes()).decode("utf-8").replace("\r\n", "\n")
        if quick:
            shakespeare, novel = shakespeare[:QUICK_CHARACTERS], novel[:QUICK_CHARACTERS]
        place = prepare(shakespeare, Path(scratch) / "shakespeare", chosen.nanogpt)
        if "tokens" in parts:
            claims += tokens_claims(place, 1 if quick else chosen.pairs, 12 if quick else 200)
        seeds = 1 if quick else chosen.seeds
        if "loss" in parts:
            made, details["loss"] = loss_claim("gpt-time-to-loss", place, shakespeare, seeds, 8.0, quick)
            claims.append(made)
        if "novel" in parts:
            place = prepare(novel, Path(scratch) / "novel", chosen.nanogpt)
            made, details["novel"] = loss_claim("gpt-time-to-loss-novel", place, novel, seeds, 8.0, quick)
            claims.append(made)
        if "gpt124" in parts:
            pairs, steps, kinds = (1, 4, ("eager",)) if quick else (chosen.pairs, 8, ("eager", "compiled"))
            shape = QUICK_SHAPE if quick else {}
            claims += gpt124_claims(Path(scratch) / "gpt124", pairs, steps, kinds, shape)
    finish("train_gpt", claims, packages=("transformers",), details=details)


if __name__ == "__main__":
    main()
