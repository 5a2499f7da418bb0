"""Context parallelism: each process holds a part of every row, and keys and values go round in a ring.

Process r of n holds chunks r and 2n-1-r of 2n, so that every one has as much of the causal triangle (the
head-tail order of Llama 3, section 3.3.2). Each chunk of queries meets each chunk of keys that it may see in one
kernel call, causal for its own chunk and full for the ones before, and the results are merged by their log-sum-exp
(Liu et al. 2023, Ring Attention; the skipped triangle after Brandon et al. 2023, Striped Attention). The backward is
the same kernel's, given the merged result, while keys, values and their float32 gradients go round again. A process
holds the keys of two parts at a time: its memory falls as 1 / n. Documents and padding are bounds within each chunk.

A layer with a window gathers the keys and values of the rows (Llama 3, section 3.3.2), and a chunk of queries is one
call over the chunks that the window reaches: its time is the window's, and it keeps the keys of no more chunks.

Shape letters: B rows, C positions of a row here (S / context), H of a chunk (C / 2), T = B x H tokens of a
chunk, U tokens of the chunks that a window reaches, A heads, G key-value heads, D head width, E = 2 D, N documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...data.dataset import NO_TARGET
from ...models import attention_cpu, attention_cuda
from ...models.attention import Documents, attend_beside, sink_gradient
from .mesh import Axis
from .tensor import gather_rows

ROW_DOCUMENTS = "row_documents"  # (B, S): documents of whole rows, of which a process has a part


def head_tail_order(length: int, parts: int) -> np.ndarray:
    """The positions (S,) of a row in the order in which the processes hold them, an equal part each."""
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([np.concatenate((chunks[r], chunks[2 * parts - 1 - r])) for r in range(parts)])


def documents_of(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The document of each token of the rows (B, S), -1 for padding; one to a row where they say of none."""
    if "document_ids" in rows:
        return rows["document_ids"]
    return np.where(rows.get("attention_mask", np.ones(rows["input_ids"].shape, bool)), 0, -1)


