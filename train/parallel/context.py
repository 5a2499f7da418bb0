"""Context parallelism: each process holds a part of every row, and attention gathers the keys and values of all of them.

Process r of n holds parts r and 2n-1-r of 2n, so that every one has as much of the causal triangle (the head-tail order of
Llama 3, section 3.3.2). Losses are sums, so the order of the tokens does not matter to them; positions go along with the
tokens. torch's own `context_parallel` has no CPU kernel; all-gathered keys with an explicit mask take any order, documents and
grouped heads.

Shape letters: B batch, S positions of a row, C of them here (S / context), A heads, G key-value heads, D head width.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...models.layers import scaled_dot_product
from ..objective import IGNORED
from .collectives import Gathering, Scattering
from .mesh import Axis

KEY_DOCUMENTS, KEY_MASK = "key_document_ids", "key_attention_mask"


def head_tail_order(length: int, parts: int) -> np.ndarray:
    """The positions of a row in the order in which the processes hold them: (S,), process r has the r-th of `parts` equal parts."""
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([np.concatenate((chunks[r], chunks[2 * parts - 1 - r])) for r in range(parts)])


def cut_rows(rows: dict[str, np.ndarray], axis: Axis) -> dict[str, np.ndarray]:
    """This process's part of each row, with explicit positions, and what it must know of all keys.

    One sentence pair to a row is predicted from its first token: only the process that holds it keeps those targets.
    """
    if axis.size == 1:
        return rows
    total, length = rows["input_ids"].shape
    order = head_tail_order(length, axis.size)
    here = order[axis.rank * (length // axis.size) : (axis.rank + 1) * (length // axis.size)]
    cut = {name: values[:, here] for name, values in rows.items() if values.ndim == 2}
    cut.setdefault("positions", np.tile(here, (total, 1)))
    if "document_ids" in rows:
        del cut["document_ids"]
        cut[KEY_DOCUMENTS] = rows["document_ids"][:, order]
    if "attention_mask" in rows:
        del cut["attention_mask"]
        cut[KEY_MASK] = rows["attention_mask"][:, order]
    pairs = rows.get("nsp_targets")
    if pairs is not None and pairs.ndim == 1:
        cut["nsp_targets"] = pairs if axis.rank == 0 else np.full_like(pairs, IGNORED)
    return cut


def context_mask(batch: dict[str, Tensor], axis: Axis, causal: bool) -> Tensor | None:
    """Which keys (of all, in their order of gathering) each query here may see: (1 or B, 1, C, S) bool; None = all."""
    part = batch["input_ids"].shape[1]
    device = batch["input_ids"].device
    mask = None
    if causal:
        order = torch.from_numpy(head_tail_order(part * axis.size, axis.size)).to(device)
        here = order[axis.rank * part : (axis.rank + 1) * part]
        mask = (here[:, None] >= order[None, :])[None, None]
    if KEY_DOCUMENTS in batch:
        keys = batch[KEY_DOCUMENTS]
        here = keys[:, axis.rank * part : (axis.rank + 1) * part]
        same = (here[:, :, None] == keys[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    if KEY_MASK in batch:
        real = batch[KEY_MASK][:, None, None, :]
        mask = real.expand(-1, 1, part, -1) if mask is None else mask & real
    return mask


class _GatherKeys(torch.autograd.Function):
    """Keys or values of all processes, along dim 2; each gets back the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x_BGCD: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return Gathering(x_BGCD, 2, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad_BGSD: Tensor) -> tuple[Tensor | None, ...]:
        return Scattering(grad_BGSD, 2, ctx.axis).wait(), None


def make_attend(axis: Axis) -> Callable[..., Tensor]:
    """What replaces `Attention.attend`: queries here, keys and values of the whole row."""

    def attend(
        q_BACD: Tensor,
        k_BGCD: Tensor,
        v_BGCD: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        dropout: float = 0.0,
    ) -> Tensor:
        assert not is_causal, "a part of a row is not causal by its own order"
        # one collective for both, in the dtype of the products: rotary positions leave the keys in fp32
        kv = _GatherKeys.apply(torch.cat((k_BGCD.to(v_BGCD.dtype), v_BGCD), dim=-1), axis)
        k, v = kv.split(k_BGCD.shape[-1], dim=-1)
        return scaled_dot_product(q_BACD, k, v, mask=mask, dropout=dropout)

    return attend


def apply_context_parallel(model: Any, axis: Axis) -> None:
    """Let every block of the model attend over the whole row."""
    if axis.group is None:
        return
    for block in model.blocks.values():
        block.attention.attend = make_attend(axis)
