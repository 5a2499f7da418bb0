"""The ONNX Runtime backends: graphs written by `onnx_gpt` and `onnx_bert` behind the protocols, on the CPU or
with the CUDA or TensorRT provider.

- Threads do not spin: on a shared or small machine spinning threads burn several times the CPU that the work
  needs.
- The GPT's cache is memory of ours, bound as past and present at once, so new tokens are written in place and
  any run of adjacent rows is a view. Its capacity follows the longest row in steps, up and down: the standard
  Attention looks over all of it, in every row, so a row that is much longer than the others lies apart. Graphs
  written for ONNX Runtime look at what a row holds.
- A decode step of the same rows as the last one binds nothing anew: 50 bindings of GPT-2 take 0.4 ms.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import Limits, Span
from ...core.errors import Refused, WrongUse
from ...core.hardware import usable_cores
from ...core.logits import library
from ...models.config import BERTConfig, GPTConfig
from ..graphs.graph_options import ONE_PROMPT
from .onnx_cache import OnnxCache, aligned_zeros, rows_apart, stepped
from .sampler import beside, copy_of
from .spans import Call, rectangles, scatter_logits

BINDINGS = 16  # kept for decode steps: one for each number of rows
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
TENSORRT = "TensorrtExecutionProvider"


def providers_of(device: str, tensorrt: bool = False) -> list[Any]:
    """What to ask ONNX Runtime for. Raises WrongUse when it was built without it."""
    import onnxruntime

    kind, _, number = device.partition(":")
    wanted = [TENSORRT, PROVIDERS[kind]] if tensorrt else [PROVIDERS[kind]]
    there = onnxruntime.get_available_providers()
    if missing := [name for name in wanted if name not in there]:
        raise WrongUse(
            f"this ONNX Runtime has no {missing[0]}",
            where=f"--device {device}",
            why=f"it was built with {', '.join(there)}",
            fix="pip uninstall onnxruntime && pip install onnxruntime-gpu, or --device cpu",
        )
    if kind == "cpu":
        return wanted
    settings = {"device_id": number or "0"}
    exact = {"use_tf32": "0"}  # fp32 is fp32, as torch has it; with TF32 its errors are those of fp16
    return [(name, settings | exact if name == PROVIDERS["cuda"] else settings) for name in wanted]


def open_session(
    path: Path | str, threads: int | None = None, device: str = "cpu", tensorrt: bool = False
) -> Any:
    """An `onnxruntime.InferenceSession` on the device.

    Raises WrongUse when this ONNX Runtime has no provider for it, Refused when the file is not a graph that
    it can run or the provider fell back to another.
    """
    import onnxruntime

    wanted = providers_of(device, tensorrt)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per core
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # its warnings are about choices made here on purpose
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise Refused(
            "ONNX Runtime cannot load this graph",
            where=path,
            why=str(error).splitlines()[0][:300],
            fix="export it again; `throughline verify` says whether the file is damaged",
        ) from error
    first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
    if session.get_providers()[0] != first:  # it falls back to the CPU with a log line
        raise Refused(
            f"ONNX Runtime could not start {first}",
            where=path,
            why=f"it would run with {session.get_providers()[0]}",
            fix="install the CUDA and cuDNN (or TensorRT) libraries it was built for, or --device cpu",
        )
    return session


class Bound:
    """A binding for calls of one shape on the same rows: inputs are written into its buffers."""

    def __init__(
        self, session: Any, cache: OnnxCache, first_row: int, shape: tuple[int, int, int], vocab: int
    ):
        rows, length, asked = shape
        store = cache.stores[cache.names[0]]
        sizes = ((rows, length), (rows,), (rows, asked))
        self.inputs = [beside(store, np.zeros(size, np.int64)) for size in sizes]
        self.logits = beside(store, np.zeros((rows, asked, vocab), np.float32))
        self._on_gpu = library(store) is not np
        self._spare = beside(store, np.zeros(1))
        self.binding = session.io_binding()
        device = (store.device.type, store.device.index or 0) if self._on_gpu else ("cpu", 0)
        for name, buffer in zip(("input_ids", "past_length", "logit_positions"), self.inputs):
            self.binding.bind_input(name, *device, np.int64, tuple(buffer.shape), self._address(buffer))
        found = (np.float32, tuple(self.logits.shape), self._address(self.logits))
        self.binding.bind_output("logits", *device, *found)
        element = np.float16 if "float16" in str(store.dtype) else np.float32
        for name, store in cache.stores.items():
            part = store[first_row : first_row + rows]
            place = (*device, element, tuple(part.shape), self._address(part))
            self.binding.bind_input(f"past.{name}", *place)
            self.binding.bind_output(f"present.{name}", *place)

    def _address(self, array: Any) -> int:
        if not self._on_gpu:
            return int(array.ctypes.data)
        # torch gives empty tensors no address, and ONNX Runtime wants one
        return int(array.data_ptr() or self._spare.data_ptr())

    def run(self, session: Any, *arguments: np.ndarray) -> Any:
        """The logits (B, N, V): memory that the next run writes again."""
        for buffer, value in zip(self.inputs, arguments):
            buffer[...] = beside(buffer, np.ascontiguousarray(value, np.int64))
        if self._on_gpu:
            import torch

            torch.cuda.current_stream().synchronize()  # ONNX Runtime runs on a stream of its own
        session.run_with_iobinding(self.binding)
        return self.logits


class OnnxCausal:
    """A GPT graph (`core.backend.CausalBackend`)."""

    name = "onnxruntime"
    limits = Limits()

    def __init__(
        self,
        path: Path | str,
        config: GPTConfig,
        threads: int | None = None,
        device: str = "cpu",
        tensorrt: bool = False,
        dtype: str = "fp32",
        session: Any = None,
    ) -> None:
        self.session = session or open_session(path, threads, device, tensorrt)
        self.device, self.dtype = device, dtype
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        self._shape = (config.key_value_heads, config.head_size)
        known = {} if session else self.session.get_modelmeta().custom_metadata_map
        self._one_prompt = ONE_PROMPT in known
        inputs = {value.name: value.type for value in self.session.get_inputs()}
        self._caches = [name.removeprefix("past.") for name in inputs if name.startswith("past.")]
        first = next(given for given in self.session.get_inputs() if given.name.startswith("past."))
        self._fixed = first.shape[2] if isinstance(first.shape[2], int) else 0  # TensorRT's graphs have one
        half = "float16" in inputs[f"past.{self._caches[0]}"]
        self.token_bytes = len(self._caches) * self._shape[0] * self._shape[1] * (2 if half else 4)
        # of the graph and of the files beside it that hold its weights
        self.weight_bytes = sum(file.stat().st_size for file in Path(path).parent.glob(f"{Path(path).name}*"))
        self._moves = not (self._one_prompt or self._fixed) and device == "cpu"
        self._zeros: Callable[[tuple[int, ...]], Any]
        if device == "cpu":
            self._zeros = partial(aligned_zeros, dtype=np.float16 if half else np.float32)
            return
        import torch

        if not torch.cuda.is_available():
            raise WrongUse("torch has no CUDA device here", where=f"--device {device}", fix="--device cpu")
        self._zeros = partial(torch.zeros, dtype=torch.float16 if half else torch.float32, device=device)

    def new_cache(self, rows: int) -> OnnxCache:
        """An empty cache whose capacity follows its longest row."""
        capacity = self._fixed or min(stepped(1), self.context)
        return OnnxCache(self._caches, rows, self._shape, capacity, self._zeros)

    def step(self, spans: Sequence[Span], cache: OnnxCache) -> Any:
        """See `core.backend.CausalBackend.step`."""
        if self._moves:
            self._move_rows(spans, cache)
        calls = self._calls(spans, cache)
        found = []
        for call, part in calls:
            held = {call.first_row + i: past for i, past in enumerate(call.past_B) if call.owners[i] is None}
            logits = self._run(*call.arguments, part, call.first_row)
            found.append(logits if len(calls) == 1 else copy_of(logits))
            for row, tokens in held.items():  # these took no part
                part.lengths[row] = tokens
        for span in spans:
            part, row = cache.place(span.row)
            part.lengths[row] = span.past + len(span.ids)
        return scatter_logits(spans, [call for call, _ in calls], found)

    def _calls(self, spans: Sequence[Span], cache: OnnxCache) -> list[tuple[Call, OnnxCache]]:
        """What to run on which cache: the rows beside each other, then each row that lies apart."""
        if not cache.apart:
            calls = rectangles(spans, self.context, lambda row: int(cache.lengths[row]))
            return [(call, cache) for call in calls]
        beside_others = [i for i, span in enumerate(spans) if span.row not in cache.apart]
        together = rectangles(
            [spans[i] for i in beside_others], self.context, lambda row: int(cache.lengths[row])
        )
        found = []
        for call in together:
            owners = tuple(None if owner is None else beside_others[owner] for owner in call.owners)
            found.append((replace(call, owners=owners), cache))
        for i, span in enumerate(spans):
            if span.row in cache.apart:
                (call,) = rectangles([replace(span, row=0)], self.context)
                found.append((replace(call, owners=(i,)), cache.apart[span.row]))
        return found

    def _move_rows(self, spans: Sequence[Span], cache: OnnxCache) -> None:
        """Before a step in which a row comes or grows: decide which rows lie apart."""
        grows = any(
            span.past + len(span.ids) > cache.capacity for span in spans if span.row not in cache.apart
        )
        if cache.settled and not grows and all(len(span.ids) == 1 for span in spans):
            return
        cache.settled = True
        tokens = cache.held() | {span.row: span.past + len(span.ids) for span in spans}
        rooms = {row: min(stepped(count), self.context) for row, count in tokens.items()}
        wanted = rows_apart(rooms, cache.apart.keys(), self.token_bytes, self.weight_bytes)
        longest = max((room for row, room in rooms.items() if row not in wanted), default=stepped(1))
        for row in wanted - cache.apart.keys():
            cache.part(row, rooms[row])
        if longest > cache.capacity:
            cache.resize(longest)
        for row in cache.apart.keys() - wanted:
            cache.rejoin(row)
        cache.shrink(min(longest, self.context))

    def forward(
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: OnnxCache, first_row: int = 0
    ) -> np.ndarray:
        """See `core.backend.CausalBackend.forward`."""
        for row in cache.apart.keys() & set(range(first_row, first_row + len(ids_BS))):
            self._put_back(cache, row)
        logits = self._run(ids_BS, past_B, ask_BN, cache, first_row)
        return logits.copy() if library(logits) is np else logits.cpu().numpy()

    def _run(
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: OnnxCache, first_row: int
    ) -> Any:
        rows, length = ids_BS.shape
        needed = int(past_B.max()) + length
        assert needed <= self.context, (needed, self.context)
        if needed > cache.capacity:
            cache.resize(min(max(stepped(needed), cache.capacity * 5 // 4), self.context))
        if self._one_prompt and rows > 1 and length > 1 and past_B.any():
            return self._one_by_one(ids_BS, past_B, ask_BN, cache, first_row)
        cache.lengths[first_row : first_row + rows] = past_B + length
        key = (first_row, rows, length, ask_BN.shape[1])
        bound = cache.bindings.get(key)
        if bound is None:
            bound = Bound(self.session, cache, first_row, key[1:], self.vocab_size)
            if length == 1:
                if len(cache.bindings) == BINDINGS:
                    cache.bindings.clear()
                cache.bindings[key] = bound
        return bound.run(self.session, ids_BS, past_B, ask_BN)

    def _one_by_one(
        self, ids_BS: np.ndarray, past_B: np.ndarray, ask_BN: np.ndarray, cache: OnnxCache, first_row: int
    ) -> Any:
        rows = [slice(row, row + 1) for row in range(len(ids_BS))]
        found = [
            copy_of(self._run(ids_BS[row], past_B[row], ask_BN[row], cache, first_row + row.start))
            for row in rows
        ]
        return library(found[0]).concatenate(found)

    def copy_row(self, cache: OnnxCache, source: int, target: int, tokens: int) -> None:
        """See `core.backend.CausalBackend.copy_row`."""
        if source in cache.apart:
            cache.settled = False
            cache.lengths[target] = 0
            cache.apart[target] = cache.apart[source].alone(0, tokens, min(stepped(tokens), self.context))
        else:
            saved = [store[source, :, :tokens] for store in cache.stores.values()]
            self.load_row(cache, target, saved, tokens)

    def free_row(self, cache: OnnxCache, row: int) -> None:
        """See `core.backend.CausalBackend.free_row`: when the longest row goes, all others get faster."""
        cache.settled = False
        cache.apart.pop(row, None)
        cache.lengths[row] = 0
        if not self._fixed:
            cache.shrink(min(stepped(max(int(cache.lengths.max()), 1)), self.context))

    def save_row(self, cache: OnnxCache, row: int, tokens: int) -> list[Any]:
        """See `core.backend.CausalBackend.save_row`."""
        part, row = cache.place(row)
        return [copy_of(store[row, :, :tokens]) for store in part.stores.values()]

    def load_row(self, cache: OnnxCache, row: int, saved: list[Any], tokens: int) -> None:
        """See `core.backend.CausalBackend.load_row`."""
        cache.settled = False
        cache.apart.pop(row, None)
        if tokens > cache.capacity:
            cache.resize(min(stepped(tokens), self.context))
        for store, kept in zip(cache.stores.values(), saved):
            store[row, :, :tokens] = kept[:, :tokens]
        cache.lengths[row] = tokens

    def _put_back(self, cache: OnnxCache, row: int) -> None:
        tokens = int(cache.apart[row].lengths[0])
        if tokens > cache.capacity:
            cache.resize(min(stepped(tokens), self.context))
        cache.rejoin(row)


class OnnxEncoder:
    """A BERT graph (`core.backend.EncoderBackend`)."""

    name = "onnxruntime"
    limits = Limits()

    def __init__(
        self,
        path: Path | str,
        config: BERTConfig,
        threads: int | None = None,
        device: str = "cpu",
        tensorrt: bool = False,
        dtype: str = "fp32",
        session: Any = None,
    ) -> None:
        self.session = session or open_session(path, threads, device, tensorrt)
        self.device, self.dtype = device, dtype
        self.lanes = (threads or usable_cores()) if device == "cpu" else 1
        self._again = partial(OnnxEncoder, path, config, threads=1, dtype=dtype) if self.lanes > 1 else None
        self._lane: OnnxEncoder | None = None
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        self._inputs = {value.name for value in self.session.get_inputs()}
        self._outputs = [value.name for value in self.session.get_outputs()]

    def lane(self) -> "OnnxEncoder":
        """See `core.backend.EncoderBackend.lane`: a session of one thread with weights of its own, from here on."""
        if self._lane is None:
            self._lane = self._again() if self._again else self
        return self._lane

    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`."""
        given = encoder_feeds(ids_BS, types_BS, mask_BS, ask_BN, self._inputs)
        found = zip(self._outputs, self.session.run(None, given))
        return {name: value.astype(np.float32, copy=False) for name, value in found}


def encoder_feeds(
    ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray, names: set[str]
) -> dict[str, np.ndarray]:
    """The inputs of a BERT graph of our writer, those of them that it has."""
    feeds = {
        "input_ids": ids_BS,
        "attention_mask": mask_BS,
        "logit_positions": ask_BN,
        "token_type_ids": types_BS,
    }
    return {name: np.ascontiguousarray(value, np.int64) for name, value in feeds.items() if name in names}
