"""BERT with a fine-tuned head: one label for a text, one for each token, the span that answers a question, or none.

The heads and the ends of their Hugging Face classes (`models/huggingface_heads.py` reads and writes them):

    sequence-classification   pooled [CLS] -> (B, L)     ForSequenceClassification
    token-classification      every token  -> (B, S, L)  ForTokenClassification
    question-answering        every token  -> (B, S, 2)  ForQuestionAnswering: logits of start and end
    embedding                 none: the encoder alone    Model, as sentence-transformers, BGE and E5 write it

Shape letters: B batch, S positions, W width, L labels.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .bert import BERT
from .config import BERTConfig
from .init import initialise, without_values

HeadKind = Literal["sequence-classification", "token-classification", "question-answering", "embedding"]
KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
SPAN_LABELS = ("start", "end")


@dataclass(frozen=True)
class Head:
    """What a head says: its kind, and the name of each of its outputs (for a span `start` and `end`)."""

    kind: HeadKind
    labels: tuple[str, ...] = SPAN_LABELS


class BERTWithHead(nn.Module):
    """`model(ids, token_types, attention_mask)` gives the head's logits.

    `encoder` is a BERT without its pretraining heads; it has a pooler only under sequence classification. `output` is
    the head's one matrix, None where there is no head. Parameters are torch's defaults until `build_with_head` or a
    directory fills them.
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

    def forward(
        self,
        input_ids: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Ids (B, S), and what `BERT.hidden` takes -> logits (B, L), or (B, S, L) for the heads on tokens."""
        hidden_BSW = self.encoder.hidden(input_ids, token_types, attention_mask, positions, document_ids)
        return self.classify(hidden_BSW)

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


def empty_with_head(
    config: BERTConfig, head: Head, device: torch.device | str = "meta", dtype: torch.dtype | None = None
) -> BERTWithHead:
    """The module without values: on `meta` it takes no memory."""
    return without_values(lambda: BERTWithHead(config, head), device, dtype)


@torch.no_grad()
def build_with_head(encoder: BERT, head: Head, seed: int = 0) -> BERTWithHead:
    """A copy of a trained BERT with a new head, drawn from `seed`; a pooler that it lacks is drawn too."""
    reference = encoder.token_table.weight
    model = empty_with_head(encoder.config, head, reference.device, reference.dtype)
    initialise(model, seed)
    trained = dict(encoder.named_parameters())
    for name, parameter in model.encoder.named_parameters():
        if name in trained:
            parameter.copy_(trained[name])
    return model
