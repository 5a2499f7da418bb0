"""Exports a model as an artifact of kind `gguf`: model.gguf, tokenizer.json and model.json, compared with the
torch model through llama.cpp where llama-cpp-python is installed.
"""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np

from ...core.backend import BackendOptions
from ...core.console import warn
from ..graphs.parity import BOUNDS as BY_PRECISION
from ..graphs.parity import Case
from ..graphs.reference import Adapted, Outputs
from ..runtimes.backends import classes_of, run_gguf
from ..runtimes.loaded import Loaded
from .export import ALONE, Judging, Report, copy_tokenizer, description, exporting, judge, write_json
from .gguf_writer import GGUFPrecision, write_gguf

# llama.cpp computes GELU from a table of f16 values, so f32 is no closer than f16; its blocks of 32 weights are those
# of our int8 and int4, of random weights too: mean KL divergence in nats on random ids as well.
BOUNDS = {
    name: dataclasses.replace(BY_PRECISION[precision], sweep_kl=nats)
    for name, precision, nats in (
        ("f32", "fp16", 1e-3),
        ("f16", "fp16", 1e-3),
        ("q8_0", "int8", 1e-2),
        ("q4_0", "int4", 0.3),
    )
}
TEXTS, LENGTH = 4, 64


def export_gguf(
    path: Path | str,
    out: Path | str,
    precision: GGUFPrecision = "f16",
    judging: Judging = ALONE,
    overwrite: bool = False,
) -> Report:
    """Write the model at `path` as GGUF; returns what parity.json holds.

    Raises Refused when the model is of a shape that llama.cpp does not compute, or differs by more than the
    bound: then nothing is left at `out`.
    """
    with exporting(path, out, "gguf", judging, overwrite) as export:
        opened, file = export.opened, export.folder / "model.gguf"
        config = opened.model.config
        write_gguf(opened.model, opened.tokenizer, file, precision, export.sentence)
        described = description(opened.model)
        write_json(export.folder / "model.json", described)
        copy_tokenizer(opened, export.folder)
        export.keep_sentence()
        export.draft.facts |= {"precision": precision, "pooling": export.sentence.pooling}
        if importlib.util.find_spec("llama_cpp") is None:
            warn("not compared with torch: llama-cpp-python is not installed (the extra llamacpp)")
            return export.report
        reference = export.reference()
        if reference.encoder is not None:
            reference = dataclasses.replace(
                reference, backend=Adapted(reference.encoder, _headless, one_type=True)
            )
        labels = classes_of(described)
        backend = run_gguf(file, config, BackendOptions("cpu"), precision, len(labels))
        candidate = Loaded(config, export.tokenizer, opened.input, backend)
        length = min(LENGTH, config.sequence_length)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (TEXTS, length))
        cases = [Case(f"{TEXTS} x {length}", ids, np.full(TEXTS, length))]
        judge(export, reference, candidate, BOUNDS[precision], "llama.cpp", cases)
    return export.report


def _headless(outputs: Outputs, ask_BN: np.ndarray) -> Outputs:
    """What a GGUF file has of a BERT."""
    kept = ("last_hidden_state", "sentence_embedding", "logits")
    return {name: outputs[name] for name in kept if name in outputs}
