"""GPT: a causal decoder. GPT-2's shape by default; the config's fields make it a Llama, a Qwen, a Gemma, a NeoX.

What differs from the GPT-2 paper: dropout is off unless asked for, and query, key and value are one matrix ordered by
head (see `Attention`). What a field turns on costs nothing where it is off: modules are made, branches taken, by the
config.

Shape letters: B batch, S positions, W width, V vocabulary; `hidden` (B, S, W) is written hidden_BSH in the
contracts.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Documents, Mask
from .attention_patterns import apply_pattern, windowed
from .config import GPTConfig
from .layers import Block, BlockAhead, make_norm
from .rotary import alibi, layer_tables


class GPT(nn.Module):
    """`model(ids)` gives logits; `hidden` and `head` are its two halves. Blocks are keyed by their layer number, so a
    pipeline stage keeps their names. Parameters have torch's values until `init.initialise` or a checkpoint fills them.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_table = nn.Embedding(config.vocab_size, config.width)
        rows = config.sequence_length + config.position_offset
        self.position_table = nn.Embedding(rows, config.width) if config.positions == "learned" else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        kinds: list[type[Block]] = [Block] * config.layers + [BlockAhead] * config.predict_ahead
        self.blocks = nn.ModuleDict({str(layer): kind(config, layer) for layer, kind in enumerate(kinds)})
        if (pattern := config.attention_pattern) is not None:
            apply_pattern(windowed(config, self.blocks), pattern, causal=True)
        self.norm = make_norm(config)
        shape = (config.width, config.vocab_size)
        self.output = None if config.tied else nn.Linear(*shape, bias=config.output_bias)
        self.product: Callable[..., Tensor] = F.linear  # of the head

    def forward(self, input_ids: Tensor, *inputs: Tensor | None, **named: Tensor | None) -> Tensor:
        """Ids (B, S), and what `hidden` takes -> logits (B, S, V)."""
        return self.head(self.hidden(input_ids, *inputs, **named))

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> Tensor:
        """Ids (B, S) -> (B, S, W), the final norm included.

        `positions` (B, S): where each token stands; 0, 1, 2, ... when absent. `document_ids` (B, S): tokens see only
        their own document. `document_bounds` (N + 1,): the same for runs of tokens (`Documents`), without a dense mask.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BSW = self.embed(input_ids, positions)
        return self.encode(x_BSW, positions, document_ids, None, document_bounds)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Ids (B, S) and positions (S,) or (B, S) -> (B, S, W)."""
        x_BSW = self.token_table(input_ids)
        if self.config.scaled_embeddings:  # by a number of the model's dtype, as Gemma was trained
            scale = math.sqrt(self.config.width)
            x_BSW = x_BSW * torch.full((), scale, dtype=x_BSW.dtype, device=x_BSW.device)
        if self.position_table is not None:
            places = positions + self.config.position_offset if self.config.position_offset else positions
            x_BSW = x_BSW + self.position_table(places)
        if self.embedding_norm is not None:
            x_BSW = self.embedding_norm(x_BSW)
        return F.dropout(x_BSW, self.config.dropout, self.training) if self.config.dropout else x_BSW

    def encode(
        self,
        x_BSW: Tensor,
        positions: Tensor,
        document_ids: Tensor | None = None,
        mask: Mask | None = None,
        document_bounds: Tensor | None = None,
        depth: int = 0,
        further_ids: Tensor | None = None,
        row_length: int | None = None,
    ) -> Tensor:
        """The blocks and the final norm. A causal kernel without a mask is used unless documents need one.

        `mask` replaces the causal one, for rows of which this is only a part: (1 or B, 1, S, T), True where a
        token may look, or the documents that a context-parallel `attend` understands. With `depth` the block of a
        further token: of what the depth before gave and the ids (B, S) of the tokens so many places on.
        """
        length = positions.shape[-1]
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None, :]
            mask = same.tril()[:, None]  # (B, 1, S, S): a token's own document, itself and before
        elif document_bounds is not None:
            mask = Documents(document_bounds, min(length, self.config.sequence_length))
        if self.config.positions == "alibi":  # a bias of every score
            if mask is None:
                mask = torch.ones(length, length, dtype=torch.bool, device=x_BSW.device).tril()[None, None]
            elif isinstance(mask, Documents):
                mask = mask.mask(len(x_BSW), length, is_causal=True)
            mask = alibi(self.config.heads, mask, x_BSW.dtype)
        tables = layer_tables(self.config, positions, x_BSW.dtype, row_length)
        is_causal = mask is None or isinstance(mask, Documents)
        first = self.config.layers
        if further_ids is not None:
            token_BSW = self.token_table(further_ids)
            return self.blocks[str(first + depth - 1)](x_BSW, token_BSW, mask, is_causal, tables)
        for layer, block in self.blocks.items():
            if int(layer) < first:
                x_BSW = block(x_BSW, mask, is_causal, tables)
        return self.norm(x_BSW)

    def head(self, hidden_BSW: Tensor) -> Tensor:
        """(..., W) -> logits (..., V)."""
        logits_BSV = self.product(hidden_BSW, self.output_weight(), self.output_bias())
        cap = self.config.logit_softcap
        return torch.tanh(logits_BSV / cap) * cap if cap else logits_BSV

    def output_weight(self) -> Tensor:
        """The matrix (V, W) of the head: for a loss that computes the logits in pieces."""
        return self.token_table.weight if self.output is None else self.output.weight

    def output_bias(self) -> Tensor | None:
        """The bias (V,) of the head, if it has one."""
        return None if self.output is None else self.output.bias


def in_use(model: Any) -> Any:
    """The model itself, of a GPT without the blocks that only training has (`predict_ahead`)."""
    if isinstance(model, GPT):
        for layer in range(model.config.layers, model.config.block_count):
            del model.blocks[str(layer)]
        model.config = model.config.in_use()
    return model
