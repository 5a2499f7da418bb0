"""The llama.cpp backends: GGUF files, ours and anybody's, behind the protocols, on the CPU or a GPU of its build.

llama.cpp takes tokens of many sequences in one batch, each with its own position, and its cache has rows that
can be copied and cut: a step is one call of its C interface. Of a file without a model.json shape, precision and
tokenizer are read from its metadata: decoders of every architecture that llama.cpp runs, and BERT encoders.
"""

import ctypes
import functools
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.backend import Ids, Limits, OneCall, Span, Want
from ...core.errors import Refused, WrongUse, extra
from ...data.gguf import tokenizer_file
from ...models.config import BERTConfig, GPTConfig, ModelConfig
from ...models.sentence import Sentence
from .source import no_model

EXTRA = "llamacpp"
BATCH_TOKENS = 512  # most tokens of one call, and of one matrix product


def open_model(path: Path, device: str) -> tuple[Any, Any]:
    """The library and the model. Raises WrongUse without the library or its GPU, Refused for a bad file."""
    llama_cpp = extra("llama_cpp", "running a GGUF file", EXTRA)
    on_gpu = device != "cpu"
    if on_gpu and not llama_cpp.llama_supports_gpu_offload():
        fix = "build llama-cpp-python with CUDA (CMAKE_ARGS=-DGGML_CUDA=on), or --device cpu"
        raise WrongUse("this llama.cpp was built without a GPU", where=f"--device {device}", fix=fix)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = -1 if on_gpu else 0
    params.main_gpu = int(device.partition(":")[2] or 0)
    _silence(llama_cpp)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        fix = "export it again; `throughline verify` says whether the file is damaged"
        raise Refused("llama.cpp cannot load this file", where=path, fix=fix)
    return llama_cpp, model


def has_gpu() -> bool:
    """Whether llama.cpp is installed and was built for GPUs."""
    return bool(find_spec("llama_cpp") and import_module("llama_cpp").llama_supports_gpu_offload())


@functools.cache
def _silence(library: Any) -> Any:
    """Pages about each load go nowhere; the callback is kept because the library holds its address."""
    callback = library.llama_log_callback(lambda level, text, data: None)
    library.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


class LlamaContext:
    """A llama.cpp context: the memory of `rows` sequences and the batch that is filled for each call."""

    def __init__(self, library: Any, model: Any, rows: int, context: int, threads: int, **settings: Any):
        self.library = library
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = rows * context, rows, True
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        for name, value in settings.items():
            assert hasattr(params, name), name  # ctypes takes any
            setattr(params, name, value)
        self.pointer = library.llama_init_from_model(model, params)
        if not self.pointer:
            why = f"{rows} of {context:,} tokens"
            raise Refused("llama.cpp has no room for this many sequences", why=why)
        self.memory = library.llama_get_memory(self.pointer)
        self._seen: tuple[tuple[int, int], np.ndarray] | None = None
        self.batch = library.llama_batch_init(max(BATCH_TOKENS, context), 0, 1)

    def run(self, lines: Sequence[tuple[int, int, int, bool]], how: str = "decode") -> None:
        """Compute tokens, given as (id, place, row, whether it has an output)."""
        batch = self.batch
        batch.n_tokens = len(lines)
        for at, (token_id, place, row, wanted) in enumerate(lines):
            batch.token[at], batch.pos[at], batch.logits[at] = token_id, place, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
        if code := getattr(self.library, f"llama_{how}")(self.pointer, batch):
            raise RuntimeError(f"llama.cpp could not {how} this batch (code {code})")

    def logits(self, count: int, vocab_size: int) -> np.ndarray:
        """The logits (count, V) of the last run, in llama.cpp's own memory, which moves when it needs more."""
        pointer = self.library.llama_get_logits(self.pointer)
        key = (ctypes.addressof(pointer.contents), count)
        if self._seen is None or self._seen[0] != key:
            self._seen = key, np.ctypeslib.as_array(pointer, (count, vocab_size))
        return self._seen[1]

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self.library.llama_batch_free(self.batch)
            self.library.llama_free(self.pointer)


class LlamaCausal:
    """A GPT in a GGUF file (`core.backend.CausalBackend`)."""

    name = "llamacpp"
    token_bytes = 0
    limits = Limits()

    def __init__(self, path: Path, config: GPTConfig, threads: int, device: str, dtype: str) -> None:
        self.library, self.model = open_model(path, device)
        self.device, self.dtype, self._threads = "cpu", dtype, threads  # logits come to the host
        self.vocab_size, self.context = config.vocab_size, config.sequence_length

    def new_cache(self, rows: int) -> LlamaContext:
        """A context of its own; a row costs what its tokens cost."""
        exact = {"type_k": 0, "type_v": 0} if self.dtype == "f32" else {}  # keys and values in f32, else f16
        return LlamaContext(self.library, self.model, rows, self.context, self._threads, **exact)

    def step(self, spans: Sequence[Span], cache: LlamaContext) -> Any:
        """See `core.backend.CausalBackend.step`; what one call gives is memory that the next writes again."""
        lines: list[tuple[int, int, int, bool]] = []
        for span in spans:
            self.library.llama_memory_seq_rm(cache.memory, span.row, span.past, -1)
            first = len(span.ids) - span.asked
            placed = enumerate(span.ids.tolist())
            lines += [(token, span.past + place, span.row, place >= first) for place, token in placed]
        found = []
        for at in range(0, len(lines), BATCH_TOKENS):
            part = lines[at : at + BATCH_TOKENS]
            cache.run(part)
            if wanted := sum(line[3] for line in part):
                logits = cache.logits(wanted, self.vocab_size)
                found.append(logits if len(lines) <= BATCH_TOKENS else logits.copy())
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros((0, self.vocab_size), np.float32)

    def copy_row(self, cache: LlamaContext, source: int, target: int, tokens: int) -> None:
        """See `core.backend.CausalBackend.copy_row`; the cells are shared, not copied."""
        self.library.llama_memory_seq_rm(cache.memory, target, -1, -1)
        self.library.llama_memory_seq_cp(cache.memory, source, target, 0, tokens)

    def free_row(self, cache: LlamaContext, row: int) -> None:
        self.library.llama_memory_seq_rm(cache.memory, row, -1, -1)


