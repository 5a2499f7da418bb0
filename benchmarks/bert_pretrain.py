"""BERT pretraining, one step of masked tokens and sentence pairs: sequences a second against transformers.

    python benchmarks/bert_pretrain.py [--quick] [--parts bert-128,bert-128-fp32,...]

Both train BERT-Base with fused AdamW on the same sequences, whose lengths are drawn from one published histogram of
Wikipedia (wikipedia_lengths.json). transformers' BertForPreTraining gets them from its own collator, padded to the
longest of the batch, eager or compiled, whichever is faster; ours leave the padding out. `bert-128` cuts each
sequence into pieces of at most 128 tokens; `bert-full-rows` has rows of 512 without any padding. Each claim in bf16,
and in fp32 as a row of its own. `--quick` has 2 layers of width 128, a sixth of the sequences, one measurement of each
side, one thread and no compiled form.
"""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Claim, claim, finish, paired, parser
from throughline.core.hardware import keep_freed_memory
from throughline.core.recipe import build_recipe
from throughline.models.config import ModelConfig, preset
from throughline.planner.layout import Layout
from throughline.train.engine import Engine
from throughline.train.objective import IGNORED, StepBatch, prepare
from throughline.train.optimizers.build import build_optimizer
from throughline.train.parallel.mesh import Mesh
from throughline.train.recipes.recipe import Recipe
from throughline.train.step import LossScaler, Trainer, train_step

GOALS = {"bert-128": 2.0, "bert-512": 2.5, "bert-full-rows": 1.3}
PARTS = [f"{part}{end}" for part in GOALS for end in ("", "-fp32")]
TOKENS = 3072  # real ones in a step, about
SHAPE = {"layers": 12, "dropout": 0.0}
QUICK_SHAPE = SHAPE | {"layers": 2, "width": 128, "heads": 2}
CLS, SEP, MASK, FIRST_WORD = 101, 102, 103, 1000
VOCABULARY = 30522
MASK_RATE = 0.15


