"""Log-probabilities by torch modules: questions packed into one line, logits in pieces of the vocabulary.

What shares a batch does not change an answer by a bit on the CPU (see tree.py).
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..core.artifact import programs
from ..models.bert import BERT
from ..models.gpt import GPT
from ..models.layers import Attention, attending
from ..models.linear import one_kernel
from .logits import token_logprobs, whole_blocks
from .tree import Tree, TreeAttention

BATCH_TOKENS = 16384  # of a GPU
NARROW = (
    512  # hidden units: below, the head is most of the work, and does it best for many questions at a time
)


def computed_by(device: torch.device) -> list[str]:
    """What a score depends on besides model and question: the program's and torch's versions, the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return [*programs("torch"), name]


class ModuleReader:
    """A torch module that reads (`scoring.Reader`)."""

    name = ""

    def __init__(self, model: GPT | BERT) -> None:
        self.model = model.eval()
        weight = model.token_table.weight
        self.device = weight.device
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.vocab_size, self.context = model.config.vocab_size, model.config.sequence_length
        self.batch_tokens = BATCH_TOKENS
        if self.device.type == "cpu":
            # On one CPU thread a model of 128 hidden units takes 50 % longer with 256 than with 512 where questions
            # are long; one of 768 is as fast with 256, and needs 15 MB less (100 MB less than with 1024).
            self.batch_tokens = whole_blocks(512 if weight.shape[1] < NARROW else 256)
        self.by = computed_by(self.device)


class ModuleTrees(ModuleReader):
    """A GPT."""

    model: GPT

    @cached_property
    def backend(self) -> Any:
        """The module behind the protocol of backends, for text that it writes."""
        from ..inference.runtimes.torch_backend import TorchCausal

        return TorchCausal(self.model)

    @torch.inference_mode()
    @one_kernel()
    def predict(
        self, trees: list[Tree], lines: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the targets (T,) at `lines` (T,) of the trees behind one another: log-probability, and whether it is
        the arg-max.
        """
        tokens = sum(tree.tokens for tree in trees)
        packed = np.zeros((2, whole_blocks(tokens)), np.int64)
        packed[0, :tokens] = np.concatenate([tree.ids for tree in trees])
        packed[1, :tokens] = np.concatenate([tree.positions for tree in trees])
        ids, positions = torch.from_numpy(packed).to(self.device)
        weight_VW = self.model.output_weight()
        config, place = self.model.config, (trees, self.device, weight_VW.dtype)
        near = TreeAttention(*place, config.attention_pattern)
        whole = TreeAttention(*place) if config.layer_pattern else near
        modules = (module for module in self.model.modules() if isinstance(module, Attention))
        with attending(modules, lambda i: (near if config.pattern_of(i) else whole).of_layer(i)):
            hidden_SW = self.model.hidden(ids[None], positions[None])[0]
        head = weight_VW, self.model.output_bias(), hidden_SW
        return token_logprobs(*head, lines, targets, softcap=config.logit_softcap)[:2]


class ModuleRows(ModuleReader):
    """A BERT."""

    model: BERT

    def __init__(self, model: BERT) -> None:
        super().__init__(model)
        self.batch_tokens *= 8

    @torch.inference_mode()
    @one_kernel()
    def predict(
        self,
        lines: np.ndarray,
        owner: np.ndarray,
        places: np.ndarray,
        targets: np.ndarray,
        batch_tokens: int,
        ranks: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the targets (T,) at `places` of the lines (L, S) that own them: log-probability, whether it is the
        arg-max, and with `ranks` how many tokens are more probable.
        """
        begins = np.searchsorted(owner, np.arange(len(lines) + 1))
        features = []
        at_once = max(1, batch_tokens // lines.shape[1])
        for first in range(0, len(lines), at_once):
            part = lines[first : first + at_once]
            # whole blocks of lines for the matrix products, as in logits.py: a small batch repeats its rows
            least = -(-whole_blocks(1) // lines.shape[1])
            ids = torch.from_numpy(np.resize(part, (max(len(part), least), lines.shape[1]))).to(self.device)
            asked = slice(begins[first], begins[first + len(part)])
            line, place = (
                torch.from_numpy(array[asked]).to(self.device) for array in (owner - first, places)
            )
            features.append(self.model.hidden(ids)[line, place])
        filled = torch.from_numpy(np.resize(np.arange(len(places)), whole_blocks(len(places))))
        hidden_NW = self.model.mlm_features(torch.cat(features)[filled.to(self.device)])
        table, bias = self.model.token_table.weight, self.model.mlm_bias
        return token_logprobs(table, bias, hidden_NW, np.arange(len(places)), targets, ranks=ranks)
