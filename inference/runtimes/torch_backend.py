"""The torch backends: the modules behind the protocols, and what every export is compared with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.artifact import Input
from ...core.backend import AUTO, BackendOptions, Ids, Limits, OneCall, Span, Want
from ...core.console import warn
from ...core.errors import Refused, WrongUse
from ...models import attention_cuda
from ...models.attention import KeyValueCache
from ...models.bert import BERT, BERTWithHead
from ...models.config import SINGLE_LABEL
from ...models.gpt import GPT
from ...models.layers import Attention
from .packed import DecodeGraphs, Packed, packed_logits
from .source import Loaded, context_of
from .tensorrt_backend import captured

Module = GPT | BERT | BERTWithHead
MOST_GRAPHS = 256  # of an encoder's calls, each with its outputs
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


def run_module(
    model: Module, tokenizer: Path | None, source: Input, options: BackendOptions = AUTO, reads: bool = False
) -> Loaded:
    """The torch module behind the protocol of its family, or of an encoder where a GPT `reads`."""
    compiled, classes, problem = options.runtime == "torch-compiled", tuple[str, ...](), SINGLE_LABEL
    if isinstance(model, BERTWithHead) and model.head.kind == "sequence-classification":
        classes, problem = model.head.labels, model.head.problem
    if isinstance(model, GPT) and compiled:
        fix = "leave --backend out"
        raise WrongUse("only a BERT runs compiled", where="--backend torch-compiled", fix=fix)
    if reads or not isinstance(model, GPT):
        encoder = TorchEncoder(model, compiled)
        return Loaded(model.config, tokenizer, source, encoder, classes, problem=problem)
    backend = TorchCausal(model, context_of(model.config, options), options.gpu_memory)
    return Loaded(model.config, tokenizer, source, backend)


class TorchCausal:
    """A GPT module with its key-value cache (`core.backend.CausalBackend`). `context`: tokens of the longest sequence.
    On a GPU weights and cache take this share of its memory, and decode steps are CUDA graphs.
    """

    name = "torch"

    def __init__(self, model: GPT, context: int | None = None, gpu_memory: float = AUTO.gpu_memory) -> None:
        self.model = model.eval()
        config = model.config
        self.vocab_size, self.context = config.vocab_size, context or config.sequence_length
        self._like = like = model.token_table.weight
        self.device, self.dtype = str(like.device), DTYPE_NAMES[like.dtype]
        numbers = 2 * config.layers * config.key_value_heads * config.head_size
        self.token_bytes = numbers * like.element_size()
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self.graphs: DecodeGraphs | None = None
        self.limits = Limits()
        if like.is_cuda:
            attention_cuda.take_newest(like.device)
            self.graphs = DecodeGraphs(model, self._attentions)
            self.limits = Limits(rows_that_fit(like.device, self.context * self.token_bytes, gpu_memory))

    def new_cache(self, rows: int) -> KeyValueCache:
        """Room for whole contexts; memory of a CPU that no token has reached is not touched."""
        return KeyValueCache(self.model.config, rows, self.context, self._like)

    @torch.inference_mode()
    def step(self, spans: Sequence[Span], cache: KeyValueCache) -> torch.Tensor | np.ndarray:
        for span in spans:
            cache.held[span.row] = max(cache.held[span.row], span.past + len(span.ids))
        logits_NV = None if self.graphs is None else self.graphs.logits(spans, cache)
        if logits_NV is None:
            packed = Packed.of(spans, cache, self.model.config)
            logits_NV = packed_logits(self.model, self._attentions, packed)
        return logits_NV.numpy() if self.device == "cpu" else logits_NV

    def copy_row(self, cache: KeyValueCache, source: int, target: int, tokens: int) -> None:
        stores = (cache.keys_LBGTD, cache.values_LBGTD)
        self.load_row(cache, target, [store[:, source] for store in stores], tokens)

    def free_row(self, cache: KeyValueCache, row: int, first: int = 0) -> None:
        """See `core.backend.CausalBackend.free_row`. Zeros from this place on: a number that is not finite would reach
        the next sequence and its neighbours through places that they do not look at, as zero times NaN is NaN.
        """
        for store in (cache.keys_LBGTD, cache.values_LBGTD):
            store[:, row, :, first : cache.held[row]] = 0
        cache.held[row] = first

    def save_row(self, cache: KeyValueCache, row: int, tokens: int) -> list[torch.Tensor]:
        return [store[:, row, :, :tokens].clone() for store in (cache.keys_LBGTD, cache.values_LBGTD)]

    def load_row(self, cache: KeyValueCache, row: int, saved: list[torch.Tensor], tokens: int) -> None:
        for store, kept in zip((cache.keys_LBGTD, cache.values_LBGTD), saved):
            store[:, row, :, :tokens] = kept[:, :, :tokens]
        self.free_row(cache, row, tokens)


def rows_that_fit(device: torch.device, row_bytes: int, share: float) -> int:
    """Rows of a cache that fit into this share of a GPU's memory beside the weights. Raises Refused for none."""
    free, whole = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    room = int(min(share * whole - weights, free))
    if room < row_bytes:
        gib = [f"{size / 2**30:.2f} GiB" for size in (row_bytes, max(room, 0), weights, whole)]
        what = "the cache of one sequence does not fit into the GPU's memory"
        why = "it takes {}; {} are left beside {} of weights, of {}".format(*gib)
        fix = "give a shorter --context, or a larger share with --gpu-memory"
        raise Refused(what, where=str(device), why=why, fix=fix)
    return room // row_bytes


