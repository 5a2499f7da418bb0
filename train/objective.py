"""What is minimised: sums of losses over targets, and the counts they are divided by.

Every objective is a sum over targets divided by the count of targets in the whole batch, so the loss and its gradient do
not depend on how the batch is split into micro-batches or spread over processes. BERT has two sums, masked tokens and
sentence pairs, each with its own count. Batches are prepared outside the step (numpy, another thread); a term without any
target in the batch counts as 0 and never as NaN.

Letters: B rows, S tokens in a row, N predicted positions, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.bert import BERT
from ..models.gpt import GPT
from .loss import IGNORED, cross_entropy_sum

TERMS = {"gpt": ("next",), "bert": ("mlm", "nsp")}

Batch = dict[str, Tensor]
LossFunction = Callable[[Any, Batch, Tensor], tuple[Tensor, Tensor]]  # of a GPT or a BERT


def gpt_loss(model: GPT, batch: Batch, inverse_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Loss to differentiate, and the sums of its terms (1,), of one micro-batch; `inverse_counts` (1,) of the whole batch."""
    hidden_BSH = model.hidden(
        batch["input_ids"], positions=batch.get("positions"), document_ids=batch.get("document_ids")
    )
    sums = cross_entropy_sum(model.head(hidden_BSH).flatten(0, 1), batch["targets"].flatten()).view(1)
    return (sums * inverse_counts).sum(), sums.detach()


def bert_loss(model: BERT, batch: Batch, inverse_counts: Tensor) -> tuple[Tensor, Tensor]:
    """As `gpt_loss` with two terms (2,): masked tokens and sentence pairs.

    Each head runs where it has targets: `predicted` (N,) are the masked places in the flattened rows and
    `predicted_targets` (N,) the tokens there; `pairs` and `pair_targets` the same for [CLS] and the sentence pairs.
    """
    hidden_BSH = model.hidden(
        batch["input_ids"],
        token_types=batch.get("token_types"),
        attention_mask=batch.get("attention_mask"),
        positions=batch.get("positions"),
        document_ids=batch.get("document_ids"),
    )
    flat_H = hidden_BSH.flatten(0, 1)
    mlm = cross_entropy_sum(
        model.mlm_head(flat_H.index_select(0, batch["predicted"])), batch["predicted_targets"]
    )
    if "pairs" in batch:
        pair_logits = model.nsp_head(flat_H.index_select(0, batch["pairs"]))
        assert pair_logits is not None, "the recipe's rules ask for the head"
        nsp = cross_entropy_sum(pair_logits, batch["pair_targets"])
    else:
        nsp = torch.zeros_like(mlm)
    sums = torch.stack((mlm, nsp))
    return (sums * inverse_counts).sum(), sums.detach()


LOSSES: dict[str, LossFunction] = {"gpt": gpt_loss, "bert": bert_loss}


@dataclass
class StepBatch:
    """The rows of one optimizer step, ready to compute."""

    micro_batches: list[Batch]
    counts: tuple[int, ...]  # targets of each term in the whole batch
    inverse_counts: Tensor  # (terms,), 0 for a term without targets
    tokens: int  # real tokens (padding left out)
    rows: int  # of the whole batch


def prepare(
    rows: dict[str, np.ndarray],
    family: str,
    micro_rows: int,
    device: torch.device,
    dtype: torch.dtype,
    mask_fraction: float = 0.15,
) -> StepBatch:
    """Split the rows of one step into micro-batches and count their targets. Runs outside the step, in numpy."""
    total = len(rows["input_ids"])
    counts = [int(np.count_nonzero(rows["targets"] != IGNORED))]
    if family == "bert":
        counts.append(int(np.count_nonzero(rows["nsp_targets"] != IGNORED)) if "nsp_targets" in rows else 0)
    tokens = real_tokens(rows)
    inverse = torch.tensor([1.0 / count if count else 0.0 for count in counts], dtype=dtype)
    micro_batches = []
    for start in range(0, total, micro_rows):
        part = {name: values[start : start + micro_rows] for name, values in rows.items()}
        if family == "bert":
            part = _bert_inputs(part, mask_fraction)
        micro_batches.append({name: _tensor(values, device) for name, values in part.items()})
    return StepBatch(micro_batches, tuple(counts), inverse.to(device, non_blocking=True), tokens, total)


def real_tokens(rows: dict[str, np.ndarray]) -> int:
    """Tokens of the rows, padding left out."""
    if "attention_mask" in rows:
        return int(np.count_nonzero(rows["attention_mask"]))
    if "document_ids" in rows:
        return int(np.count_nonzero(rows["document_ids"] >= 0))
    return rows["input_ids"].size


def _bert_inputs(rows: dict[str, np.ndarray], mask_fraction: float) -> dict[str, np.ndarray]:
    """Targets as places and values; no attention mask where nothing is padded."""
    targets = rows.pop("targets")
    most = targets.shape[0] * int(np.ceil(targets.shape[1] * mask_fraction))
    rows["predicted"], rows["predicted_targets"] = _places(targets, max(most // 4, 1))
    if "nsp_targets" in rows:
        pairs = rows.pop("nsp_targets")
        if pairs.ndim == 1:  # one pair to a row: its [CLS] is the first token
            rows["pairs"], rows["pair_targets"] = np.arange(len(pairs)) * targets.shape[1], pairs
        else:
            rows["pairs"], rows["pair_targets"] = _places(pairs, len(pairs))
    if "attention_mask" in rows and rows["attention_mask"].all():
        del rows["attention_mask"]
    return rows


def _places(targets: np.ndarray, quantum: int) -> tuple[np.ndarray, np.ndarray]:
    """Places (N,) of the targets in the flattened rows and the targets there, filled up with IGNORED to a multiple of `quantum`.

    So a compiled step meets a handful of shapes: for masked tokens the quantum is a quarter of the most there can be.
    """
    found = np.flatnonzero(targets != IGNORED)
    room = max(-(-len(found) // quantum), 1) * quantum
    places, values = np.zeros(room, np.int64), np.full(room, IGNORED, np.int64)
    places[: len(found)] = found
    values[: len(found)] = targets.reshape(-1)[found]
    return places, values


def _tensor(values: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