def draw_lengths(part: str, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Lengths of sequences that have about so many tokens together."""
    if part == "bert-full-rows":
        return np.full(tokens // 512, 512)
    table = json.loads((Path(__file__).parent / "wikipedia_lengths.json").read_text())
    counts = np.array([*table["counts"], table["full_count"]])
    lengths: list[int] = []
    while sum(lengths) < tokens:
        place = generator.choice(len(counts), p=counts / counts.sum())
        size = table["bin"]
        low = place * size
        length = (
            512 if place == len(counts) - 1 else int(low + generator.integers(1, size + (low + size < 512)))
        )
        length = max(length, 8)
        if part == "bert-512":
            lengths.append(length)
        else:
            lengths += [128] * (length // 128) + ([length % 128] if length % 128 >= 8 else [])
    return np.array(lengths)


def sequences(lengths: np.ndarray, generator: np.random.Generator) -> list[dict[str, Any]]:
    """[CLS] A [SEP] B [SEP] of random words, with the label of the pair."""
    made = []
    for length in lengths:
        ids = generator.integers(FIRST_WORD, VOCABULARY, length)
        middle = int(length) // 2
        ids[0], ids[middle], ids[-1] = CLS, SEP, SEP
        types = (np.arange(length) > middle).astype(np.int64)
        made.append({"ids": ids, "types": types, "label": int(generator.integers(2))})
    return made


def our_batch(rows: list[dict[str, Any]], generator: np.random.Generator) -> StepBatch:
    """Our batch of these sequences: masked as ours are, padding left out."""
    count, longest = len(rows), max(len(row["ids"]) for row in rows)
    batch = {
        "input_ids": np.zeros((count, longest), np.int64),
        "targets": np.full((count, longest), IGNORED),
        "token_types": np.zeros((count, longest), np.int64),
        "attention_mask": np.zeros((count, longest), bool),
        "nsp_targets": np.array([row["label"] for row in rows]),
    }
    for place, row in enumerate(rows):
        size = len(row["ids"])
        masked = (generator.random(size) < MASK_RATE) & (row["ids"] >= FIRST_WORD)
        batch["input_ids"][place, :size] = np.where(masked, MASK, row["ids"])
        batch["targets"][place, :size] = np.where(masked, row["ids"], IGNORED)
        batch["token_types"][place, :size] = row["types"]
        batch["attention_mask"][place, :size] = True
    return prepare(batch, "bert", count, torch.device("cpu"), MASK_RATE, True)


def ours(config: ModelConfig, rows: list[dict[str, Any]], precision: str) -> Callable[[], float]:
    """A function that makes one step and returns its sequences a second."""
    device = torch.device("cpu")
    section = {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.01}
    train = {"steps": 1, "sequence_length": 512, "batch_rows": 1, "precision": precision}
    recipe = build_recipe({"train": train, "optimizer": section}, Recipe)
    engine = Engine(config, Mesh(Layout(), device), precision)
    engine.fill()
    trainer = Trainer(engine, build_optimizer(engine, recipe), LossScaler.of(precision), precision, 1.0)
    batch = our_batch(rows, np.random.default_rng(1))

    def step() -> float:
        start = time.perf_counter()
        result = train_step(trainer, batch, 1.0)
        assert math.isfinite(result.loss)
        return len(rows) / (time.perf_counter() - start)

    step()  # makes the optimizer's state
    return step


def theirs(
    config: ModelConfig, rows: list[dict[str, Any]], precision: str, compiled: bool
) -> Callable[[], float]:
    """The same with transformers, its collator's batch made beforehand."""
    import tokenizers
    from transformers import (
        BertConfig,
        BertForPreTraining,
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
    )

    words = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"w{i}" for i in range(len(words), VOCABULARY)]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, **{f"{role}_token": word for role, word in roles.items()}
    )
    torch.manual_seed(1)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASK_RATE)
    batch = collator(
        [
            {"input_ids": row["ids"], "token_type_ids": row["types"], "next_sentence_label": row["label"]}
            for row in rows
        ]
    )
    shape = BertConfig(
        num_hidden_layers=config.layers,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        vocab_size=VOCABULARY,
    )
    model = BertForPreTraining(shape).train()
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = call(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(loss.item())
        return len(rows) / (time.perf_counter() - start)

    step()
    return step


def measure(name: str, quick: bool) -> tuple[Claim, float]:
    """The claim, and the share of padding in the peer's batch."""
    generator = np.random.default_rng(7)
    part, precision = name.removesuffix("-fp32"), "fp32" if name.endswith("-fp32") else "bf16"
    tokens, pairs, tries = (TOKENS // 6, 1, 1) if quick else (TOKENS, 3, 2)
    config = preset("bert-base", **(QUICK_SHAPE if quick else SHAPE))
    lengths = draw_lengths(part, tokens, generator)
    rows = sequences(lengths, generator)
    padding = 1 - lengths.sum() / (len(lengths) * lengths.max())
    forms = {"eager": partial(theirs, config, rows, precision, False)}
    if not quick:
        forms["compiled"] = partial(theirs, config, rows, precision, True)
    steps = {name: make() for name, make in forms.items()}
    rates = {form: max(step() for _ in range(tries)) for form, step in steps.items()}
    best = max(rates, key=lambda form: rates[form])
    print(
        f"{name}: transformers " + ", ".join(f"{form} {rate:.3f}" for form, rate in rates.items()), flush=True
    )
    first, second = paired(ours(config, rows, precision), steps[best], pairs)
    peer = f"transformers BertForPreTraining, {best}, padded to the longest"
    goal = GOALS[part] if precision == "bf16" else None
    return claim(name, first, second, peer=peer, unit="sequences/s", better="higher", goal=goal), padding


def main() -> None:
    arguments = parser((__doc__ or "").split("\n")[0])
    arguments.add_argument("--parts", default=",".join(PARTS), help="claims to measure, by commas")
    args = arguments.parse_args()
    keep_freed_memory()  # as our runs do; the peer has it too
    if args.quick:
        torch.set_num_threads(1)  # another benchmark has the other core
    claims, shares = [], {}
    for name in args.parts.split(","):
        found, padding = measure(name, args.quick)
        claims.append(found)
        shares[name] = {"padding": round(float(padding), 3)}
        print(f"{name}: {found.ratio} with {padding:.0%} of the peer's batch padding", flush=True)
    layers = (QUICK_SHAPE if args.quick else SHAPE)["layers"]
    finish("bert_pretrain", claims, packages=("transformers",), details=shares, layers=layers)


if __name__ == "__main__":
    main()
