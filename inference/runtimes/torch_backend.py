"""The torch backends: the modules behind the protocols, and what every export is compared with."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...core.backend import Ids, Limits, OneCall, Span, Want
from ...models.bert import BERT
from ...models.cache import KeyValueCache
from ...models.gpt import GPT
from ...models.heads import BERTWithHead
from ...models.layers import Attention
from .packed import packed_logits

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class TorchCausal:
    """A GPT module with its key-value cache (`core.backend.CausalBackend`)."""

    name = "torch"
    limits = Limits()

    def __init__(self, model: GPT) -> None:
        self.model = model.eval()
        self.vocab_size, self.context = model.config.vocab_size, model.config.sequence_length
        self._like = model.token_table.weight
        self.device, self.dtype = str(self._like.device), DTYPE_NAMES[self._like.dtype]
        config = model.config
        heads = config.layers * config.key_value_heads
        self.token_bytes = 2 * heads * config.head_size * self._like.element_size()
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self._filled: WeakKeyDictionary[KeyValueCache, dict[int, int]] = (
            WeakKeyDictionary()
        )  # places of each row

    def new_cache(self, rows: int) -> KeyValueCache:
        """Room for whole contexts; memory that no token has reached is not touched."""
        return KeyValueCache(self.model.config, rows, device=self._like.device, dtype=self._like.dtype)

    @torch.inference_mode()
    def step(self, spans: Sequence[Span], cache: KeyValueCache) -> torch.Tensor | np.ndarray:
        filled = self._filled.setdefault(cache, {})
        filled |= {span.row: max(filled.get(span.row, 0), span.past + len(span.ids)) for span in spans}
        logits_NV = packed_logits(self.model, self._attentions, spans, cache)
        return logits_NV.numpy() if self.device == "cpu" else logits_NV

    def copy_row(self, cache: KeyValueCache, source: int, target: int, tokens: int) -> None:
        for store in (cache.keys_LBGTD, cache.values_LBGTD):
            store[:, target, :, :tokens] = store[:, source, :, :tokens]

    def free_row(self, cache: KeyValueCache, row: int) -> None:
        """See `core.backend.CausalBackend.free_row`. It is emptied: a number that is not finite would reach the next
        sequence and its neighbours through places that they do not look at, as zero times NaN is NaN.
        """
        filled = self._filled.get(cache, {}).pop(row, 0)
        for store in (cache.keys_LBGTD, cache.values_LBGTD):
            store[:, row, :, :filled] = 0

    def save_row(self, cache: KeyValueCache, row: int, tokens: int) -> list[torch.Tensor]:
        return [store[:, row, :, :tokens].clone() for store in (cache.keys_LBGTD, cache.values_LBGTD)]

    def load_row(self, cache: KeyValueCache, row: int, saved: list[torch.Tensor], tokens: int) -> None:
        for store, kept in zip((cache.keys_LBGTD, cache.values_LBGTD), saved):
            store[:, row, :, :tokens] = kept[:, :, :tokens]


class TorchEncoder(OneCall):
    """A BERT module with its pretraining heads or a fine-tuned one (`core.backend.EncoderBackend`). `compiled`: its
    blocks through torch.compile.
    """

    name = "torch"

    def __init__(self, model: BERT | BERTWithHead, compiled: bool = False) -> None:
        self.model = model.eval()
        self._encoder = encoder = model.encoder if isinstance(model, BERTWithHead) else model
        self.vocab_size, self.context = encoder.config.vocab_size, encoder.config.sequence_length
        weight = encoder.token_table.weight
        self._device, self.device, self.dtype = weight.device, str(weight.device), DTYPE_NAMES[weight.dtype]
        self._hidden = encoder.hidden
        if compiled:
            self.name = "torch-compiled"
            self._hidden = torch.compile(encoder.hidden, dynamic=None)

    @torch.inference_mode()
    def forward(
        self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Want = None
    ) -> dict[str, np.ndarray]:
        arrays = (ids_BS, types_BS, mask_BS, ask_BN)
        ids, types, mask, ask = (torch.from_numpy(np.ascontiguousarray(x)).to(self._device) for x in arrays)
        hidden = self._hidden(ids, types if self._encoder.type_table is not None else None, mask)
        real = mask[..., None].to(hidden.dtype)
        outputs = {"last_hidden_state": hidden, "sentence_embedding": (hidden * real).sum(1) / real.sum(1)}
        outputs["cls_embedding"] = hidden[:, 0]
        if want is None or not outputs.keys() >= set(want):
            outputs |= self._heads(hidden, ask)
        kept = outputs if want is None else {name: outputs[name] for name in want if name in outputs}
        return {name: value.float().cpu().numpy() for name, value in kept.items()}

    def _heads(self, hidden_BSH: torch.Tensor, ask_BN: torch.Tensor) -> dict[str, torch.Tensor]:
        """`logits`, or for a span `start_logits` and `end_logits`, of a fine-tuned model; else the pretraining's."""
        model = self.model
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
