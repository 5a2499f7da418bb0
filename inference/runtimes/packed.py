"""One forward of a GPT over tokens of many sequences: prompts in parts and single tokens of answers together.

All tokens stand in one line (1, T): the matrix products read the weights once. Attention alone knows the
rows: it writes the new keys and values to the cache, and where FlashAttention runs one call of it reads what each row
holds and no more. Elsewhere it computes each part of a prompt over its own row, and the single tokens in groups of
adjacent rows of similar length, so that a short row does not read a long one's places.

A step of single tokens is some hundred launches, each of which takes the host longer than the GPU. For each number of
rows (a power of two) and of places that they look at (a power of two) it is captured once as a CUDA graph, on memory
of its own for ids and places, and replayed from then on: one launch. Rows that take no part compute a token of no
meaning behind what they hold, where the next one overwrites it. What cannot be captured is launched.

Letters: T tokens of the step, R rows of a group, A heads, G key-value heads, P places of a row, D head width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.backend import Span
from ...core.console import warn
from ...models import attention_cuda
from ...models.attention import KeyValueCache, scaled_dot_product
from ...models.config import GPTConfig
from ...models.gpt import GPT
from ...models.layers import Attention, attending
from ...models.rotary import alibi
from .tensorrt_backend import captured

# Places that a group may read in vain before another call of the kernel is cheaper. On a CPU the call costs
# about 15 us, the time to read 200 places of 12 heads of 64; on a GPU 5 to 10 us, in which it reads 10 MB.
WASTE_CPU, WASTE_GPU = 256, 4096


class Runs(NamedTuple):
    """The line as a run of tokens to each of the first R rows, in order, some of them empty."""

    bounds_N: Tensor  # (R + 1,) int32
    seen_R: Tensor  # int32: places that each looks at, its own tokens included
    longest: int
    most_seen: int


class Part(NamedTuple):
    """Tokens [start, stop) of the line, of rows [row, row + rows), which look at the first `seen` places."""

    start: int
    stop: int
    row: int
    rows: int
    seen: int
    mask: Tensor | None  # (S, seen) of a prompt's part, (R, 1, 1, seen) of single tokens; None: all or causal


class Packed:
    """The layout of one step: where each token stands and what it may look at."""

    def __init__(
        self, ids_T: Tensor, rows_T: Tensor, places_T: Tensor, cache: KeyValueCache, config: GPTConfig
    ) -> None:
        self.ids_1T, self.rows_T, self.places_1T = ids_T[None], rows_T, places_T[None]
        self.cache, self._config = cache, config
        self.wanted_N: Tensor | None = None  # places in the line of the tokens whose logits are asked for
        self._line: Sequence[Span] = ()  # in its order; () for a token in each of the first rows, of
        self._seen = 0  # so many places
        self.runs: Runs | None = None  # where a kernel knows bounds

    @classmethod
    def of(cls, spans: Sequence[Span], cache: KeyValueCache, config: GPTConfig) -> "Packed":
        """Of parts of prompts and single tokens."""
        device, bounded = cache.keys_LBGTD.device, cache.has_flash
        order = sorted(range(len(spans)), key=lambda i: (len(spans[i].ids) > 1 and not bounded, spans[i].row))
        line = [spans[i] for i in order]
        rows = np.concatenate([np.full(len(span.ids), span.row) for span in line])
        places = np.concatenate([np.arange(span.past, span.past + len(span.ids)) for span in line])
        ends = np.cumsum([len(span.ids) for span in line])
        asked = {i: np.arange(end - spans[i].asked, end) for i, end in zip(order, ends)}
        wanted = np.concatenate([asked[i] for i in range(len(spans))])
        ids = np.concatenate([span.ids for span in line])
        counts, seen = np.zeros((2, max(span.row for span in line) + 1), np.int64)
        for span in line:
            counts[span.row], seen[span.row] = len(span.ids), span.past + len(span.ids)
        numbers = ids, rows, places, wanted, np.cumsum([0, *counts]), seen
        # one transfer for everything
        whole = torch.from_numpy(np.concatenate(numbers).astype(np.int64))
        whole = whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole
        ids_T, rows_T, places_T, wanted_N, bounds, seen_R = whole.split([len(one) for one in numbers])
        packed = cls(ids_T, rows_T, places_T, cache, config)
        packed.wanted_N, packed._line = wanted_N, line
        if bounded:
            packed.runs = Runs(bounds.int(), seen_R.int(), int(counts.max()), int(seen.max()))
        return packed

    @classmethod
    def of_rows(cls, given_2R: Tensor, seen: int, cache: KeyValueCache, config: GPTConfig) -> "Packed":
        """Of a token in each of the first rows: ids and places on the device, which see at most so many places."""
        ids_R, places_R = given_2R
        bounds = torch.arange(len(ids_R) + 1, device=given_2R.device)
        packed = cls(ids_R, bounds[:-1], places_R, cache, config)
        if cache.has_flash:
            packed.runs = Runs(bounds.int(), (places_R + 1).clamp(max=seen).int(), 1, seen)
        packed._seen = seen
        return packed

    @cached_property
    def parts(self) -> list[Part]:
        """What is computed one by one, where no kernel takes the line."""
        if self._line:
            return list(self._parts(self._line))
        mask = torch.arange(self._seen, device=self.rows_T.device) <= self.places_1T[0, :, None]
        return [Part(0, len(mask), 0, len(mask), self._seen, mask[:, None, None])]

    def _parts(self, line: Sequence[Span]) -> Iterator[Part]:
        places = torch.arange(self.cache.places, device=self.cache.keys_LBGTD.device)
        waste = WASTE_CPU if places.device.type == "cpu" else WASTE_GPU
        at = 0
        while at < len(line) and len(line[at].ids) == 1:
            stop, seen, sum_seen = at + 1, line[at].past + 1, line[at].past + 1
            while stop < len(line) and len(line[stop].ids) == 1 and line[stop].row == line[stop - 1].row + 1:
                longest, own = max(seen, line[stop].past + 1), line[stop].past + 1
                if longest * (stop + 1 - at) - sum_seen - own > waste:
                    break
                stop, seen, sum_seen = stop + 1, longest, sum_seen + own
            mask = None
            if sum_seen < seen * (stop - at):
                mask = (places[:seen] <= self.places_1T[0, at:stop, None])[:, None, None]
            yield Part(at, stop, line[at].row, stop - at, seen, mask)
            at = stop
        start = at
        for span in line[at:]:
            stop, seen = start + len(span.ids), span.past + len(span.ids)
            mask = places[:seen] <= self.places_1T[0, start:stop, None] if span.past else None
            yield Part(start, stop, span.row, 1, seen, mask)
            start = stop

    def attend_in(self, layer: int) -> Callable[..., Tensor]:
        """The attention of one layer, with the signature of `Attention.attend`."""
        keys, values = self.cache.keys_LBGTD[layer], self.cache.values_LBGTD[layer]
        pattern, sloped = self._config.pattern_of(layer), self._config.positions == "alibi"
        bounded = self.runs if not sloped and (pattern is None or pattern.is_band) else None
        places = torch.arange(self.cache.places, device=keys.device)

        def attend(
            q_1ATD: Tensor,
            k_1GTD: Tensor,
            v_1GTD: Tensor,
            softcap: float = 0.0,
            sinks: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            for store, new in ((keys, k_1GTD), (values, v_1GTD)):
                store[self.rows_T, :, self.places_1T[0]] = new[0].transpose(0, 1).to(store.dtype)
            if bounded and not softcap:
                first = slice(len(bounded.seen_R))
                q, k, v = (x.transpose(1, 2) for x in (q_1ATD, keys[first], values[first]))
                window = pattern.window if pattern else 0
                out_TAD = attention_cuda.attend_cache(q[0].to(k.dtype), k, v, *bounded, window, sinks)
                return out_TAD.transpose(0, 1)[None]
            found = []
            bent: Any = {"softcap": softcap, "sinks": sinks}
            for part in self.parts:
                rows = slice(part.row, part.row + part.rows)
                k, v = keys[rows, :, : part.seen], values[rows, :, : part.seen]
                q, mask = q_1ATD[:, :, part.start : part.stop], part.mask
                single = part.stop - part.start == part.rows  # a token of each row
                if pattern is not None or sloped:
                    own, seen = self.places_1T[0, part.start : part.stop, None], places[: part.seen]
                    near = seen <= own if pattern is None else pattern.sees(own, seen, True, layer=layer)
                    mask = near[:, None, None] if single else near[None, None]
                    mask = alibi(self._config.heads, mask, q.dtype) if sloped else mask
                if single:
                    heads = scaled_dot_product(q.permute(2, 1, 0, 3), k, v, mask=mask, **bent)
                    found.append(heads.permute(2, 1, 0, 3))
                else:
                    found.append(scaled_dot_product(q, k, v, mask=mask, is_causal=mask is None, **bent))
            return found[0] if len(found) == 1 else torch.cat(found, dim=2)

        return attend


def packed_logits(model: GPT, modules: Sequence[Attention], packed: Packed) -> Tensor:
    """The logits asked for, float32 at least (N, V), span after span."""
    with attending(modules, packed.attend_in):
        hidden_TW = model.hidden(packed.ids_1T, packed.places_1T)[0]
    logits_NV = model.head(hidden_TW if packed.wanted_N is None else hidden_TW[packed.wanted_N])
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


LEAST_PLACES = 256
WASTED_BYTES = 256 << 20  # read in vain, beyond which launches are cheaper; kernels with bounds waste nothing


class DecodeGraphs:
    """The decode steps of a model. `capture` makes a graph of a call."""

    def __init__(
        self, model: GPT, modules: Sequence[Attention], capture: Callable[..., Callable[[], None]] = captured
    ) -> None:
        self._model, self._modules, self._capture = model, modules, capture
        self._device = model.token_table.weight.device
        self._pool: Any = None
        self.failures = 0

    def logits(self, spans: Sequence[Span], cache: KeyValueCache) -> Tensor | None:
        """Logits (N, V) of a step, or None for one that is to be launched: parts of prompts, beside a row that is full,
        or where much would be read in vain. The cache has the tokens that rows hold after it.
        """
        if self.failures or any(len(span.ids) > 1 or not span.asked for span in spans):
            return None
        rows = np.array([span.row for span in spans])
        count = min(1 << int(rows.max()).bit_length(), cache.rows)
        given = np.zeros((2, count), np.int64)
        given[1] = cache.held[:count]
        given[:, rows] = [[span.ids[0] for span in spans], [span.past for span in spans]]
        seen = min(max(LEAST_PLACES, 1 << int(given[1, rows].max()).bit_length()), cache.places)
        wasted = (count * seen - int(given[1, rows].sum())) * cache.token_bytes
        if given[1].max() >= cache.places or (wasted > WASTED_BYTES and not cache.has_flash):
            return None
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            if (count, seen) not in cache.steps:
                try:
                    cache.steps[count, seen] = self._make(given, seen, cache)
                except Exception as error:  # of any library, and of memory: launches may do
                    self.failures += 1
                    warn(f"decode steps are launched one kernel at a time: {type(error).__name__}: {error}")
                    return None
            return cache.steps[count, seen](given, rows)

    def _make(self, given: np.ndarray, seen: int, cache: KeyValueCache) -> Callable[..., Tensor]:
        """A captured step, of ids and places (2, R) and of the rows whose logits it gives."""
        given_2R = torch.from_numpy(given).to(self._device)
        shape = given.shape[1], self._model.config.vocab_size
        logits_RV = torch.empty(shape, dtype=torch.float32, device=self._device)

        def run() -> None:
            packed = Packed.of_rows(given_2R, seen, cache, self._model.config)
            logits_RV.copy_(packed_logits(self._model, self._modules, packed))

        aside = None
        if self._device.type == "cuda":
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            aside = torch.cuda.Stream()  # torch's own for captures is of the first device that asked
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # what happens once, such as a library's memory, is no part of it
                run()
            torch.cuda.current_stream().wait_stream(aside)
        replay = self._capture(run, aside, self._pool)

        def step(given: np.ndarray, rows: np.ndarray) -> Tensor:
            given_2R.copy_(self._staged(given), non_blocking=True)
            lines = self._staged(rows).to(self._device, non_blocking=True)
            replay()
            return logits_RV.index_select(0, lines)  # a copy: the next replay writes the same memory

        return step

    def _staged(self, numbers: np.ndarray) -> Tensor:
        """In page-locked memory of the host, whose copy nobody waits for."""
        given = torch.from_numpy(numbers)
        return given.pin_memory() if self._device.type == "cuda" else given
