"""BERT: a bidirectional encoder with a masked-LM head and a next-sentence head, or with a fine-tuned one.

Post-norm as published by default; `norm_first` gives the pre-norm order of Megatron's BERT. The config's fields make
it a RoBERTa, a DistilBERT, an ELECTRA or a ModernBERT. The masked-LM head works on any selection of positions, so that
training pays for logits only where there is a target.

Shape letters: B batch, S positions, W width, N selected positions, V vocabulary, L labels.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Documents, Mask
from .attention_patterns import apply_pattern, windowed
from .config import SINGLE_LABEL, BERTConfig, ProblemType
from .layers import Block, RelativeBias, activation_function, make_norm
from .rotary import layer_tables


class BERT(nn.Module):
    """`model(ids)` gives logits everywhere; training calls `hidden`, `mlm_head` on masked positions, and `nsp_head`.
    Blocks and parameters: as those of a `GPT`.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        width, table = config.width, config.table_width
        rows = config.sequence_length + config.position_offset
        self.token_table = nn.Embedding(config.vocab_size, table)
        self.position_table = nn.Embedding(rows, table) if config.positions == "learned" else None
        self.type_table = nn.Embedding(config.token_types, table) if config.token_types else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.projection = nn.Linear(table, width, bias=config.bias) if config.embedding_width else None
        self.relative_bias = RelativeBias(config) if config.relative_buckets else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.layers)})
        if config.embedding_norm:
            self.blocks["0"].attention_norm = nn.Identity()  # it reads what is normed
        if (pattern := config.attention_pattern) is not None:
            apply_pattern(windowed(config, self.blocks), pattern, causal=False)
        # after the embeddings (post-norm) or the last block (norm_first)
        self.norm = make_norm(config, table)
        self.mlm_transform = nn.Linear(width, table, bias=config.bias) if config.mlm_transform else None
        self.mlm_norm = make_norm(config, table) if config.mlm_transform else None
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.decoder_bias else None
        pooled = config.nsp and config.pooler != "features"
        self.pooler = nn.Linear(width, width, bias=config.bias) if pooled else None
        self.nsp = nn.Linear(width, 2, bias=config.bias) if config.nsp else None
        self.activation = activation_function(config.activation)
        self.product: Callable[..., Tensor] = F.linear  # of the masked-LM head

    def forward(self, input_ids: Tensor, **inputs: Tensor | None) -> Tensor:
        """Ids (B, S), and what `hidden` takes -> masked-LM logits (B, S, V)."""
        return self.mlm_head(self.hidden(input_ids, **inputs))

    def hidden(
        self,
        input_ids: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> Tensor:
        """Ids (B, S) -> (B, S, W).

        `token_types` (B, S): sentence A (0, when absent, and for a model of one type) or B (1).
        `attention_mask` (B, S) bool: True for real tokens. `positions` (B, S): 0, 1, 2, ... when absent.
        `document_ids` (B, S): tokens of a packed row see only their own document. `document_bounds` (N + 1,): the same
        for runs of tokens (`Documents`), without a dense mask; padding is a document of its own.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BSW = self.embed(input_ids, positions, token_types)
        return self.encode(x_BSW, positions, attention_mask, document_ids, None, document_bounds)

    def embed(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Ids (B, S), positions (S,) or (B, S), types (B, S) -> (B, S, W)."""
        x_BSW = self.token_table(input_ids)
        if self.type_table is not None:
            table, alike = self.type_table, token_types is None or self.config.token_types == 1
            x_BSW = x_BSW + (table.weight[0] if alike else table(token_types))
        if self.position_table is not None:
            offset = self.config.position_offset
            x_BSW = x_BSW + self.position_table(positions + offset if offset else positions)
        if self.embedding_norm is not None:
            x_BSW = self.embedding_norm(x_BSW)
        if not self.config.norm_first:
            x_BSW = self.norm(x_BSW)
        x_BSW = F.dropout(x_BSW, self.config.dropout, self.training) if self.config.dropout else x_BSW
        return x_BSW if self.projection is None else self.projection(x_BSW)

    def encode(
        self,
        x_BSW: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Mask | None = None,
        document_bounds: Tensor | None = None,
        row_length: int | None = None,
    ) -> Tensor:
        """The blocks, and the final norm of the pre-norm order.

        `mask`, for rows of which this is only a part and without `document_ids`: (1 or B, 1, S, T), True where
        a token may look, or the documents that a context-parallel `attend` understands.
        """
        documents = mask if isinstance(mask, Documents) else None
        mask = mask if isinstance(mask, Tensor) else None
        if document_bounds is not None:
            documents = Documents(document_bounds, min(positions.shape[-1], self.config.sequence_length))
        if document_ids is not None:
            mask = (document_ids[:, :, None] == document_ids[:, None, :])[:, None]  # (B, 1, S, S)
        elif documents is not None and self.relative_bias is not None:
            # with sequence parallelism x_BSW is a part of the rows, whose length the positions have
            mask, documents = documents.mask(len(x_BSW), positions.shape[-1], is_causal=False), None
        if attention_mask is not None:
            real = attention_mask.bool()[:, None, None, :]  # (B, 1, 1, S)
            mask = real if mask is None else mask & real
        if self.relative_bias is not None:
            bias = self.relative_bias(positions).to(x_BSW.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        seen: Mask | None = documents if documents is not None else mask
        tables = layer_tables(self.config, positions, x_BSW.dtype, row_length)
        for block in self.blocks.values():
            x_BSW = block(x_BSW, seen, rotary=tables)
        return self.norm(x_BSW) if self.config.norm_first else x_BSW

    def mlm_head(self, hidden_NW: Tensor) -> Tensor:
        """(..., W) -> logits (..., V) at those positions."""
        return self.product(self.mlm_features(hidden_NW), self.token_table.weight, self.mlm_bias)

    def mlm_features(self, hidden_NW: Tensor) -> Tensor:
        """The transform before the decoder: what a loss in pieces multiplies with the token table."""
        if self.mlm_transform is None or self.mlm_norm is None:
            return hidden_NW
        return self.mlm_norm(self.activation(self.mlm_transform(hidden_NW)))

    def nsp_head(self, first_BW: Tensor) -> Tensor | None:
        """First position (B, W) -> (B, 2): "B follows A" and "B is random"; None without the head."""
        return None if self.nsp is None else self.nsp(self.pooled(first_BW))

    def pooled(self, first_BW: Tensor) -> Tensor | None:
        """First position (B, W) -> (B, W): tanh, or the config's function, of the dense layer; None without it."""
        if self.pooler is None:
            return None
        bent = torch.tanh if self.config.pooler == "tanh" else activation_function(self.config.pooler)
        return bent(self.pooler(first_BW))


HeadKind = Literal["sequence-classification", "token-classification", "question-answering", "embedding"]
KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
SPAN_LABELS = ("start", "end")


@dataclass(frozen=True)
class Head:
    """A fine-tuned head: its kind, and the name of each of its outputs (for a span `start` and `end`). It reads pooled
    [CLS] -> (B, L), or every token -> (B, S, L); an embedding, as sentence-transformers, BGE and E5 write it, has none.
    Outputs of pooled [CLS] are logits of one class or of several, or numbers (`problem`).
    """

    kind: HeadKind
    labels: tuple[str, ...] = SPAN_LABELS
    problem: ProblemType = SINGLE_LABEL


class BERTWithHead(nn.Module):
    """`model(ids, token_types, attention_mask)` gives the head's logits. `encoder` is a BERT without its pretraining
    heads; it has a pooler only under sequence classification. `output` is the head's one matrix, None where there is no
    head.
    """

    def __init__(self, config: BERTConfig, head: Head) -> None:
        super().__init__()
        pooled = head.kind == "sequence-classification"
        self.config = config = dataclasses.replace(config, nsp=pooled)
        self.head = head
        self.encoder = BERT(config)
        self.encoder.mlm_bias = self.encoder.nsp = None
        if config.pooler != "features" or head.kind == "embedding":
            self.encoder.mlm_transform = self.encoder.mlm_norm = None
        self.output = nn.Linear(config.width, len(head.labels)) if head.labels else None

    def forward(self, input_ids: Tensor, *inputs: Tensor | None, **named: Tensor | None) -> Tensor:
        """Ids (B, S), and what `BERT.hidden` takes -> logits (B, L), or (B, S, L) for the heads on tokens."""
        return self.classify(self.encoder.hidden(input_ids, *inputs, **named))

    def classify(self, hidden_BSW: Tensor) -> Tensor:
        """The encoder's output (B, S, W) -> the logits; the same without a head."""
        if self.output is None:
            return hidden_BSW
        features = hidden_BSW[:, 0] if self.head.kind == "sequence-classification" else hidden_BSW
        if self.config.pooler == "features":
            features = self.encoder.mlm_features(features)
        elif self.head.kind == "sequence-classification":
            pooled = self.encoder.pooled(features)  # (B, W)
            assert pooled is not None, "built with a pooler"
            features = pooled
        return self.output(F.dropout(features, self.config.dropout, self.training))
