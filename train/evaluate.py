"""Validation inside and after a run: GPT loss, perplexity, bits per byte; BERT masked-token and pair accuracy.

The split is read once in order: every GPT window without overlap, and the shorter rest; every BERT pair with one fixed
draw of masks. Sums are divided by the count of targets at the end, so the batch does not matter.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data.samples import Dataset, GPTWindows
from ..models.gpt import in_use
from .build import RunPlan, validation_rows
from .engine import Engine
from .loss import Model
from .recipes.resolved import evaluated_rows

DECODED_TOKENS = 4_000_000  # bytes per token are counted over this much of the split, from its beginning


class Validation:
    """Evaluator of a run: the figures of the validation split, of `train.eval_rows` rows before the last step."""

    def __init__(self, plan: RunPlan, cache: Path | None = None) -> None:
        self.plan = plan
        self.datasets = validation_rows(plan, cache)

    def __call__(self, engine: Engine, step: int) -> dict[str, float]:
        train = self.plan.recipe.train
        return self.measure(engine, None if step >= train.steps else train.eval_rows)

    def measure(self, engine: Engine, rows: int | None = None) -> dict[str, float]:
        """The figures over the first `rows` rows, or over all. The model's mode is given back as it was."""
        sums = engine.evaluate(self._rows(rows, engine.layout.data), self.plan.recipe.mask_fraction).tolist()
        if self.plan.family == "gpt":
            loss, count = sums[0] / sums[1], sums[1]
            figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(count)}
            if self.plan.corpus.tokenizer is not None:
                figures["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
            return figures
        loss, right, count, pairs_right, pairs = sums
        figures = {"mlm_loss": loss / count, "mlm_accuracy": right / count, "masked_tokens": int(count)}
        return figures | ({"nsp_accuracy": pairs_right / pairs, "pairs": int(pairs)} if pairs else {})

    def _rows(self, rows: int | None, processes: int) -> Iterator[dict[str, np.ndarray]]:
        plan, left = self.plan, rows
        length, kind = plan.recipe.train.sequence_length, plan.device.type
        at_once = processes * evaluated_rows(kind, plan.config.vocab_size, length)
        for dataset in self.datasets:
            wanted = dataset.rows if left is None else min(left, dataset.rows)
            left = None if left is None else left - wanted
            for start in range(0, wanted, at_once):
                yield dataset.batch(start, min(at_once, wanted - start))
            if rows is None and (rest := _rest(dataset)) is not None:
                yield rest

    @cached_property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token of the split; the tokens that begin and end documents have no bytes."""
        tokens = size = 0
        tokenizer = self.plan.corpus.tokenizer
        assert tokenizer is not None
        for store in self.plan.corpus.validation:
            ids = store.read(0, min(store.tokens, DECODED_TOKENS))
            before, behind = tokenizer.document_framing
            bounds = [*before, *behind, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
            words = ids[~np.isin(ids, bounds)]
            tokens, size = tokens + len(ids), size + len(tokenizer.decode(words).encode())
        return size / tokens


def _rest(dataset: Dataset) -> dict[str, np.ndarray] | None:
    """The tokens after the last whole window, as one shorter row."""
    if not isinstance(dataset, GPTWindows) or dataset.options.separate_documents:
        return None
    start = dataset.rows * dataset.options.sequence_length
    ids = dataset.store.read(start, dataset.store.tokens).astype(np.int64)
    return {"input_ids": ids[None, :-1], "targets": ids[None, 1:]} if len(ids) > 1 else None


@torch.no_grad()
def whole_model(engine: Engine) -> Model | None:
    """On the first process the model in use with the weights that a checkpoint saves, in eval mode; None on the others.
    Collective. One process lends its values; in a layout the first needs room for all of them in the dtype of the
    masters, and every process for the largest parameter, of which each adds its part to zeros.
    """
    engine.wait()
    model = engine.objective.empty(engine.wide)
    held = {local.name: local for local in engine.local_shards if local.spec.primary}
    for name, shape in engine.shapes.items():
        local = held.get(name)
        if engine.layout.world == 1:
            assert local is not None
            value: Tensor = local.value.detach().to(engine.device)
        else:
            value = torch.zeros(shape, dtype=engine.wide, device=engine.device)
            if local is not None:
                value[local.spec.box.slices()] = local.value.detach().to(engine.device)
            engine.mesh.world.all_reduce(value)
        if engine.mesh.rank == 0:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    return in_use(model.eval()) if engine.mesh.rank == 0 else None
