"""The runs of this machine that are predicted before they are measured: what `prove_study.py` draws, and the benchmarks
and proofs that train here, with their own constants.

A case is a recipe with changes, a number of processes and what was changed for the study that its prediction rests on:
another number of layers or rows, never the case itself. Runs are cut to a few steps without evaluations and checkpoints
in between, so that what is timed is a step.
"""

import bz2
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bert_pretrain
import bert_toy
import layouts
import overfitting
import train_gpt
from common import throughline
from throughline.core.recipe import build_recipe, dump_toml
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.rules import RULES

SAMPLES = Path(__file__).parents[1] / "recipes" / "samples"
SHAKESPEARE = SAMPLES / "tinyshakespeare" / "input.txt"
BOUNDED = (
    "train.device=cpu",
    "log.every_steps=1",
    "train.eval_every_steps=0",
    "checkpoint.save_every_steps=0",
    "data.validation_fraction=0",
    "schedule.warmup_steps=0",
    "train.compile=off",
)
STEADY = ("schedule.kind=constant", "schedule.decay_steps=1")  # a bounded run has no room for a decay


@dataclass(frozen=True)
class Case:
    """One run. `recipe` is a shipped one or the text of one, `data` names its store (STORES), `study` those that share
    a study, `studied` what that changes; `threads` of each process, 0 for an equal share of the cores.
    """

    name: str
    recipe: str
    data: str
    settings: tuple[str, ...]
    study: str
    studied: tuple[str, ...]
    processes: int = 1
    threads: int = 0
    warm_up: int = 4
    steps: int = 12

    def facts(self) -> dict[str, Any]:
        """As the file of predictions holds it."""
        return {
            "name": self.name,
            "recipe": self.recipe,
            "settings": list(self.settings),
            "processes": self.processes,
            "threads": self.own_threads(),
            "steps": [self.warm_up, self.steps],
        }

    def own_threads(self) -> int:
        """Threads of each process."""
        return self.threads or max(len(os.sched_getaffinity(0)) // self.processes, 1)


def as_settings(changes: dict[str, Any]) -> tuple[str, ...]:
    """Changes of a recipe as overrides; strings without quotation marks, as on a command line."""
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()
    )


SEED = 15
DRAWN_LAYOUTS = {  # settings and number of processes
    "one process": ((), 1),
    "two copies": (("parallel.data=2",), 2),
    "two tensor ranks": (("parallel.tensor=2",), 2),
    "two pipeline ranks": (("parallel.pipeline=2", "train.micro_batch_rows=4"), 2),
    "two full shards": (("parallel.data=2", "parallel.sharding=full"), 2),
}
DRAWN_STUDIED = {"rows": 16, "layers": 4}
ROWS, LAYERS = (8, 12, 24), (3, 6, 8)
DRAWN_SHAPE = (
    "train.device=cpu", "optimizer.name=adamw", "optimizer.learning_rate=1e-3", "model.overrides.width=256",
    "train.sequence_length=128", "schedule.warmup_steps=0", "log.every_steps=1", "train.eval_every_steps=0",
    "checkpoint.save_every_steps=0", "data.validation_fraction=0",
)  # fmt: skip


def drawn() -> list[Case]:
    """Five configurations fixed by SEED: rows, layers, and each layout once; one thread a process, so that one and
    two processes have the same kind of cores.
    """

    def settings(layout: str, rows: int, layers: int) -> tuple[str, ...]:
        sizes = (f"train.batch_rows={rows}", f"model.overrides.layers={layers}")
        return (*DRAWN_SHAPE, *sizes, *DRAWN_LAYOUTS[layout][0])

    draw, cases = random.Random(SEED), []
    for layout, (_, processes) in DRAWN_LAYOUTS.items():
        rows, layers = draw.choice(ROWS), draw.choice(LAYERS)
        cases.append(
            Case(
                f"{layout}, {rows} rows, {layers} layers",
                "gpt-shakespeare",
                "words",
                settings(layout, rows, layers),
                layout,
                settings(layout, **DRAWN_STUDIED),
                processes,
                threads=1,
            )
        )
    return cases