class LlamaEncoder(OneCall):
    """A BERT in a GGUF file (`core.backend.EncoderBackend`): hidden states, embeddings, and `logits` of its labels if
    it has such a head; its file has no masked-LM head and one token type.
    """

    name = "llamacpp"

    def __init__(
        self, path: Path, config: BERTConfig, threads: int, device: str, dtype: str, labels: int = 0
    ) -> None:
        self.library, self.model = open_model(path, device)
        self.device, self.dtype, self._labels = "cpu", dtype, labels
        self.vocab_size, self.context, self._width = config.vocab_size, config.sequence_length, config.width
        settings = {"embeddings": True, "n_ubatch": self.context, "n_batch": self.context}
        open_context = partial(LlamaContext, self.library, self.model, 1, self.context, threads, **settings)
        self._context = open_context(pooling_type=self.library.LLAMA_POOLING_TYPE_NONE)
        if labels:
            self._head = open_context(pooling_type=self.library.LLAMA_POOLING_TYPE_RANK)

    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`; rows one after another, without `mlm_logits`."""
        hidden = np.zeros((*ids_BS.shape, self._width), np.float32)
        logits = np.zeros((len(ids_BS), self._labels), np.float32)
        floats = ctypes.POINTER(ctypes.c_float)
        for line, (ids, real) in enumerate(zip(ids_BS, mask_BS)):
            places = np.flatnonzero(real)
            if not len(places):  # a row without a token has zeros
                continue
            tokens = [(token, at, 0, True) for at, token in enumerate(ids[places].tolist())]
            self._context.run(tokens, "encode")
            pointer = ctypes.cast(self.library.llama_get_embeddings(self._context.pointer), floats)
            hidden[line, places] = np.ctypeslib.as_array(pointer, (len(places), self._width))
            if self._labels:
                self._head.run(tokens, "encode")
                pointer = ctypes.cast(self.library.llama_get_embeddings_seq(self._head.pointer, 0), floats)
                logits[line] = np.ctypeslib.as_array(pointer, (self._labels,))
        mean = hidden.sum(1) / np.maximum(mask_BS.sum(1, keepdims=True), 1)
        outputs = {"last_hidden_state": hidden, "sentence_embedding": mean}
        return outputs | ({"logits": logits} if self._labels else {})


PRECISIONS = {0: "f32", 1: "f16", 2: "q4_0", 7: "q8_0"}  # by llama.cpp's number of the file type
POOLINGS: dict[int, Literal["mean", "cls"]] = {0: "mean", 1: "mean", 2: "cls"}  # llama.cpp's, none among them
CONTEXT_MOST = 8192  # tokens; a cache of every row takes this much memory
SIZES = {"sequence_length": "context_length", "layers": "block_count", "width": "embedding_length"}
SIZES |= {"heads": "attention.head_count", "mlp_width": "feed_forward_length"}  # llama.cpp's names by ours


def read_gguf(path: Path) -> tuple[ModelConfig, str, Path | None, Sentence]:
    """Config, precision, tokenizer.json, how a BERT embeds. Raises WrongUse without library or file, else Refused."""
    if not path.is_file():
        raise no_model(path)
    gguf = extra("gguf", "reading a GGUF file", EXTRA)
    try:
        reader = gguf.GGUFReader(path)
        given = {name: field.contents() for name, field in reader.fields.items()}
        config = config_of(given, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        why, fix = f"{type(error).__name__}: {error}", "fetch or export it again"
        raise Refused("this is no whole GGUF model", where=path, why=why, fix=fix) from error
    number = given.get("general.file_type", -1)
    kind = given.get("bert.pooling_type", gguf.PoolingType.NONE)
    if kind not in POOLINGS:
        why = f"it pools by {gguf.PoolingType(kind).name}"
        raise Refused("this model embeds in a way that is not here", where=path, why=why)
    precision = PRECISIONS.get(number, f"gguf-{number}")
    return config, precision, tokenizer_file(path, given), Sentence(POOLINGS[kind])


def config_of(given: dict[str, Any], tied: bool) -> ModelConfig:
    """The shape that the metadata describe. Raises KeyError for a field that is missing."""
    name = given["general.architecture"]
    shape: dict[str, Any] = {ours: given[f"{name}.{key}"] for ours, key in SIZES.items()}
    shape["sequence_length"] = min(shape["sequence_length"], CONTEXT_MOST)
    shape["vocab_size"] = given.get(f"{name}.vocab_size", len(given.get("tokenizer.ggml.tokens", [])))
    if name == "bert":
        return BERTConfig(**shape, nsp=False)
    shape["kv_heads"] = given.get(f"{name}.attention.head_count_kv", shape["heads"])
    shape["head_width"] = given.get(f"{name}.attention.key_length", shape["width"] // shape["heads"])
    if name == "gpt2":
        return GPTConfig(**shape, tied=tied)
    llama: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True}
    theta = given.get(f"{name}.rope.freq_base", 10000.0)
    return GPTConfig(**shape, **llama, bias=False, tied=tied, rope_theta=theta)