def cut_rows(rows: dict[str, np.ndarray], axis: Axis) -> dict[str, np.ndarray]:
    """This process's part of each row, with explicit positions, and the documents of the whole rows."""
    if axis.size == 1:
        return rows
    total, length = rows["input_ids"].shape
    order = head_tail_order(length, axis.size)
    here = order[axis.rank * (length // axis.size) : (axis.rank + 1) * (length // axis.size)]
    cut = {name: values[:, here] for name, values in rows.items() if values.ndim == 2}
    cut.setdefault("positions", np.tile(here, (total, 1)))
    found = [cut.pop(name, None) is not None for name in ("document_ids", "attention_mask")]
    if any(found):
        cut[ROW_DOCUMENTS] = documents_of(rows)
    pairs = rows.get("nsp_targets")
    if pairs is not None and pairs.ndim == 1:
        # predicted from the first token, by the process that holds it alone
        cut["nsp_targets"] = pairs if axis.rank == 0 else np.full_like(pairs, NO_TARGET)
    return cut


@dataclass(frozen=True)
class ChunkDocuments(Documents):
    """The documents of every chunk: bounds (2 context, N + 1), those of row c within the (T,) tokens of chunk c."""

    parted = True
    axis: Axis
    known: list[list[int]] | None = None  # the bounds as numbers, where nothing has to be read for them

    @cached_property
    def bounds(self) -> list[list[int]]:
        """Of each chunk as numbers, for kernels that walk over them: read once for all layers and both directions."""
        return self.known or self.bounds_N.tolist()

    def attend(
        self,
        q_BASD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        is_causal: bool,
        dropout: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert not dropout, "refused by the layout's rules"
        if not window:
            return _RingAttention.apply(q_BASD, k_BGSD, v_BGSD, sinks, self, is_causal)
        axis, size, parts = self.axis, self.longest, []
        gathered_BSGE = gather_rows(torch.cat((k_BGSD, v_BGSD), -1).transpose(1, 2), axis)
        chunks_BNHGE = gathered_BSGE.unflatten(1, (-1, size))
        # where the chunks of a row are
        order = [*range(0, 2 * axis.size, 2), *range(2 * axis.size - 1, 0, -2)]
        for own, q_TAD in zip((axis.rank, 2 * axis.size - 1 - axis.rank), _to_chunks(q_BASD)):
            first = max(0, own - -(-(window - 1) // size))
            seen_UGE = chunks_BNHGE[:, order[first : own + 1]].flatten(0, 2)
            k_UGD, v_UGD = (x.contiguous() for x in seen_UGE.chunk(2, -1))
            # a run has in several chunks as many tokens as in each together, and its queries are the last of them
            bounds = self.bounds_N[own], self.bounds_N[first : own + 1].sum(0, dtype=torch.int32)
            longest = (own + 1 - first) * size
            parts.append(attend_beside(q_TAD, k_UGD, v_UGD, sinks, *bounds, longest, True, window))
        return _from_chunks(torch.stack(parts), len(q_BASD))


def chunk_documents(batch: dict[str, Tensor], axis: Axis) -> ChunkDocuments:
    """The documents of a micro-batch, of whose rows every process of the axis has a part."""
    rows, part = batch["input_ids"].shape
    bounds, known = batch.get("document_bounds"), None
    if bounds is None:  # a row is one document
        ends = torch.arange(rows + 1, dtype=torch.int32, device=batch["input_ids"].device)
        bounds = (ends * (part // 2)).expand(2 * axis.size, -1)
        known = [[row * (part // 2) for row in range(rows + 1)]] * (2 * axis.size)
    return ChunkDocuments(bounds, part // 2, axis, known)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BACD: Tensor, k_BGCD: Tensor, v_BGCD: Tensor, *rest: Any) -> Tensor:
        sinks_A, documents, causal = rest
        axis, (bounds, kernel) = documents.axis, _bounds(documents, q_BACD)
        q = _to_chunks(q_BACD)  # (2, T, A, D)
        kv = torch.stack((_to_chunks(k_BGCD), _to_chunks(v_BGCD)))  # (2, 2, T, G, D)
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full((2, q.shape[2], q.shape[1]), -torch.inf)  # (2, A, T)
        if sinks_A is not None:  # merged first
            lse.copy_(sinks_A[:, None])
        here = kv
        for step in range(axis.size):
            passing = _Passing(here, axis) if step < axis.size - 1 else None
            for i, j, own, other in _pairs(step, causal, axis):
                lengths = bounds[own], bounds[other], documents.longest
                part = kernel.forward(q[i], here[0, j], here[1, j], *lengths, causal and own == other)
                _merge(out[i], lse[i], *part)
            if passing is not None:
                here = passing.wait()
        merged = out.to(q.dtype)
        ctx.save_for_backward(q, kv, merged, lse, sinks_A)
        ctx.documents, ctx.causal, ctx.rows = documents, causal, len(q_BACD)
        return _from_chunks(merged, len(q_BACD))

    @staticmethod
    def backward(ctx: Any, grad_BACD: Tensor) -> tuple[Tensor | None, ...]:
        q, here, out, lse, sinks_A = ctx.saved_tensors
        axis, causal = ctx.documents.axis, ctx.causal
        bounds, kernel = _bounds(ctx.documents, q)
        grad = _to_chunks(grad_BACD)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        coming = None  # the gradients of the keys that are here, from the processes that had them before
        for step in range(axis.size):
            passing = _Passing(here, axis) if step < axis.size - 1 else None
            dkv = torch.zeros_like(here, dtype=lse.dtype)
            for i, j, own, other in _pairs(step, causal, axis):
                queries, keys = (grad[i], q[i]), (here[0, j], here[1, j])
                lengths = bounds[own], bounds[other], ctx.documents.longest
                parts = kernel.backward(*queries, *keys, out[i], lse[i], *lengths, causal and own == other)
                for whole, part in zip((dq[i], dkv[0, j], dkv[1, j]), parts):
                    whole += part
            if coming is not None:
                dkv += coming.wait()
            coming = _Passing(dkv, axis)  # after the last step: home
            if passing is not None:
                here = passing.wait()
        assert coming is not None
        dk, dv = coming.wait().to(here.dtype).unbind(0)
        of_sinks = None
        if sinks_A is not None:
            of_sinks = torch.stack([sink_gradient(sinks_A, *both) for both in zip(grad, out, lse)]).sum(0)
        return *(_from_chunks(x, ctx.rows) for x in (dq.to(q.dtype), dk, dv)), of_sinks, None, None


class _Passing:
    """A tensor on its way to the next process of the ring, and one from the process before."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.x, self.received = x, torch.empty_like(x)  # x is alive until it has been sent
        after, before = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
        sending = dist.P2POp(dist.isend, x, after, axis.group)
        receiving = dist.P2POp(dist.irecv, self.received, before, axis.group)
        self.works = dist.batch_isend_irecv([sending, receiving])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _pairs(step: int, causal: bool, axis: Axis) -> Iterator[tuple[int, int, int, int]]:
    """Which chunk here (0 or 1) meets which of those that are visiting, and their numbers in the row."""
    visitor = (axis.rank - step) % axis.size
    for i, own in enumerate((axis.rank, 2 * axis.size - 1 - axis.rank)):
        for j, other in enumerate((visitor, 2 * axis.size - 1 - visitor)):
            if not causal or other <= own:
                yield i, j, own, other


def _bounds(documents: ChunkDocuments, like: Tensor) -> tuple[list[Any], Any]:
    """The bounds of each chunk and the kernel that takes them: FlashAttention's, else plain products."""
    if attention_cuda.has_flash(like):
        return list(documents.bounds_N), attention_cuda
    return documents.bounds, attention_cpu


def _merge(out_TAD: Tensor, lse_AT: Tensor, part_TAD: Tensor, part_lse_AT: Tensor) -> None:
    """Add a part's result to the ones before, in place: each weighs as much as its share of the exponentials."""
    both = torch.logaddexp(lse_AT, part_lse_AT)
    safe = both.masked_fill(both == -torch.inf, 0.0)  # a query that has met no key yet
    out_TAD.mul_((lse_AT - safe).exp().t()[..., None])
    out_TAD.add_(part_TAD * (part_lse_AT - safe).exp().t()[..., None])
    lse_AT.copy_(both)


def _to_chunks(x_BACD: Tensor) -> Tensor:
    """(B, A, C, D) -> (2, T, A, D), contiguous."""
    return x_BACD.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2).contiguous()


def _from_chunks(x_2TAD: Tensor, rows: int) -> Tensor:
    """(2, T, A, D) -> (B, A, C, D)."""
    return x_2TAD.unflatten(1, (rows, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)


def run_ring_eagerly() -> None:
    """Before blocks are compiled: what goes between processes runs as it is, between two graphs."""
    ChunkDocuments.attend = torch.compiler.disable(ChunkDocuments.attend)  # type: ignore[method-assign]