def benchmarks() -> list[Case]:
    """One case for each kind of training that the benchmarks and proofs do on this machine: our side of it."""
    # when it was predicted, the fast recipe itself had nanoGPT's shape
    fast, preset = train_gpt.RECIPE.read_text(), train_gpt.LIKE_NANOGPT["model.preset"]
    fast = fast.replace('"gpt-shakespeare-fast"', f'"{preset}"')
    plain = {key: value for key, value in train_gpt.LIKE_NANOGPT.items() if key != "model.preset"}
    small = (*as_settings(plain), *STEADY, *BOUNDED)
    turning = (*as_settings(overfitting.SHAPE), *STEADY, *BOUNDED)
    toy = dump_toml(build_recipe(bert_toy.our_tree(0, 1000) | {"data": {"train": "tokens"}}, Recipe, RULES))
    novels = (*STEADY, *BOUNDED)
    cases = [
        _case(
            "train_gpt tokens",
            fast,
            "characters",
            small,
            ("model.overrides.layers=6", "train.batch_rows=16"),
        ),
        _case(
            "overfitting",
            "gpt-shakespeare",
            "hound",
            turning,
            ("model.overrides.layers=6", "train.batch_rows=24"),
        ),
        _case("bert_toy", toy, "novels", novels, ("model.overrides.layers=6", "train.batch_rows=16")),
        _case(
            "bert_two_phases",
            "bert-novels-phase1",
            "novels",
            novels,
            ("model.overrides.layers=6", "train.batch_rows=32"),
        ),
    ]
    for rows, length, _ in train_gpt.GPT124_ROWS:
        changes = (*as_settings(train_gpt.gpt124(rows, length)), *STEADY, *BOUNDED)
        studied = ("model.overrides.layers=6", "train.batch_rows=2", "train.sequence_length=512")
        cases.append(
            _case(f"train_gpt gpt124-{length}", "gpt-shakespeare-fast", "gpt2", changes, studied, slow=True)
        )
    for part, length in (("bert-128", 128), ("bert-full-rows", 512)):
        changes = (
            "model.preset=bert-base",
            "model.overrides.dropout=0",
            "objective.sentences=nsp",
            "objective.packing=true",
            "train.precision=bf16",
            f"train.sequence_length={length}",
            f"train.batch_rows={bert_pretrain.TOKENS // length}",
            "optimizer.name=adamw",
            *STEADY,
            *BOUNDED,
        )
        studied = ("model.overrides.layers=4", f"train.batch_rows={bert_pretrain.TOKENS // length // 2}")
        cases.append(_case(f"bert_pretrain {part}", BERT, "base", changes, studied, slow=True))
    for name in ("ddp2", "fsdp2", "tp2", "pp2"):
        changes = (*as_settings(layouts.CASES[name]), *STEADY, *BOUNDED)
        studied = ("model.overrides.layers=6", "train.batch_rows=8", "train.sequence_length=128")
        text = layouts.recipe_text(layouts.SHAPE)
        cases.append(_case(f"layouts {name}", text, "gpt2", changes, studied, layouts.PROCESSES, slow=True))
    return cases


BERT = """version = 1
[data]
train = "tokens"
[model]
family = "bert"
[train]
steps = 1
batch_rows = 1
sequence_length = 128
"""


def _case(
    name: str,
    recipe: str,
    data: str,
    settings: tuple[str, ...],
    studied: tuple[str, ...],
    processes: int = 1,
    slow: bool = False,
) -> Case:
    sizes = {"warm_up": 2, "steps": 3} if slow else {}
    threads = 1 if name.startswith(("bert_toy", "layouts")) else 0  # as these benchmarks say
    return Case(name, recipe, data, settings, name, (*settings, *studied), processes, threads, **sizes)


CASES: dict[str, Callable[[], list[Case]]] = {"study": drawn, "training": benchmarks}


def words(folder: Path) -> None:
    """Tiny Shakespeare in 4,096 byte pairs."""
    throughline("data", "tokenizer", SHAKESPEARE, "--vocab-size", 4096, "--out", folder / "tok")
    throughline(
        "data",
        "tokenize",
        SHAKESPEARE,
        "--documents",
        "block",
        "--tokenizer",
        folder / "tok",
        "--out",
        folder / "train",
    )


def characters(folder: Path, text: Path = SHAKESPEARE) -> None:
    """A text in characters, as train_gpt.py and overfitting.py have it."""
    file, made = ("--documents", "file"), ("--tokenizer", folder / "tok", "--no-eos", "--out")
    throughline("data", "tokenizer", text, *file, "--type", "char", "--out", folder / "tok")
    throughline("data", "tokenize", text, *file, *made, folder / "train")


def hound(folder: Path) -> None:
    """The beginning of a novel, as overfitting.py takes it."""
    text = bz2.decompress((SAMPLES / "novels" / "Doyle_Hound_1902.txt.bz2").read_bytes()).decode()
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text[: overfitting.CHARACTERS])
    characters(folder, folder / "text.txt")


def gpt2(folder: Path) -> None:
    """Tiny Shakespeare in GPT-2's tokens."""
    throughline("data", "tokenizer", SAMPLES / "gpt2-bpe", "--type", "import", "--out", folder / "tok")
    throughline(
        "data",
        "tokenize",
        SHAKESPEARE,
        "--documents",
        "block",
        "--tokenizer",
        folder / "tok",
        "--out",
        folder / "train",
    )


def base(folder: Path) -> None:
    """Novels in BERT-Base's tokens."""
    vocabulary = SAMPLES / "bert-base-uncased"
    novels = sorted((SAMPLES / "novels").glob("*.bz2"))
    throughline("data", "tokenizer", vocabulary, "--type", "import", "--out", folder / "tok")
    made = ("--tokenizer", folder / "tok", "--documents", "file", "--unwrap", "--sentences")
    throughline("data", "tokenize", *novels, *made, "--out", folder / "train")


STORES: dict[str, Callable[[Path], None]] = {
    "words": words,
    "characters": characters,
    "hound": hound,
    "gpt2": gpt2,
    "novels": bert_toy.make_stores,
    "base": base,
}
