"""Exports: an ONNX artifact or a Hugging Face directory, each compared with the torch model before it may exist.

An ONNX artifact (kind `onnx`) holds model.onnx (and model.onnx.data above 1.8 GB), model.json, tokenizer.json and
parity.json with the parity report and a latency table. A Hugging Face directory (kind `model`) holds config.json,
model.safetensors, tokenizer.json, their small companions, and parity.json.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.artifact import check_free, create_artifact
from ..core.errors import Refused, WrongUse
from ..models.config import family_of
from .backends import Loaded, onnx_backend, torch_backend
from .bench import latency_table
from .parity import BOUND, compare, require
from .source import OpenedModel, open_model

if TYPE_CHECKING:
    from ..models.bert import BERT
    from ..models.gpt import GPT

Report = dict[str, Any]


def export_onnx(path: Path | str, out: Path | str, overwrite: bool = False, bound: float = BOUND) -> Report:
    """Write the model at `path` as an ONNX artifact; returns what parity.json holds.

    Raises Refused when an output differs from torch by more than the bound: then nothing is left at `out`.
    """
    check_free(out, overwrite)
    opened = open_model(path)
    config = opened.model.config
    family = family_of(config)
    with create_artifact(out, "onnx", inputs=[opened.input], overwrite=overwrite) as draft:
        graph = draft.path / "model.onnx"
        described = {"family": family, "config": config.to_dict()}
        nodes = write_graph(
            opened.model, graph, {"throughline": json.dumps({**described, "source": opened.input.hash})}
        )
        _write_json(draft.path / "model.json", described)
        _copy_tokenizer(opened, draft.path)
        candidate = onnx_backend(graph, config, None, opened.input, None)
        report = _checked(opened, candidate, "the ONNX graph", bound)
        report["latency"] += latency_table(candidate)
        _write_json(draft.path / "parity.json", report)
        draft.facts |= {"family": family, "precision": "fp32", "nodes": nodes, **_facts(report)}
    return report


def write_graph(model: "GPT | BERT", path: Path, metadata: dict[str, str]) -> int:
    """Write the graph of a GPT or BERT module to `path`; returns the number of nodes."""
    from ..models.gpt import GPT
    from .onnx_bert import bert_graph
    from .onnx_gpt import gpt_graph

    if model.config.attention_pattern is not None:
        why = "the graphs look at the whole sequence, and the model was trained to look at a part"
        fix = "evaluate, generate and serve it with the torch backend"
        raise Refused(
            "a model with an attention pattern has no ONNX graph yet",
            where="attention_window",
            why=why,
            fix=fix,
        )
    graph = gpt_graph(model) if isinstance(model, GPT) else bert_graph(model)
    return graph.save(path, metadata)


def export_huggingface(
    path: Path | str, out: Path | str, overwrite: bool = False, bound: float = BOUND
) -> Report:
    """Write the model at `path` as a Hugging Face directory that transformers loads; returns what parity.json holds.

    The directory is read back by our own importer and compared. Raises Refused for a shape that Hugging Face's classes
    cannot express and when an output differs by more than the bound.
    """
    from safetensors.torch import save_file

    from ..models.huggingface import from_huggingface, to_huggingface

    check_free(out, overwrite)
    opened = open_model(path)
    fields, state = to_huggingface(opened.model)
    with create_artifact(out, "model", inputs=[opened.input], overwrite=overwrite) as draft:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(state, draft.path / "model.safetensors", metadata={"format": "pt"})
        special = _copy_tokenizer(opened, draft.path)
        ids = {f"{name}_token_id": value for name, value in special.items() if name in ("bos", "eos", "pad")}
        _write_json(draft.path / "config.json", fields | ids)
        if family_of(opened.model.config) == "gpt":
            _write_json(draft.path / "generation_config.json", ids)
        candidate = torch_backend(from_huggingface(draft.path), None, opened.input)
        report = _checked(opened, candidate, "the Hugging Face directory", bound)
        _write_json(draft.path / "parity.json", report)
        draft.facts |= {
            "family": family_of(opened.model.config),
            "architecture": fields["architectures"][0],
            **_facts(report),
        }
    return report


def _checked(opened: OpenedModel, candidate: Loaded, what: str, bound: float) -> Report:
    """The parity report with torch's own latency, or Refused."""
    reference = torch_backend(opened.model.float(), None, opened.input)
    report = compare(reference, candidate, bound)
    require(report, what)
    return report | {"latency": latency_table(reference)}


def _facts(report: Report) -> dict[str, Any]:
    facts = {
        "parity_max_abs": max(summary["max_abs"] for summary in report["outputs"].values()),
        "parity_bound": report["bound"],
    }
    return facts | ({"greedy_tokens": report["greedy_tokens"]} if "greedy_tokens" in report else {})


def _copy_tokenizer(opened: OpenedModel, target: Path) -> dict[str, int]:
    """Copy tokenizer.json with a tokenizer_config.json that names its special tokens; returns their ids by our names."""
    if opened.tokenizer is None:
        return {}
    from ..data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(opened.tokenizer)
    if tokenizer.vocab_size > opened.model.config.vocab_size:
        raise WrongUse(
            "the tokenizer has more tokens than the model", where=opened.tokenizer,
            why=f"{tokenizer.vocab_size} > {opened.model.config.vocab_size}", fix="use the tokenizer it was trained with",
        )  # fmt: skip
    (target / "tokenizer.json").write_bytes(opened.tokenizer.read_bytes())
    texts = {i: text for text, i in tokenizer.vocab.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": opened.model.config.sequence_length,
    }
    config |= {f"{role}_token": texts[i] for role, i in tokenizer.special.items()}
    _write_json(target / "tokenizer_config.json", config)
    return tokenizer.special


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
