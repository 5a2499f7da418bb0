"""Validation inside and after a run: GPT loss, perplexity and bits per byte; BERT masked-token and sentence-pair accuracy.

The whole split is read once in order: every GPT window of `sequence_length` without overlap, and the shorter rest; every
BERT pair with one fixed draw of masks. Sums are divided by the count of targets at the end, so the batch does not matter.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.samples import Dataset, GPTWindows
from ..models.bert import BERT
from ..models.gpt import GPT
from .build import Plan, validation_rows
from .loss import IGNORED, cross_entropy_sum
from .objective import Batch, prepare
from .precision import autocast, weight_dtype

if TYPE_CHECKING:
    from .parallel.engine import Engine

BATCH_TOKENS = {
    "cpu": 4096,
    "cuda": 65536,
}  # a CPU has its activations in cache at 4096 (15 % faster than 16384)
LOGITS = 2**26  # numbers in one batch of logits: 256 MB in fp32
DECODED_TOKENS = 4_000_000  # bytes per token are counted over this much of the split; a larger one is sampled by its beginning


class Validation:
    """Evaluator of a run: called with the model and the step, returns the figures of the validation split.

    Inside the run it reads `train.eval_rows` rows when that is set, at the last step the whole split.
    """

    def __init__(self, plan: Plan, cache: Path | None = None) -> None:
        self.plan = plan
        self.datasets = validation_rows(plan, cache)
        self._bytes_per_token: float | None = None

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        train = self.plan.recipe.train
        return self.measure(model, None if step >= train.steps else train.eval_rows)

    @torch.no_grad()
    def measure(self, model: "nn.Module | Engine", rows: int | None = None) -> dict[str, float]:
        """The figures over the first `rows` rows, or over all. The model's mode is given back as it was."""
        if isinstance(model, nn.Module):
            training = model.training
            model.eval()
            try:
                sums = sum(
                    (self._sums(model, batch) for batch in self._rows(rows)),
                    torch.zeros(5, dtype=torch.float64),
                )
            finally:
                model.train(training)
        else:
            sums = torch.zeros(5, dtype=torch.float64)
            for batch in self._rows(rows):
                sums += model.evaluate(batch, self._mask_fraction)
        return (
            self._gpt_figures(*sums[:2].tolist())
            if self.plan.family == "gpt"
            else _bert_figures(*sums.tolist())
        )

    @property
    def _mask_fraction(self) -> float:
        objective = self.plan.recipe.objective
        return objective.mask_fraction if objective else 0.0

    def _sums(self, model: Any, rows: dict[str, np.ndarray]) -> Tensor:
        plan, precision = self.plan, self.plan.recipe.train.precision
        count = len(rows["input_ids"])
        (batch,) = prepare(
            rows, plan.family, count, plan.device, weight_dtype(precision), self._mask_fraction
        ).micro_batches
        with autocast(precision, plan.device):
            return _gpt_sums(model, batch) if plan.family == "gpt" else _bert_sums(model, batch)

    def _rows(self, rows: int | None) -> Iterator[dict[str, np.ndarray]]:
        plan = self.plan
        length = plan.recipe.train.sequence_length
        at_once = max(min(BATCH_TOKENS[plan.device.type], LOGITS // plan.config.vocab_size) // length, 1)
        for dataset in self.datasets:
            wanted = dataset.rows if rows is None else min(rows, dataset.rows)
            for start in range(0, wanted, at_once):
                yield dataset.batch(start, min(at_once, wanted - start))
            if rows is None and (rest := _rest(dataset)) is not None:
                yield rest

    def _gpt_figures(self, total: float, count: float) -> dict[str, float]:
        loss = total / count
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": int(count)}
        if self.plan.tokenizer is not None:
            if self._bytes_per_token is None:
                self._bytes_per_token = self._count_bytes()
            figures["bits_per_byte"] = loss / math.log(2) / self._bytes_per_token
        return figures

    def _count_bytes(self) -> float:
        """UTF-8 bytes of text per token of the split; end-of-text tokens are tokens without bytes."""
        tokens = size = 0
        tokenizer = self.plan.tokenizer
        assert tokenizer is not None
        for store in self.plan.validation_stores:
            ids = store.read(0, min(store.tokens, DECODED_TOKENS))
            tokens += len(ids)
            size += len(
                tokenizer.decode(
                    ids[ids != tokenizer.eos_id] if tokenizer.eos_id is not None else ids
                ).encode()
            )
        return size / tokens


def _rest(dataset: Dataset) -> dict[str, np.ndarray] | None:
    """The tokens after the last whole window, as one shorter row."""
    if not isinstance(dataset, GPTWindows) or dataset.options.separate_documents:
        return None
    ids = dataset.store.read(dataset.rows * dataset.options.sequence_length, dataset.store.tokens).astype(
        np.int64
    )
    return {"input_ids": ids[None, :-1], "targets": ids[None, 1:]} if len(ids) > 1 else None


def _gpt_sums(model: GPT, batch: Batch) -> Tensor:
    """Sum of losses, count of targets, 0, 0, 0."""
    hidden = model.hidden(
        batch["input_ids"], positions=batch.get("positions"), document_ids=batch.get("document_ids")
    )
    targets = batch["targets"].flatten()
    loss = cross_entropy_sum(model.head(hidden).flatten(0, 1), targets)
    return torch.tensor([loss.item(), int((targets != IGNORED).sum()), 0, 0, 0], dtype=torch.float64)


def _bert_sums(model: BERT, batch: Batch) -> Tensor:
    """Masked tokens: sum of losses, right ones, count; sentence pairs: right ones, count."""
    names = ("token_types", "attention_mask", "positions", "document_ids")
    hidden = model.hidden(batch["input_ids"], **{name: batch.get(name) for name in names})
    targets = batch["predicted_targets"]
    logits = model.mlm_head(hidden.flatten(0, 1).index_select(0, batch["predicted"]))
    loss = cross_entropy_sum(logits, targets)
    sums = [loss.item(), int((logits.argmax(-1) == targets).sum()), int((targets != IGNORED).sum()), 0, 0]
    if "pairs" in batch:
        pairs = batch["pair_targets"]
        pair_logits = model.nsp_head(hidden.flatten(0, 1).index_select(0, batch["pairs"]))
        assert pair_logits is not None, "the recipe's rules ask for the head"
        sums[3:] = [int((pair_logits.argmax(-1) == pairs).sum()), int((pairs != IGNORED).sum())]
    return torch.tensor(sums, dtype=torch.float64)


def _bert_figures(
    loss: float, right: float, count: float, pairs_right: float, pairs: float
) -> dict[str, float]:
    figures = {"mlm_loss": loss / count, "mlm_accuracy": right / count, "masked_tokens": int(count)}
    if pairs:
        figures |= {"nsp_accuracy": pairs_right / pairs, "pairs": int(pairs)}
    return figures
