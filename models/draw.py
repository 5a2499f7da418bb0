"""Normal numbers by element number: any part of a tensor is drawn without the rest, with the same bits everywhere.

Philox (Salmon et al. 2011) is a counter-based generator: word i of a stream is a function of (key, i). A word's
upper 16 bits choose a cell of a table of the normal quantile function, its lower 16 a place in the cell. What is
done to an element are one multiplication and one addition, which IEEE 754 rounds alike on every
processor; an inverse error function is not, nor is one drawn by a vector library. The table ends at 5.3 standard
deviations; mean, variance and kurtosis are those of the normal distribution to 1e-4.
"""

import functools
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

CELL_BITS = 16
BLOCK = 8  # words of 32 bits that the generator makes at a time
AT_ONCE = 1 << 18  # elements: their temporaries stay in the cache


@functools.cache
def _cells() -> tuple[np.ndarray, np.ndarray]:
    """Where each cell of the quantile function begins, and its rise for one unit of a word's lower half; float32."""
    quantile, cells = NormalDist().inv_cdf, 1 << CELL_BITS
    upper = [quantile(0.5 + i / cells) for i in range(cells // 2)] + [quantile(1 - 2.0**-24)]
    whole = np.array([-x for x in reversed(upper[1:])] + upper).astype(np.float32)
    rise = (whole[1:].astype(np.float64) - whole[:-1]) / (1 << (32 - CELL_BITS))
    return whole[:-1], rise.astype(np.float32)


def _fill(out: np.ndarray, key: tuple[int, int], first: int) -> None:
    """Elements first, first + 1, ... of the stream, in place."""
    starts, rises = _cells()
    generator = np.random.Philox(key=np.array(key, np.uint64))
    generator.advance(first // BLOCK)
    start, skip = 0, first % BLOCK
    while start < len(out):
        here = out[start : start + AT_ONCE - skip]
        blocks = -(-(skip + len(here)) // BLOCK)
        words = generator.random_raw(blocks * BLOCK // 2).astype("<u8", copy=False).view("<u4")
        words = words[skip : skip + len(here)]
        cells = (words >> CELL_BITS).astype(np.intp)
        np.multiply(rises.take(cells), (words & 0xFFFF).astype(np.float32), out=here)
        here += starts.take(cells)
        start, skip = start + len(here), 0


def normal(key: tuple[int, int], shape: tuple[int, ...], part: tuple[slice, ...] | None = None) -> Tensor:
    """The slices `part` (default: all) of a standard normal tensor of this shape, float32, on the CPU.

    `key` are two numbers of 64 bits. Slices have steps of 1.
    """
    bounds = [
        (cut.start or 0, size if cut.stop is None else cut.stop)
        for cut, size in zip(part or (slice(None),) * len(shape), shape, strict=True)
    ]
    out = np.empty([stop - start for start, stop in bounds], np.float32)
    whole = 1  # elements of the trailing dims that are taken whole
    while bounds and bounds[-1] == (0, shape[len(bounds) - 1]):
        whole *= shape[len(bounds) - 1]
        bounds.pop()
    start, stop = bounds.pop() if bounds else (0, 1)
    run = (stop - start) * whole  # neighbours in the whole tensor and in the part
    outer, stride = np.zeros(1, np.int64), whole * (shape[len(bounds)] if len(shape) > len(bounds) else 1)
    for dim in reversed(range(len(bounds))):
        places = np.arange(*bounds[dim]) * stride
        outer, stride = (places[:, None] + outer).reshape(-1), stride * shape[dim]
    for piece, first in zip(out.reshape(-1, run) if out.size else (), outer + start * whole):
        _fill(piece, key, int(first))
    return torch.from_numpy(out)
