"""Fine-tuned encoders in and out of the Hugging Face layouts of their classes (see `models/heads.py`).

`load_huggingface` reads any directory that we can read, with a head or without.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ..core.errors import Failed
from .bert import BERT
from .config import BERTConfig
from .families import families
from .gpt import GPT
from .heads import SPAN_LABELS, BERTWithHead, Head, HeadKind, empty_with_head
from .huggingface import State, fill, from_huggingface, outward, read_directory
from .huggingface_config import describe, read_config, unlike_ours
from .huggingface_names import head_pairs

KINDS: dict[str, HeadKind] = {  # by the end of a class's name
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "embedding",
}


def _classes() -> dict[str, HeadKind]:
    encoders = [family for family in families().values() if family.encoder]
    stems = [family.architecture.removesuffix("ForMaskedLM") for family in encoders]
    found = {f"{stem}{end}": kind for stem in stems for end, kind in KINDS.items()}
    return found | {
        "ElectraForPreTraining": "embedding"
    }  # whose head tells replaced words, for pretraining alone


def load_huggingface(directory: str | Path, dtype: torch.dtype = torch.float32) -> GPT | BERT | BERTWithHead:
    """The model in a Hugging Face directory, with its fine-tuned head where `architectures` names one.

    On the CPU, in this dtype. Raises as `from_huggingface` does.
    """
    directory = Path(directory)
    fields, state = read_directory(directory)
    named, classes = fields.get("architectures") or [""], _classes()
    if named[0] not in classes:
        return from_huggingface(directory, dtype)
    where = str(directory / "config.json")
    head = _read_head(fields, classes[named[0]], where)
    config = read_config(fields, state, where)
    if not isinstance(config, BERTConfig):
        raise Failed("config.json names an encoder's class for another model", where=where, why=named[0])
    pooling = fields.get("classifier_pooling", "cls")
    if head.kind == "sequence-classification" and config.pooler == "features" and pooling != "cls":
        raise unlike_ours(
            where, f"classifier_pooling = {pooling!r} (here a text's label is read off its first token)"
        )
    model = empty_with_head(config, head, "cpu", dtype)
    table = list(head_pairs(model.config, fields["model_type"], head.kind))
    fill(model, table, config.head_size, state, directory)
    return model


def head_to_huggingface(model: BERTWithHead) -> tuple[dict[str, Any], State]:
    """The `config.json` fields and the tensors of a fine-tuned BERT. Raises as `to_huggingface` does."""
    # the classes with a head have no MLM transform, so one that was trained without it fits as well
    fields, _ = describe(dataclasses.replace(model.config, mlm_transform=True, nsp=False))
    head, stem = model.head, fields["architectures"][0].removesuffix("ForMaskedLM")
    fields["architectures"] = [stem + next(end for end, kind in KINDS.items() if kind == head.kind)]
    fields["torch_dtype"] = str(model.encoder.token_table.weight.dtype).removeprefix("torch.")
    if head.kind in ("sequence-classification", "token-classification"):
        fields["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
        fields["label2id"] = {label: i for i, label in enumerate(head.labels)}
    if head.kind == "sequence-classification":
        fields["problem_type"] = "single_label_classification"
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    table = list(head_pairs(model.config, fields["model_type"], head.kind))
    return fields, outward(state, table, model.config.head_size)


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
