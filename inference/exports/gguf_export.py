"""Exports a model as an artifact of kind `gguf`: model.gguf, tokenizer.json and model.json, compared with the
torch model through llama.cpp where llama-cpp-python is installed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from ...core.artifact import check_free, create_artifact
from ...core.console import warn
from ...core.errors import Refused
from ...core.hardware import usable_cores
from ...core.logits import divergence
from ...models.config import GPTConfig, ModelConfig, family_of
from ..runtimes.backends import torch_backend
from ..runtimes.source import open_model
from .gguf_writer import INSTALL, GGUFPrecision, write_gguf

# Largest mean KL divergence of the next token's distribution from torch's, in nats; of a BERT, one minus the
# cosine of the embeddings. llama.cpp computes GELU from a table of f16 values, so f32 is no closer than 1e-4.
BOUNDS: dict[str, float] = {"f32": 1e-3, "f16": 1e-3, "q8_0": 1e-2, "q4_0": 0.3}
TEXTS, LENGTH = 4, 64


def export_gguf(
    path: Path | str, out: Path | str, precision: GGUFPrecision = "f16", overwrite: bool = False
) -> dict[str, Any]:
    """Write the model at `path` as GGUF; returns what parity.json holds.

    Raises Refused when the model is of a shape that llama.cpp does not compute, or differs by more than the
    bound: then nothing is left at `out`.
    """
    check_free(out, overwrite)
    opened = open_model(path)
    config = opened.model.config
    with create_artifact(out, "gguf", inputs=[opened.input], overwrite=overwrite) as draft:
        file = draft.path / "model.gguf"
        write_gguf(opened.model, opened.tokenizer, file, precision)  # type: ignore[arg-type]
        described = {"family": family_of(config), "config": config.to_dict()}
        (draft.path / "model.json").write_text(json.dumps(described, indent=1) + "\n")
        if opened.tokenizer is not None:
            (draft.path / "tokenizer.json").write_bytes(opened.tokenizer.read_bytes())
        report: dict[str, Any] = {"bound": BOUNDS[precision]}
        if importlib.util.find_spec("llama_cpp") is None:
            warn(f"not compared with torch: llama-cpp-python is not installed ({INSTALL})")
        else:
            report |= compare_gguf(opened, file, config, precision)
        (draft.path / "parity.json").write_text(json.dumps(report, indent=1) + "\n")
        draft.facts |= {"family": family_of(config), "precision": precision, **report}
    return report


def compare_gguf(opened: Any, file: Path, config: ModelConfig, precision: str) -> dict[str, Any]:
    """How far llama.cpp is from torch on random ids. Raises Refused above the bound."""
    from ..runtimes.llama_backend import LlamaCausal, LlamaEncoder

    reference = torch_backend(opened.model.float(), None, opened.input)
    length = min(LENGTH, config.sequence_length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (TEXTS, length))
    if isinstance(config, GPTConfig):
        zeros, ask = np.zeros(TEXTS, np.int64), np.tile(np.arange(length), (TEXTS, 1))
        backends: Any = (reference.causal, LlamaCausal(file, config, usable_cores(), "cpu", precision))
        logits = [b.forward(ids, zeros, ask, b.new_cache(TEXTS)) for b in backends]
        ours, theirs = (value.reshape(-1, config.vocab_size) for value in logits)
        far = float(divergence(ours, theirs).mean(dtype=np.float64))
        found = {"mean_kl": far, "top1_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).mean())}
    else:
        types, mask, none = np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((TEXTS, 0), np.int64)
        encoders = (reference.encoder, LlamaEncoder(file, config, usable_cores(), "cpu", precision))
        vectors = []
        for encoder in encoders:
            assert encoder is not None
            vector = encoder.forward(ids, types, mask, none)["sentence_embedding"]
            vectors.append(vector / np.linalg.norm(vector, axis=1, keepdims=True))
        far = float(1 - (vectors[0] * vectors[1]).sum(1).min())
        found = {"one_minus_cosine": far}
    if not far <= BOUNDS[precision]:
        raise Refused(
            "llama.cpp does not compute what the torch model computes",
            where=precision,
            why=f"{next(iter(found))} {far:.3g} > {BOUNDS[precision]:g}",
            fix="export with a finer --precision; nothing was written",
        )
    return found
