"""Attention over a row that several processes hold: no tensor of queries times keys, and memory that falls.

That it computes what one process does is proven with the layouts (tests/layouts.toml, `context`).
"""

import gc

import pytest
import torch
import torch.distributed as dist
from throughline.benchmarks.simulate import Watch
from throughline.train.objective import ROW_DOCUMENTS, prepare
from throughline.train.parallel.context import ChunkDocuments, chunk_documents, cut_rows
from throughline.train.parallel.mesh import Axis
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS, HEADS, KV_HEADS, SIZE = 131_072, 8, 2, 64


class Largest(Watch):
    """Numbers of the largest tensor that any operation makes, and the most bytes alive."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        self.peak = max(self.peak, self.alive())
        return result


def largest_and_peak(context: int, rank: int) -> tuple[int, int]:
    """Forward and backward of one layer's attention on one of `context` processes, with fake tensors."""
    dist.init_process_group("fake", rank=rank, world_size=context)
    try:
        part = TOKENS // context
        axis = Axis(context, rank, tuple(range(context)), dist.group.WORLD)
        bounds = torch.tensor([[0, part // 2]], dtype=torch.int32).expand(2 * context, -1)
        documents = ChunkDocuments(bounds, part // 2, axis)
        with FakeTensorMode(allow_non_fake_inputs=True), Largest() as watch:
            q, k, v = (
                torch.empty(1, part, heads, SIZE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            out = documents.attend(q, k, v, True)
            assert out.shape == q.shape
            out.backward(torch.empty_like(out))
        gc.collect()
        return watch.numbers, watch.peak
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 7])
def test_131072_tokens_over_8_processes_make_no_square(rank: int) -> None:
    """The largest tensor has as many numbers as a part has queries (or the keys and values of a part); a mask of
    C x S would have 4,096 times as many. From 4 to 8 processes the memory halves.
    """
    part = TOKENS // 8
    numbers, peak = largest_and_peak(8, rank)
    assert numbers <= part * max(HEADS, 2 * KV_HEADS) * SIZE < part * TOKENS / 200
    assert peak == pytest.approx(largest_and_peak(4, rank % 4)[1] / 2, rel=0.01)


def test_bounds_of_chunks_are_those_of_the_documents() -> None:
    """Two rows of 16 over two processes, four chunks of 4: in every chunk, each document's tokens and no others."""
    numbers = torch.tensor([[0] * 3 + [1] * 10 + [2] * 3, [0] * 8 + [-1] * 8]).int().numpy()
    rows = {"input_ids": numbers.astype("int64"), "targets": numbers.astype("int64"), "document_ids": numbers}
    cut = cut_rows(rows, Axis(2, 0, (0, 1), None))
    assert cut[ROW_DOCUMENTS] is numbers and "document_ids" not in cut
    (batch,) = prepare(cut, "gpt", 2, torch.device("cpu")).micro_batches
    table = chunk_documents(batch, Axis(2, 0, (0, 1), None)).bounds_N
    # documents 0, 1, 2 of the first row, 0 and padding of the second; filled up to eight by empty ones
    assert [row[:6] for row in table.tolist()] == [
        [0, 3, 4, 4, 8, 8],
        [0, 0, 4, 4, 8, 8],
        [0, 0, 4, 4, 4, 8],
        [0, 0, 1, 4, 4, 8],
    ]
    assert table.shape == (4, 9) and (table[:, 6:] == 8).all()
