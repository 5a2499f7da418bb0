"""The torch backends: the modules themselves behind the protocols, and the reference that every export is compared with."""

import numpy as np
import torch

from ..models.bert import BERT
from ..models.cache import KeyValueCache
from ..models.gpt import GPT


class TorchCausal:
    """A GPT module with its key-value cache (`core.backend.CausalBackend`)."""

    name = "torch"

    def __init__(self, model: GPT) -> None:
        self.model = model.eval()
        self.vocab_size, self.context = model.config.vocab_size, model.config.sequence_length
        self._like = model.token_table.weight

    def new_cache(self, rows: int) -> KeyValueCache:
        """Room for whole contexts; memory that no token has reached is not touched."""
        return KeyValueCache(self.model.config, rows, device=self._like.device, dtype=self._like.dtype)

    @torch.inference_mode()
    def forward(
        self,
        ids_BS: np.ndarray,
        past_B: np.ndarray,
        ask_BN: np.ndarray,
        cache: KeyValueCache,
        first_row: int = 0,
    ) -> np.ndarray:
        """See `core.backend.CausalBackend.forward`."""
        rows = cache.take(first_row, first_row + len(ids_BS))
        rows.lengths.copy_(torch.from_numpy(past_B))
        hidden_BSH = self.model.hidden(self._tensor(ids_BS), cache=rows)
        at_BN1 = self._tensor(ask_BN)[..., None]
        logits = self.model.head(hidden_BSH.take_along_dim(at_BN1, dim=1))
        return logits.float().cpu().numpy()

    def copy_row(self, cache: KeyValueCache, source: int, target: int, tokens: int) -> None:
        """See `core.backend.CausalBackend.copy_row`."""
        for store in (cache.keys_LBGTD, cache.values_LBGTD):
            store[:, target, :, :tokens] = store[:, source, :, :tokens]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._like.device)


class TorchEncoder:
    """A BERT module (`core.backend.EncoderBackend`)."""

    name = "torch"

    def __init__(self, model: BERT) -> None:
        self.model = model.eval()
        self.vocab_size, self.context = model.config.vocab_size, model.config.sequence_length
        self._device = model.token_table.weight.device

    @torch.inference_mode()
    def forward(
        self, ids_BS: np.ndarray, types_BS: np.ndarray, mask_BS: np.ndarray, ask_BN: np.ndarray
    ) -> dict[str, np.ndarray]:
        """See `core.backend.EncoderBackend.forward`."""
        arrays = (ids_BS, types_BS, mask_BS, ask_BN)
        ids, types, mask, ask = (torch.from_numpy(np.ascontiguousarray(x)).to(self._device) for x in arrays)
        hidden = self.model.hidden(ids, types if self.model.type_table is not None else None, mask)
        real = mask[..., None].to(hidden.dtype)
        outputs = {
            "last_hidden_state": hidden,
            "mlm_logits": self.model.mlm_head(hidden.take_along_dim(ask[..., None], dim=1)),
            "sentence_embedding": (hidden * real).sum(1) / real.sum(1),
        }
        if (pooled := self.model.pooled(hidden[:, 0])) is not None and self.model.nsp is not None:
            outputs |= {"pooler_output": pooled, "nsp_logits": self.model.nsp(pooled)}
        return {name: value.float().cpu().numpy() for name, value in outputs.items()}
