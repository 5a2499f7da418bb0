"""Validation inside and after a run: GPT loss, perplexity, bits per byte; BERT masked-token and pair accuracy.

After the last step the split is read once in order: every GPT window without overlap, and the shorter rest; every BERT
pair with one fixed draw of masks. An evaluation of `train.eval_rows` rows reads a sample of them: every store by its
size, and rows drawn from the whole of its split by `train.seed`, the same ones at every step and in every layout. Sums
are divided by the count of targets at the end, so the batch does not matter.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.samples import Dataset, GPTWindows
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..models.gpt import in_use
from .build import RunPlan, validation_rows
from .engine import Engine
from .logs.report import SOURCES
from .loss import Model
from .recipes.resolved import evaluated_rows

DECODED_TOKENS = 4_000_000  # bytes per token are counted over at most this much of a store's split
DECODED_PIECES = 8  # in so many pieces, where the split is larger


class Validation:
    """Evaluator of a run: the figures of the validation split, over all its rows after the last step and over a sample
    of `train.eval_rows` rows before it. With several stores the figures of each stand beside those of all,
    as `sources/<store>/<figure>`.
    """

    def __init__(self, plan: RunPlan, cache: Path | None = None) -> None:
        self.plan = plan
        self.datasets = validation_rows(plan, cache)
        self.samples = [_shuffled(dataset) for dataset in self.datasets]
        self.names = source_names(plan)

    def __call__(self, engine: Engine, step: int) -> dict[str, float]:
        train = self.plan.recipe.train
        return self.measure(engine, None if step >= train.steps else train.eval_rows)

    def measure(self, engine: Engine, rows: int | None = None) -> dict[str, float]:
        """The figures over a sample of `rows` rows, or over all. The model's mode is given back as it was."""
        fraction = self.plan.recipe.mask_fraction
        counts = [None] * len(self.datasets) if rows is None else self.rows_by_source(rows)
        by_source = []
        for index, count in enumerate(counts):
            sums = engine.evaluate(self._batches(index, count, engine.layout.data), fraction)
            by_source.append(SourceSums(sums.tolist(), self.bytes_per_token[index]))
        figures = self._figures(by_source)
        if len(by_source) > 1:
            for name, sums_of_source in zip(self.names, by_source, strict=True):
                figures_of_source = self._figures([sums_of_source])
                figures |= {f"{SOURCES}{name}/{key}": value for key, value in figures_of_source.items()}
        return figures

    def rows_by_source(self, rows: int) -> list[int]:
        """`rows` shared out over the stores by their size, in whole rows: at least one row of each store."""
        sizes = [dataset.rows for dataset in self.datasets]
        wanted = min(rows, sum(sizes))
        counts = [max(wanted * size // sum(sizes), 1) for size in sizes]
        # the rows that rounding down left over go to the largest remainders
        by_remainder = sorted(range(len(sizes)), key=lambda index: -(wanted * sizes[index] % sum(sizes)))
        for index in by_remainder[: max(wanted - sum(counts), 0)]:
            counts[index] = min(counts[index] + 1, sizes[index])
        return counts

    def _batches(self, index: int, rows: int | None, processes: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches of one store: all its rows in order, or the first `rows` rows of a shuffle that the seed decides."""
        plan, dataset = self.plan, self.datasets[index] if rows is None else self.samples[index]
        length, kind = plan.recipe.train.sequence_length, plan.device.type
        at_once = processes * evaluated_rows(kind, plan.config.vocab_size, length)
        wanted = dataset.rows if rows is None else rows
        for start in range(0, wanted, at_once):
            yield dataset.batch(start, min(at_once, wanted - start))
        if rows is None and (rest := _rest(dataset)) is not None:
            yield rest

    def _figures(self, by_source: Sequence["SourceSums"]) -> dict[str, float]:
        """The figures of one store or of several together: sums over all rows, divided by the count of targets."""
        totals = [sum(column) for column in zip(*(source.sums for source in by_source))]
        if self.plan.family == "gpt":
            loss, count = totals[0] / totals[1], totals[1]
            figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(count)}
            if self.plan.corpus.tokenizer is not None:
                text_bytes = sum(source.sums[1] * source.bytes_per_token for source in by_source)
                figures["bits_per_byte"] = totals[0] / math.log(2) / text_bytes
            return figures
        loss, right, count, pairs_right, pairs = totals
        figures = {"mlm_loss": loss / count, "mlm_accuracy": right / count, "masked_tokens": int(count)}
        return figures | ({"nsp_accuracy": pairs_right / pairs, "pairs": int(pairs)} if pairs else {})

    @cached_property
    def bytes_per_token(self) -> list[float]:
        """UTF-8 bytes of text per token of each store's split; 0 where no figure needs it."""
        tokenizer, stores = self.plan.corpus.tokenizer, self.plan.corpus.validation
        if tokenizer is None or self.plan.family != "gpt":
            return [0.0] * len(stores)
        return [_bytes_per_token(store, tokenizer) for store in stores]


@dataclass(frozen=True)
class SourceSums:
    """What a validation counted in the rows of one store: see `loss.FIGURES`."""

    sums: list[float]
    bytes_per_token: float


def source_names(plan: RunPlan) -> list[str]:
    """A name for each store of the validation split: the last part of its path, numbered where two are alike."""
    data = plan.recipe.data
    paths = [data.validation] if data.validation else [source.path for source in data.sources()]
    last_parts = [Path(path).name for path in paths]
    names = []
    for index, name in enumerate(last_parts):
        before = last_parts[:index].count(name)
        names.append(f"{name}-{before + 1}" if before else name)
    return names


def _bytes_per_token(store: TokenStore, tokenizer: Tokenizer) -> float:
    """UTF-8 bytes of text per token of a store; the tokens that begin and end documents have no bytes. Of a large store
    DECODED_PIECES pieces are decoded, spread evenly over it.
    """
    before, behind = tokenizer.document_framing
    bounds = [*before, *behind, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    pieces = 1 if store.tokens <= DECODED_TOKENS else DECODED_PIECES
    length = min(store.tokens, DECODED_TOKENS) // pieces
    tokens = size = 0
    for piece in range(pieces):
        start = (store.tokens - length) * piece // max(pieces - 1, 1)
        ids = store.read(start, start + length)
        words = ids[~np.isin(ids, bounds)]
        tokens, size = tokens + len(ids), size + len(tokenizer.decode(words).encode())
    return size / tokens


def _shuffled(dataset: Any) -> Dataset:
    """The same rows in an order that the seed decides; what was computed once for the store is shared."""
    shuffled = copy.copy(dataset)
    shuffled.options = replace(dataset.options, order="shuffled")
    return shuffled


def _rest(dataset: Dataset) -> dict[str, np.ndarray] | None:
    """The tokens after the last whole window, as one shorter row."""
    if not isinstance(dataset, GPTWindows) or dataset.options.separate_documents:
        return None
    start = dataset.rows * dataset.options.sequence_length
    ids = dataset.store.read(start, dataset.store.tokens).astype(np.int64)
    return {"input_ids": ids[None, :-1], "targets": ids[None, 1:]} if len(ids) > 1 else None


def scored_dtype(engine: Engine) -> torch.dtype:
    """The dtype of the whole model that tasks are scored with: that of the masters, which a process alone lends. Where
    they are copied to a GPU, which holds its share of the training state too, that of the products: an 8B model takes
    16 GB in place of 32.
    """
    copied = engine.layout.world > 1 or engine.offload is not None
    return engine.dtype if copied and engine.device.type == "cuda" else engine.wide


@torch.no_grad()
def whole_model(engine: Engine) -> Model | None:
    """On the first process the model in use with the weights that a checkpoint saves, in eval mode; None on the others.
    Collective. One process lends its values; in a layout the first needs room for all of them in `scored_dtype`, and
    every process for the largest parameter, of which each adds its part to zeros.
    """
    engine.wait()
    model = engine.objective.empty(scored_dtype(engine))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    held = {local.name: local for local in engine.local_shards if local.spec.primary}
    for name, shape in engine.shapes.items():
        local = held.get(name)
        if engine.layout.world == 1:
            assert local is not None
            value: Tensor = local.value.detach().to(engine.device, dtypes[name])
        else:
            value = torch.zeros(shape, dtype=dtypes[name], device=engine.device)
            if local is not None:
                value[local.spec.box.slices()] = local.value.detach().to(engine.device, dtypes[name])
            engine.mesh.world.all_reduce(value)
        if engine.mesh.rank == 0:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    return in_use(model.eval()) if engine.mesh.rank == 0 else None