class TorchEncoder(OneCall):
    """A BERT with heads or a GPT that embeds (`core.backend.EncoderBackend`); `compiled`: by torch.compile."""

    name = "torch"

    def __init__(self, model: Module, compiled: bool = False) -> None:
        self.model = model.eval()
        self._encoder = encoder = model.encoder if isinstance(model, BERTWithHead) else model
        self.vocab_size, self.context = encoder.config.vocab_size, encoder.config.sequence_length
        weight = encoder.token_table.weight
        self._device, self.device, self.dtype = weight.device, str(weight.device), DTYPE_NAMES[weight.dtype]
        self._hidden = encoder.hidden
        if compiled:
            self.name = "torch-compiled"
            self._hidden = torch.compile(encoder.hidden, dynamic=None)
        self._calls: dict[tuple[object, ...], Callable[..., dict[str, torch.Tensor]] | None] = {}
        self._graphs = MOST_GRAPHS if weight.is_cuda else 0
        self._pool: Any = torch.cuda.graph_pool_handle() if weight.is_cuda else None

    @torch.inference_mode()
    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        arrays = (ids_BS, types_BS, mask_BS, ask_BN)
        outputs = self._launched(want, [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays])
        return {name: value.float().cpu().numpy() for name, value in outputs.items()}

    def _launched(self, want: Want, given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs on the device. A GPU is faster than the host that launches its kernels: the second call of a
        shape is captured as a CUDA graph, and those behind it replay that. Graphs share memory: the outputs are to be
        copied before the next call.
        """
        key = want if want is None else frozenset(want), *(x.shape for x in given)
        if (replay := self._calls.get(key)) is not None:
            return replay(given)
        own = [x.to(self._device) for x in given]
        outputs = self._outputs(want, *own)
        if key in self._calls and self._graphs:
            try:
                self._calls[key] = self._captured(want, own)
            except Exception as error:  # of any library, and of memory: launches may do
                self._graphs = 0
                warn(f"calls are launched one kernel at a time: {type(error).__name__}: {error}")
        elif len(self._calls) < self._graphs:
            self._calls[key] = None
        return outputs

    def _captured(self, want: Want, own: list[torch.Tensor]) -> Callable[..., dict[str, torch.Tensor]]:
        kept: dict[str, torch.Tensor] = {}
        with torch.cuda.device(self._device):
            run = captured(lambda: kept.update(self._outputs(want, *own)), torch.cuda.Stream(), self._pool)

        def replay(given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            for place, x in zip(own, given):
                place.copy_(x)
            run()
            return kept

        return replay

    def _outputs(
        self, want: Want, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor, ask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if isinstance(self._encoder, GPT):
            hidden = self._hidden(ids)  # padding stands to the right, where no token looks
        else:
            hidden = self._hidden(ids, types if self._encoder.type_table is not None else None, mask)
        real = mask[..., None].to(hidden.dtype)
        some = mask.any(1)[:, None]  # a row without a real token has zeros as its vectors
        outputs = {
            "last_hidden_state": hidden,
            "sentence_embedding": torch.where(some, (hidden * real).sum(1) / real.sum(1), 0),
            "cls_embedding": torch.where(some, hidden[:, 0], 0),
        }
        if want is not None and "last_embedding" in want:
            last = hidden[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1]
            outputs["last_embedding"] = torch.where(some, last, 0)
        if want is None or not outputs.keys() >= set(want):
            outputs |= self._heads(hidden, ask)
        return outputs if want is None else {name: outputs[name] for name in want if name in outputs}

    def _heads(self, hidden_BSH: torch.Tensor, ask_BN: torch.Tensor) -> dict[str, torch.Tensor]:
        """`logits`, or for a span `start_logits` and `end_logits`, of a fine-tuned model; else the pretraining's."""
        model = self.model
        if isinstance(model, GPT):
            return {}
        if isinstance(model, BERTWithHead):
            if not model.head.labels:
                return {}
            logits = model.classify(hidden_BSH)
            if model.head.kind == "question-answering":
                return {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
            return {"logits": logits}
        outputs = {"mlm_logits": model.mlm_head(hidden_BSH.take_along_dim(ask_BN[..., None], dim=1))}
        if (pooled := model.pooled(hidden_BSH[:, 0])) is not None and model.nsp is not None:
            outputs |= {"pooler_output": pooled, "nsp_logits": model.nsp(pooled)}
        return outputs
