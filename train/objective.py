"""What a model learns: sums of losses, each divided by the count of its targets in the whole batch, so that neither the
loss nor its gradient depends on micro-batches or processes; and the batches of a step, made in numpy in another thread.

Letters: B rows, S tokens in a row, N predicted positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..models.config import ModelConfig, family_of
from ..models.init import empty_model
from ..planner.work import prepared_places
from .loss import FIGURES, IGNORED, Batch, Model, Sums, bert_sums, gpt_sums
from .parallel.context import ROW_DOCUMENTS, cut_rows, documents_of
from .parallel.mesh import ALONE, Axis

# terms that help training and are no part of the loss that is logged, validated and compared: they have records of
# their own
AUXILIARY = ("z_loss", "ahead")


@dataclass(frozen=True)
class Objective:
    """The model without values in a dtype, the sums of its losses (terms,), and those that a validation counts."""

    empty: Callable[[torch.dtype], Model]
    sums: Sums
    figures: Sums | None = None  # where an evaluator of its own measures, none
    terms: tuple[str, ...] = ("next",)  # names of the losses; one count of targets is that of all


def pretraining(config: ModelConfig, smoothing: float = 0.0, z_loss: float = 0.0) -> Objective:
    """Next tokens of a GPT, with a z-loss, and further ones (DeepSeek-AI 2024, V3, equations 24 and 25); masked tokens,
    with smoothed labels, and sentence pairs of a BERT.
    """
    family = family_of(config)
    sums: Sums = partial(gpt_sums, z_loss=z_loss) if z_loss else gpt_sums
    terms: tuple[str, ...] = ("next", "z_loss") if z_loss else ("next",)
    terms += ("ahead",) if config.blocks_ahead else ()
    if family == "bert":
        sums, terms = partial(bert_sums, smoothing=smoothing), ("mlm", "nsp")
    return Objective(lambda dtype: empty_model(config, "meta", dtype), sums, FIGURES[family], terms)


@dataclass
class StepBatch:
    """The rows of one optimizer step, ready to compute."""

    micro_batches: list[Batch]
    counts: tuple[int, ...]  # targets of each term in these rows
    counts_there: Tensor  # the same (terms,), float64 on the device
    tokens: int  # real tokens (padding left out)
    rows: int  # of the whole batch
    sequences: int = 0  # of a BERT: pairs or stretches of text, of which a packed row holds several
    agreed: Tensor | None = None  # inverse counts (terms,) of all processes, summed a step ahead


def prepare(
    rows: dict[str, np.ndarray],
    family: str,
    micro_rows: int,
    device: torch.device,
    mask_fraction: float = 0.15,
    unpad: bool = False,
    *,
    context: Axis = ALONE,
    processes: int = 1,
    ahead: int = 0,
) -> StepBatch:
    """Split the rows of one step into micro-batches and count their targets. With `unpad` a micro-batch with much
    padding is one row (1, T) of its real tokens. Of each row the part on the `context` axis is prepared. So many
    `processes` have as many rows, and about as many tokens and sequences. `ahead`: of so many further tokens too.
    """
    total = len(rows["input_ids"])
    numbers = documents_of(rows)
    tokens = int(np.count_nonzero(numbers >= 0))
    sequences = int(np.count_nonzero(_begins(numbers) & (numbers >= 0))) if family == "bert" else 0
    rows = cut_rows(_with_further(rows, numbers, ahead), context)
    counts = [int(np.count_nonzero(rows["targets"] != IGNORED))]
    if family == "bert":
        counts.append(int(np.count_nonzero(rows["nsp_targets"] != IGNORED)) if "nsp_targets" in rows else 0)
    micro_batches = []
    for start in range(0, total, micro_rows):
        part = {name: values[start : start + micro_rows] for name, values in rows.items()}
        if family == "bert":
            part = _bert_inputs(part, mask_fraction)
        part = bound_documents(part, unpad)
        micro_batches.append({name: on_device(values, device) for name, values in part.items()})
    there = on_device(np.array(counts, np.float64), device)
    of_all = tokens * processes, total * processes, sequences * processes
    return StepBatch(micro_batches, tuple(counts), there, *of_all)


def _with_further(rows: dict[str, np.ndarray], numbers_BS: np.ndarray, ahead: int) -> dict[str, np.ndarray]:
    """With inputs and targets that stand so many places on; a target in another document is none."""
    ids, targets, found = rows["input_ids"], rows["targets"], dict(rows)
    last = np.roll(_begins(numbers_BS), -1, axis=1)  # of its document in its row
    for depth in range(1, ahead + 1):
        ids, targets = np.roll(ids, -1, axis=1), np.where(last, IGNORED, np.roll(targets, -1, axis=1))
        found |= {f"input_ids_{depth}": ids, f"targets_{depth}": targets}
    return found


def fill_up(rows: dict[str, np.ndarray], row_multiple: int, length_multiple: int) -> dict[str, np.ndarray]:
    """Rows filled up to a multiple of each by copies of the last row, and of tokens 0, none of which are targets."""
    total, length = rows["input_ids"].shape
    more_rows, more_length = -total % row_multiple, -length % length_multiple
    if not more_rows and not more_length:
        return rows
    filled = {}
    for name, values in rows.items():
        values = np.concatenate([values, np.repeat(values[-1:], more_rows, axis=0)])
        if name in ("targets", "nsp_targets"):
            values[total:] = IGNORED
        if values.ndim == 2:
            empty = {"targets": IGNORED, "nsp_targets": IGNORED, "document_ids": -1}.get(name, 0)
            values = np.pad(values, ((0, 0), (0, more_length)), constant_values=empty)
        filled[name] = values
    return filled


def _bert_inputs(rows: dict[str, np.ndarray], mask_fraction: float) -> dict[str, np.ndarray]:
    targets = rows.pop("targets")
    count, length = targets.shape
    step, _ = prepared_places(count, length, mask_fraction)
    rows["predicted"], rows["predicted_targets"] = places_of(targets, step)
    if "nsp_targets" in rows:
        pairs = rows.pop("nsp_targets")
        if pairs.ndim == 1:  # one pair to a row: its [CLS] is the first token
            rows["pairs"], rows["pair_targets"] = np.arange(count) * length, pairs
        else:
            rows["pairs"], rows["pair_targets"] = places_of(pairs, len(pairs))
    return rows


def bound_documents(rows: dict[str, np.ndarray], unpad: bool = False) -> dict[str, np.ndarray]:
    """Bounds of runs of tokens of one document or of padding; empty ones make them a power of two, for few shapes."""
    if ROW_DOCUMENTS in rows:
        rows["document_bounds"] = _chunk_bounds(rows.pop(ROW_DOCUMENTS), rows["input_ids"].shape[1] // 2)
        return rows
    numbers, packed = documents_of(rows), "document_ids" in rows
    rows = {name: values for name, values in rows.items() if name not in ("document_ids", "attention_mask")}
    if not packed and numbers.min() == 0:
        return rows
    starts, tokens = _begins(numbers).reshape(-1), numbers.size
    if unpad and (room := _room(numbers)) < tokens:
        starts, tokens = _unpad(rows, starts, numbers.reshape(-1) >= 0, room), room
    rows["document_bounds"] = _closed(np.flatnonzero(starts), tokens)
    return rows


def _begins(numbers_BS: np.ndarray) -> np.ndarray:
    """Where a document begins, (B, S) bool."""
    begins = np.ones(numbers_BS.shape, bool)
    begins[:, 1:] = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    return begins


def _closed(starts: np.ndarray, tokens: int) -> np.ndarray:
    """Starts (..., N) with the end of the last document and of empty ones behind them, int32."""
    room = 2 ** int(np.ceil(np.log2(starts.shape[-1]))) + 1
    whole = np.full((*starts.shape[:-1], room), tokens, np.int32)
    whole[..., : starts.shape[-1]] = starts
    return whole


def _chunk_bounds(numbers_BS: np.ndarray, size: int) -> np.ndarray:
    """Where the documents begin within each chunk of `size` positions: (chunks, N + 1) into its B x size tokens."""
    count, length = numbers_BS.shape
    rows, places = np.nonzero(_begins(numbers_BS))
    first = np.arange(0, length, size)[:, None]
    return _closed(rows * size + np.clip(places - first, 0, size), count * size)


def _room(numbers_BS: np.ndarray) -> int:
    """Tokens of the row that the real tokens are moved into: a multiple of an eighth of the batch."""
    quantum, real = max(numbers_BS.size // 8, 1), int(np.count_nonzero(numbers_BS >= 0))
    return max(-(-real // quantum), 1) * quantum


def _unpad(rows: dict[str, np.ndarray], starts: np.ndarray, kept: np.ndarray, room: int) -> np.ndarray:
    """Leave the padding out of the rows, in place, but for what fills up `room`; which tokens begin a document."""
    count, length = rows["input_ids"].shape
    rows.setdefault("positions", np.tile(np.arange(length), (count, 1)))
    place = np.cumsum(kept) - 1
    for name, values in rows.items():
        if name in ("predicted", "pairs"):
            rows[name] = place[values]
        elif values.ndim == 2:
            moved = np.full((1, room), IGNORED if name.startswith("targets") else 0, values.dtype)
            moved[0, : np.count_nonzero(kept)] = values.reshape(-1)[kept]
            rows[name] = moved
    begins = np.zeros(room, bool)
    begins[: np.count_nonzero(kept)] = starts[kept]
    begins[np.count_nonzero(kept) :: length] = True
    return begins


def places_of(targets: np.ndarray, quantum: int) -> tuple[np.ndarray, np.ndarray]:
    """Places (N,) in the flattened rows and targets there, with IGNORED to a multiple of `quantum`: few shapes."""
    found = np.flatnonzero(targets != IGNORED)
    room = max(-(-len(found) // quantum), 1) * quantum
    places, values = np.zeros(room, np.int64), np.full(room, IGNORED, np.int64)
    places[: len(found)] = found
    values[: len(found)] = targets.reshape(-1)[found]
    return places, values


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """On its way there, which the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
