"""Fine-tuned BERTs in and out of the Hugging Face layouts of their three classes (see `models/heads.py`).

`load_huggingface` reads any directory that we can read, with a head or without.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Failed
from .bert import BERT
from .config import BERTConfig
from .gpt import GPT
from .heads import SPAN_LABELS, BERTWithHead, Head, HeadKind, empty_with_head
from .huggingface import State, fill, from_huggingface, outward, read_directory
from .huggingface_config import describe, read_config, unlike_ours
from .huggingface_names import head_pairs

CLASSES: dict[str, HeadKind] = {
    "BertForSequenceClassification": "sequence-classification",
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
    "BertModel": "embedding",
}


def load_huggingface(directory: str | Path, dtype: torch.dtype = torch.float32) -> GPT | BERT | BERTWithHead:
    """The model in a Hugging Face directory, with its fine-tuned head where `architectures` names one.

    On the CPU, in this dtype. Raises as `from_huggingface` does.
    """
    directory = Path(directory)
    fields, state = read_directory(directory)
    named = fields.get("architectures") or [""]
    if named[0] not in CLASSES:
        return from_huggingface(directory, dtype)
    where = str(directory / "config.json")
    head = _read_head(fields, CLASSES[named[0]], where)
    config = read_config(fields, state, where)
    if not isinstance(config, BERTConfig):
        raise Failed("config.json names a BERT class for another model", where=where, why=named[0])
    model = empty_with_head(config, head, "cpu", dtype)
    table = list(head_pairs(model.config, _output_name(head)))
    fill(model, table, config.head_size, state, directory)
    return model


def head_to_huggingface(model: BERTWithHead) -> tuple[dict[str, Any], State]:
    """The `config.json` fields and the tensors of a fine-tuned BERT. Raises as `to_huggingface` does."""
    # the classes with a head have no MLM transform, so one that was trained without it fits as well
    fields, _ = describe(dataclasses.replace(model.config, mlm_transform=True))
    head = model.head
    fields["architectures"] = [next(name for name, kind in CLASSES.items() if kind == head.kind)]
    fields["torch_dtype"] = str(model.encoder.token_table.weight.dtype).removeprefix("torch.")
    if head.kind in ("sequence-classification", "token-classification"):
        fields["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
        fields["label2id"] = {label: i for i, label in enumerate(head.labels)}
    if head.kind == "sequence-classification":
        fields["problem_type"] = "single_label_classification"
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    table = list(head_pairs(model.config, _output_name(head)))
    return fields, outward(state, table, model.config.head_size)


def _output_name(head: Head) -> str:
    return {"question-answering": "qa_outputs", "embedding": ""}.get(head.kind, "classifier")


def _read_head(fields: dict[str, Any], kind: HeadKind, where: str) -> Head:
    if kind in ("question-answering", "embedding"):
        return Head(kind, SPAN_LABELS if kind == "question-answering" else ())
    if fields.get("problem_type") not in (None, "single_label_classification"):
        raise unlike_ours(where, f"problem_type = {fields['problem_type']!r}")
    given = fields.get("id2label") or {str(i): f"LABEL_{i}" for i in range(fields.get("num_labels") or 2)}
    try:
        labels = tuple(str(given[str(i)]) for i in range(len(given)))
    except (KeyError, TypeError) as error:
        raise Failed("id2label does not number its labels from 0", where=where, why=str(given)) from error
    return Head(kind, labels)
