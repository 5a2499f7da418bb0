"""Decode steps of a torch model as CUDA graphs.

A step of single tokens is some hundred launches, each of which takes the host longer than the GPU. For each number of
rows (a power of two) and of places that they look at (a power of two) the step is captured once, on memory of its own
for ids and places, and replayed from then on: one launch. Rows that take no part compute a token of no meaning behind
what they hold, where the next one overwrites it. What cannot be captured is launched as any other step.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.backend import Span
from ...core.console import warn
from ...models.attention import KeyValueCache
from ...models.gpt import GPT
from ...models.layers import Attention
from .packed import Packed, packed_logits
from .tensorrt_backend import captured

LEAST_PLACES = 256
WASTED_BYTES = 256 << 20  # read in vain, beyond which launches are cheaper; kernels with bounds waste nothing


@dataclass
class Step:
    """A captured step: memory for the ids and places of its rows, and of its logits (R, V)."""

    replay: Callable[[], None]
    given_2R: Tensor
    logits_RV: Tensor


Steps = dict[tuple[int, int], Step]  # of one cache


class DecodeGraphs:
    """The decode steps of a model. `capture` makes a graph of a call."""

    def __init__(
        self, model: GPT, modules: Sequence[Attention], capture: Callable[..., Callable[[], None]] = captured
    ) -> None:
        self._model, self._modules, self._capture = model, modules, capture
        self._device = model.token_table.weight.device
        self._pool: Any = None
        self.failures = 0

    def logits(
        self, spans: Sequence[Span], cache: KeyValueCache, held: dict[int, int], steps: Steps
    ) -> Tensor | None:
        """Logits (N, V) of a step, or None for one that is to be launched: parts of prompts, beside a row that is full,
        or where much would be read in vain. `held`: tokens of each row, after this step.
        """
        if self.failures or any(len(span.ids) > 1 or not span.asked for span in spans):
            return None
        rows = np.array([span.row for span in spans])
        count = min(1 << int(rows.max()).bit_length(), cache.rows)
        given = np.zeros((2, count), np.int64)
        given[1] = [held.get(row, 0) for row in range(count)]
        given[:, rows] = [[span.ids[0] for span in spans], [span.past for span in spans]]
        seen = min(max(LEAST_PLACES, 1 << int(given[1, rows].max()).bit_length()), cache.places)
        wasted = (count * seen - int(given[1, rows].sum())) * cache.token_bytes
        if given[1].max() >= cache.places or (wasted > WASTED_BYTES and not cache.has_flash):
            return None
        with self._here():
            if (count, seen) not in steps:
                try:
                    steps[count, seen] = self._make(given, seen, cache)
                except Exception as error:  # of any library, and of memory: launches may do
                    self.failures += 1
                    warn(f"decode steps are launched one kernel at a time: {type(error).__name__}: {error}")
                    return None
            step = steps[count, seen]
            step.given_2R.copy_(self._staged(given), non_blocking=True)
            lines = self._staged(rows).to(self._device, non_blocking=True)
            step.replay()
            return step.logits_RV.index_select(0, lines)  # a copy: the next replay writes the same memory

    def _make(self, given: np.ndarray, seen: int, cache: KeyValueCache) -> Step:
        given_2R = torch.from_numpy(given).to(self._device)
        shape = given.shape[1], self._model.config.vocab_size
        logits_RV = torch.empty(shape, dtype=torch.float32, device=self._device)

        def run() -> None:
            packed = Packed.of_rows(given_2R, seen, cache, self._model.config)
            logits_RV.copy_(packed_logits(self._model, self._modules, packed))

        aside = None
        if self._device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            aside = (
                torch.cuda.Stream()
            )  # torch's own for captures is of the first device that it was asked on
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # what happens once, such as a library's memory, is no part of it
                run()
            torch.cuda.current_stream().wait_stream(aside)
        return Step(self._capture(run, aside, self._pool), given_2R, logits_RV)

    def _staged(self, numbers: np.ndarray) -> Tensor:
        """In page-locked memory of the host, whose copy nobody waits for."""
        given = torch.from_numpy(numbers)
        return given.pin_memory() if self._device.type == "cuda" else given

    def _here(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
