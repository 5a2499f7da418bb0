"""Giant layouts without hardware: one process of each, in our own training code, against the published
formulas.

python benchmarks/prove_scale.py [--quick]

The runs are recipes that ship, checked by the rules that a training run is checked by: 1T on 3,072 processes (tensor
8 x pipeline 64 x data 6) and on 800 (16 x 50), 530B on 2,240 (8 x 35 x 8), GPT-2 8.3B on 512 (8 x data 64) and the
481B encoder on 2,048 (8 x 256, fully sharded). Of each the first, a middle and the last stage, one micro-batch, with
the three kinds of recomputation (`benchmarks/simulate.py` says what is simulated and how). Formulas: parameters and
FLOPs, Narayanan et al. 2021, section 5.1 (per layer, divided over the tensor axis; the head on the last stage); bytes
kept for backward, Korthikanti et al. 2022, table 2; for the encoder the same sums over its own shape. Collectives:
what `train --show-layout` prints. `--quick` leaves out the stages in the middle and, of all recipes but the first, the
two kinds that compute again.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from throughline.benchmarks.common import claim, finish, parser
from throughline.benchmarks.simulate import Simulated, simulate
from throughline.core.console import table
from throughline.core.recipe import load_recipe
from throughline.models.config import BERTConfig, ModelConfig
from throughline.planner.layout import Layout
from throughline.planner.traffic import StepShape, Traffic, traffic
from throughline.prove.forked import run_ranks, warm
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import model_config, resolve, step_shape
from throughline.train.recipes.rules import RULES

FLOPS_PERCENT, KEPT_PERCENT, SECONDS = 0.1, 1.0, 60.0
CORES = 2  # processes that share the cases


@dataclass(frozen=True)
class Scale:
    """A recipe that ships, resolved."""

    name: str
    recipe: Recipe
    config: ModelConfig
    layout: Layout

    @staticmethod
    def of(name: str) -> "Scale":
        recipe = resolve(load_recipe(name, Recipe, (), RULES))
        return Scale(name, recipe, model_config(recipe), recipe.parallel.layout())

    @property
    def rows(self) -> int:
        return self.recipe.train.rows_per_micro_batch

    @property
    def length(self) -> int:
        return self.recipe.train.sequence_length

    def batch(self, recompute: str) -> StepShape:
        """One micro-batch of the recipe; a GPT predicts every token."""
        shape = step_shape(self.recipe)
        predicted = shape.predicted or self.rows * self.length
        return replace(shape, micro_batches=1, predicted=predicted, recompute=recompute)

    def pipeline_ranks(self) -> list[int]:
        """The first, a middle and the last."""
        return sorted({0, self.layout.pipeline // 2, self.layout.pipeline - 1})


RECOMPUTE = ("none", "selective", "full")
RECIPES = ("gpt-1t-megatron", "gpt-1t-deepspeed", "gpt-530b", "gpt2-8.3b-megatron", "bert-481b")


@dataclass(frozen=True)
class Row:
    """What was counted on a stage beside what the formulas say."""

    scale: Scale
    pipeline_rank: int
    recompute: str
    found: Simulated
    parameters: int
    flops: float
    kept_by_layers: float
    printed: tuple[Traffic, ...]

    @property
    def flops_percent(self) -> float:
        return 100 * abs(self.found.flops / self.flops - 1)

    @property
    def kept_percent(self) -> float:
        return 100 * abs(self.found.kept_by_layers / self.kept_by_layers - 1)

    @property
    def same_traffic(self) -> bool:
        return per_axis(self.found.traffic) == per_axis(self.printed)

    def share(self, size: float) -> float:
        """Bytes of the layers in units of s b h / t, for each layer."""
        scale = self.scale
        return (
            size * scale.layout.tensor / (scale.rows * scale.length * scale.config.width * self.found.layers)
        )


def per_axis(entries: Iterable[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, collective) -> calls and bytes."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        calls[entry.axis, entry.kind] += entry.calls
        sizes[entry.axis, entry.kind] += entry.bytes
    return {key: (calls[key], sizes[key]) for key in calls}


def parameters(scale: Scale, pipeline_rank: int, layers: int) -> int:
    """Of one process, by hand: matrices and their biases cut by t, what is added after a sum and the norms
    whole.
    """
    c, t = scale.config, scale.layout.tensor
    first, last = pipeline_rank == 0, pipeline_rank == scale.layout.pipeline - 1
    # the first process has the larger part
    h, f, vocabulary = c.width, c.feed_forward_size, -(-c.vocab_size // t)
    if isinstance(c, BERTConfig):  # multi-query: the one key head is whole; no biases, norms of one vector
        d, shards = c.head_size, scale.layout.shards  # which have equal parts of all but the tables
        block = 2 * h * c.heads * d // t + 2 * h * d + 3 * h * f // t + 2 * h
        tables = -(-vocabulary // shards) * (first or last) + -(-c.sequence_length // shards) * first
        return layers * block // shards + tables * h + last * h // shards
    tables = (first or last) * vocabulary * h  # tied: one table where both ends are one process
    return (
        layers * (12 * h * h // t + 7 * h // t + 6 * h)
        + tables
        + first * c.sequence_length * h
        + last * 2 * h
    )


def flops(scale: Scale, pipeline_rank: int, layers: int, recompute: str, predicted: int) -> float:
    """Forward and backward of a micro-batch on one process, with what is computed again."""
    c, t, s, h = scale.config, scale.layout.tensor, scale.length, scale.config.width
    b, passes = scale.rows, 4 if recompute == "full" else 3
    head = 6 * predicted * h * c.vocab_size / t if pipeline_rank == scale.layout.pipeline - 1 else 0
    if isinstance(c, BERTConfig):
        d = c.head_size
        # the keys on every process
        token = 2 * (2 * h * c.heads * d + 3 * h * c.feed_forward_size) / t + 2 * 2 * h * d
        core = 4 * s * c.heads * d / t
    else:
        token, core = 24 * h * h / t, 4 * s * h / t  # together 24 b s h^2 (1 + s / 6h)
    return b * s * layers * (passes * (token + core) + (core if recompute == "selective" else 0)) + head


def kept(scale: Scale, layers: int, recompute: str) -> float:
    """Bytes that the layers of one process keep for backward: 34 s b h / t, with full recomputation 2."""
    c, t, h = scale.config, scale.layout.tensor, scale.config.width
    tokens = scale.rows * scale.length
    if recompute == "full":
        return layers * tokens * 2 * h / t
    if isinstance(c, BERTConfig):
        # inputs and outputs of both norms, queries, the result of attention; gate, its activation, up and
        # their product
        numbers = 4 * h + 2 * c.heads * c.head_size + 4 * c.feed_forward_size
        return layers * tokens * 2 * (numbers / t + 2 * c.head_size)  # keys and values on every process
    return layers * tokens * 34 * h / t


def measure(scale: Scale, pipeline_rank: int, recompute: str) -> Row:
    """Simulate a stage and put the formulas beside it."""
    batch = scale.batch(recompute)
    (found,) = simulate(scale.config, scale.layout, batch, pipeline_rank)
    return Row(
        scale,
        pipeline_rank,
        recompute,
        found,
        parameters(scale, pipeline_rank, found.layers),
        flops(scale, pipeline_rank, found.layers, recompute, batch.predicted),
        kept(scale, found.layers, recompute),
        tuple(traffic(scale.config, scale.layout, batch, pipeline_rank)),
    )


def lines(rows: list[Row]) -> list[str]:
    """The table for people."""
    header = (
        "model",
        "stage",
        "recompute",
        "parameters",
        "TFLOP",
        "off by %",
        "kept, sbh/t a layer",
        "formula",
        "masks",
        "off by %",
        "head MiB",
        "tensor GiB",
        "pipeline MiB",
        "data GiB",
        "as printed",
    )
    shown = []
    for row in rows:
        sent: Counter[str] = Counter()
        for entry in row.found.traffic:
            sent[entry.axis] += entry.bytes
        shown.append(
            (
                row.scale.name,
                f"{row.pipeline_rank} of {row.scale.layout.pipeline}",
                row.recompute,
                f"{row.found.parameters:,}{'' if row.found.parameters == row.parameters else ' WRONG'}",
                f"{row.found.flops / 1e12:.3f}",
                f"{row.flops_percent:.4f}",
                f"{row.share(row.found.kept_by_layers):.3f}",
                f"{row.share(row.kept_by_layers):.2f}",
                f"{row.share(row.found.masks_of_layers):.2f}",
                f"{row.kept_percent:.2f}",
                f"{row.found.kept_by_head / 2**20:.1f}",
                f"{sent['tensor'] / 2**30:.3f}",
                f"{sent['pipeline'] / 2**20:.1f}",
                f"{sent['data'] / 2**30:.2f}",
                "yes" if row.same_traffic else "NO",
            )
        )
    return table(header, shown)


def main() -> int:
    given = parser(__doc__.splitlines()[0]).parse_args()
    start = time.monotonic()
    warm()
    cases = [
        (scale, rank, recompute)
        for scale in map(Scale.of, RECIPES)
        for rank in scale.pipeline_ranks()
        if not given.quick or rank in (0, scale.layout.pipeline - 1)
        for recompute in (("none",) if given.quick and scale.name != RECIPES[0] else RECOMPUTE)
    ]
    parts = run_ranks(CORES, lambda: [measure(*case) for case in cases[int(os.environ["RANK"]) :: CORES]])
    rows = [row for turn in zip_longest(*parts) for row in turn if row is not None]
    seconds = time.monotonic() - start
    print("\n".join(lines(rows)))
    exact = sum(row.found.parameters == row.parameters for row in rows)
    same = sum(row.same_traffic for row in rows)
    nothing = 1e-6  # a ratio needs something to divide by
    limit: dict[str, Any] = {"peer": "limit", "better": "lower", "goal": 1.0}
    claims = [
        claim(
            "scale-parameters-exact",
            [exact],
            [len(rows)],
            peer="formula",
            unit="stages",
            better="higher",
            goal=1.0,
        ),
        claim(
            "scale-flops",
            [max(nothing, *(row.flops_percent for row in rows))],
            [FLOPS_PERCENT],
            unit="% off",
            **limit,
        ),
        claim(
            "scale-activations",
            [max(nothing, *(row.kept_percent for row in rows))],
            [KEPT_PERCENT],
            unit="% off",
            **limit,
        ),
        claim(
            "scale-collectives",
            [same],
            [len(rows)],
            peer="--show-layout",
            unit="stages",
            better="higher",
            goal=1.0,
        ),
        claim("scale-seconds", [seconds], [SECONDS], unit="s", **limit),
    ]
    facts = [
        {
            "model": row.scale.name,
            "layout": row.scale.layout.describe(),
            "stage": row.pipeline_rank,
            "recompute": row.recompute,
            "parameters": row.found.parameters,
            "flops": row.found.flops,
            "flops_formula": row.flops,
            "kept_by_layers": row.found.kept_by_layers,
            "kept_formula": row.kept_by_layers,
            "masks": row.found.masks_of_layers,
            "kept_by_embeddings": row.found.kept_by_embeddings,
            "kept_by_head": row.found.kept_by_head,
            "traffic": {
                f"{axis} {kind}": size for (axis, kind), (_, size) in per_axis(row.found.traffic).items()
            },
        }
        for row in rows
    ]
    finish("prove_scale", claims, kind="proof", rows=facts)
    return int(not all(c.met for c in claims))


if __name__ == "__main__":
    sys.exit(main())
