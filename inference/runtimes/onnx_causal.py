"""A GPT graph of `onnx_gpt` on the CPU, by ONNX Runtime.

- The cache is memory of ours, bound as past and present at once, so new tokens are written in place and any run of
  adjacent rows is a view. Its capacity follows the longest row in steps, up and down: the standard Attention looks
  over all of it, in every row; graphs written for ONNX Runtime look at what a row holds.
- A decode step of the same rows as the last one binds nothing anew: 50 bindings of GPT-2 take 0.4 ms.
- A step is calls of (batch, sequence). Single tokens of answers go in one over the rows from the first to the last of
  them; rows in between that take no part get a token that nobody reads, behind their own. Parts of prompts follow,
  adjacent rows of nearly the same length together.

Letters: B rows of a call, S its longest span, N the most positions asked of one of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.backend import Limits, Span, library
from ...models.config import GPTConfig
from .sampling import beside, copy_of

BINDINGS = 16  # kept for decode steps: one for each number of rows
CAPACITY_STEP = 128  # tokens by which a cache grows; each growth copies it once
CACHE_LINE = 64  # bytes
ONE_PROMPT = "one_prompt"  # metadata of a graph that reads one prompt with a past in a call


@dataclass
class OnnxCache:
    """Keys and values of sequences, and the bindings of their tensors."""

    stores: dict[str, Any]  # of each cache of the graph (rows, kv heads, capacity, head)
    lengths: np.ndarray  # tokens that each row holds
    capacity: int
    bindings: dict[tuple[int, ...], Callable[..., Any]] = field(default_factory=dict)


class OnnxCausal:
    """A GPT graph in host memory (`core.backend.CausalBackend`)."""

    name = "onnxruntime"
    device = "cpu"
    limits = Limits()
    copied_when_bound = (
        False  # whether the session copies inputs when they are bound: they are bound for each call
    )

    def __init__(self, session: Any, config: GPTConfig, dtype: str = "fp32") -> None:
        self.session, self.dtype = session, dtype
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        self._shape = (config.key_value_heads, config.head_size)
        self._one_prompt = ONE_PROMPT in session.get_modelmeta().custom_metadata_map
        pasts = [given for given in session.get_inputs() if given.name.startswith("past.")]
        self._caches = [given.name.removeprefix("past.") for given in pasts]
        self._kind = np.float16 if "float16" in pasts[0].type else np.float32
        capacity = pasts[0].shape[2]
        self._fixed = capacity if isinstance(capacity, int) else 0  # TensorRT's graphs have one
        self.token_bytes = len(pasts) * self._shape[0] * self._shape[1] * np.dtype(self._kind).itemsize

    def zeros(self, shape: tuple[int, ...], kind: Any) -> Any:
        """Zeros that begin with a line of the processor's cache, so that no vector of a head lies across two."""
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        memory = np.zeros(size + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        return memory[start : start + size].view(kind).reshape(shape)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def written(self) -> None:
        """What runs before a call, when its inputs have been written."""

    def new_cache(self, rows: int) -> OnnxCache:
        """An empty cache whose capacity follows its longest row."""
        capacity = self._room(1)
        shape = (rows, self._shape[0], capacity, self._shape[1])
        stores = {name: self.zeros(shape, self._kind) for name in self._caches}
        return OnnxCache(stores, np.zeros(rows, np.int64), capacity)

    def _resize(self, cache: OnnxCache, capacity: int) -> None:
        """Other room in every row; what both have room for is kept."""
        both = min(capacity, cache.capacity)
        cache.bindings.clear()
        for name, old in cache.stores.items():
            cache.stores[name] = self.zeros((*old.shape[:2], capacity, old.shape[3]), self._kind)
            cache.stores[name][:, :, :both] = old[:, :, :both]
        cache.capacity = capacity

    def _room(self, tokens: int) -> int:
        """The capacity that has room for so many tokens."""
        return self._fixed or min(-(-tokens // CAPACITY_STEP) * CAPACITY_STEP, self.context)

    def step(self, spans: Sequence[Span], cache: OnnxCache) -> Any:
        if self.limits.tokens and max(len(span.ids) for span in spans) > self.limits.tokens:
            return in_pieces(self.step, spans, cache, self.limits.tokens)
        calls = rectangles(spans, cache.lengths, self.context, self.limits.rows, self._one_prompt)
        found = []
        for call in calls:
            logits = self._run(call, cache)
            found.append(logits if len(calls) == 1 else copy_of(logits))
            for line, owner in enumerate(call.owners):
                if owner is None:  # this row took no part
                    cache.lengths[call.first_row + line] = call.past_B[line]
        for span in spans:
            cache.lengths[span.row] = span.past + len(span.ids)
        return scatter_logits(spans, calls, found)

    def _run(self, call: "Call", cache: OnnxCache) -> Any:
        """Logits (B, N, V) beside the cache."""
        (rows, length), first_row = call.ids_BS.shape, call.first_row
        needed = int(call.past_B.max()) + length
        assert needed <= self.context, (needed, self.context)
        if needed > cache.capacity:
            self._resize(cache, min(max(self._room(needed), cache.capacity * 5 // 4), self.context))
        cache.lengths[first_row : first_row + rows] = call.past_B + length
        key = (first_row, rows, length, call.ask_BN.shape[1])
        bound = cache.bindings.get(key)
        if bound is None:
            bound = self._bind(cache, *key)
            if length == 1:
                if len(cache.bindings) == BINDINGS:
                    del cache.bindings[next(iter(cache.bindings))]
                cache.bindings[key] = bound
        return bound(call.ids_BS, call.past_B, call.ask_BN)

    def _bind(
        self, cache: OnnxCache, first_row: int, rows: int, length: int, asked: int
    ) -> Callable[..., Any]:
        """A call of one shape on the same rows, of ids, pasts and places; the next one writes its logits again."""
        kind, _, number = self.device.partition(":")
        binding = self.session.io_binding()

        def place(array: Any, element: Any) -> tuple[Any, ...]:
            return (kind, int(number or 0), element, tuple(array.shape), self.address(array))

        shapes = {"input_ids": (rows, length), "past_length": (rows,), "logit_positions": (rows, asked)}
        inputs = {name: self.zeros(shape, np.int64) for name, shape in shapes.items()}

        def bind_inputs() -> None:
            for name, buffer in inputs.items():
                binding.bind_input(name, *place(buffer, np.int64))

        if not self.copied_when_bound:
            bind_inputs()
        logits = self.zeros((rows, asked, self.vocab_size), np.float32)
        binding.bind_output("logits", *place(logits, np.float32))
        for name, store in cache.stores.items():
            part = place(store[first_row : first_row + rows], self._kind)
            binding.bind_input(f"past.{name}", *part)
            binding.bind_output(f"present.{name}", *part)

        def run(*values: np.ndarray) -> Any:
            for buffer, value in zip(inputs.values(), values):
                buffer[...] = beside(buffer, np.ascontiguousarray(value, np.int64))
            self.written()
            if self.copied_when_bound:
                bind_inputs()
            self.session.run_with_iobinding(binding)
            return logits

        return run

    def copy_row(self, cache: OnnxCache, source: int, target: int, tokens: int) -> None:
        self.load_row(cache, target, [store[source] for store in cache.stores.values()], tokens)

    def free_row(self, cache: OnnxCache, row: int) -> None:
        """When the longest row goes, all others get faster. It is emptied: Attention reads all, and 0 x NaN is NaN."""
        for store in cache.stores.values():
            store[row, :, : cache.lengths[row]] = 0
        cache.lengths[row] = 0
        room = self._room(max(int(cache.lengths.max()), 1))
        if 2 * room <= cache.capacity:
            self._resize(cache, room)

    def save_row(self, cache: OnnxCache, row: int, tokens: int) -> list[Any]:
        return [copy_of(store[row, :, :tokens]) for store in cache.stores.values()]

    def load_row(self, cache: OnnxCache, row: int, saved: list[Any], tokens: int) -> None:
        if tokens > cache.capacity:
            self._resize(cache, self._room(tokens))
        for store, kept in zip(cache.stores.values(), saved):
            store[row, :, :tokens] = kept[:, :tokens]
            store[row, :, tokens : cache.lengths[row]] = 0  # as `free_row`
        cache.lengths[row] = tokens


FILLED = 0.8  # share of real tokens that several prompts in one call must have


@dataclass(frozen=True)
class Call:
    """One call: spans by their place in the step (None: a row that takes no part), and its first row."""

    owners: tuple[int | None, ...]
    first_row: int
    ids_BS: np.ndarray
    past_B: np.ndarray
    ask_BN: np.ndarray


def rectangles(
    spans: Sequence[Span], held: np.ndarray, context: int, rows: int | None, one_prompt: bool
) -> list[Call]:
    """The calls of a step, of at most `rows` rows: single tokens first; no padding reaches behind `context`. `held`:
    how many tokens each row of the cache holds; `one_prompt`: a part of a prompt that has a past goes alone.
    """

    def together(group: list[Span]) -> bool:
        lengths = [len(span.ids) for span in group]
        if rows is not None and group[-1].row - group[0].row >= rows:
            return False
        if min(lengths) == 1:
            return max(lengths) == 1
        adjacent = group[-1].row == group[-2].row + 1
        fits = max(span.past for span in group) + max(lengths) <= context
        filled = sum(lengths) >= FILLED * max(lengths) * len(lengths)
        return adjacent and fits and filled and not (one_prompt and any(span.past for span in group))

    groups: list[list[int]] = []
    for i in sorted(range(len(spans)), key=lambda i: (len(spans[i].ids) > 1, spans[i].row)):
        if groups and together([spans[one] for one in (*groups[-1], i)]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_call(spans, group, held) for group in groups]


def _call(spans: Sequence[Span], group: list[int], held: np.ndarray) -> Call:
    by_row = {spans[i].row: i for i in group}
    first, last = spans[group[0]].row, spans[group[-1]].row
    owners = tuple(by_row.get(row) for row in range(first, last + 1))
    ids = np.zeros((len(owners), max(len(spans[i].ids) for i in group)), np.int64)
    past = held[first : last + 1].copy()
    ask = np.zeros((len(owners), max(spans[i].asked for i in group)), np.int64)
    for line, owner in enumerate(owners):
        if owner is not None:
            span = spans[owner]
            ids[line, : len(span.ids)], past[line] = span.ids, span.past
            ask[line, : span.asked] = np.arange(len(span.ids) - span.asked, len(span.ids))
    return Call(owners, first, ids, past, ask)


def scatter_logits(spans: Sequence[Span], calls: Sequence[Call], logits_BNV: Sequence[Any]) -> Any:
    """What the calls returned as one array (N, V), span after span."""
    in_order = len(calls) == 1 and calls[0].owners == tuple(range(len(spans)))
    if in_order and all(span.asked == 1 for span in spans):
        return logits_BNV[0][:, 0]
    found: dict[int | None, Any] = {}
    for call, logits in zip(calls, logits_BNV):
        found |= {i: logits[line, : spans[i].asked] for line, i in enumerate(call.owners) if i is not None}
    return library(logits_BNV[0]).concatenate([found[i] for i in range(len(spans))])


def in_pieces(step: Callable[..., Any], spans: Sequence[Span], cache: Any, most: int) -> Any:
    """A step in which no span has more than `most` tokens, and then those of what is left of them."""
    found: list[list[Any]] = [[] for _ in spans]
    for start in range(0, max(len(span.ids) for span in spans), most):
        numbers = [i for i, span in enumerate(spans) if len(span.ids) > start]
        pieces = []
        for span in (spans[i] for i in numbers):
            ids = span.ids[start : start + most]
            behind = max(0, len(span.ids) - start - most)
            asked = min(max(0, span.asked - behind), len(ids))
            pieces.append(Span(span.row, span.past + start, ids, asked))
        logits, at = copy_of(step(pieces, cache)), 0
        for i, piece in zip(numbers, pieces):
            found[i].append(logits[at : at + piece.asked])
            at += piece.asked
    return library(logits).concatenate([one for parts in found for one in parts])
