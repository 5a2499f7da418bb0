"""Calibration for int8 with fixed scales: which inputs every linear layer gets on real text.

The range of a layer is the clip of |x| with the smallest squared error of rounding to 255 values, found on a
histogram: a few outliers are cut when that serves the many. An artifact of kind `calibration` holds
ranges.json; it belongs to the weights that it was made from.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.artifact import Input, create_artifact, read_manifest, verify_artifact
from ...core.errors import Refused
from ...core.files import read_json
from ..runtimes.source import open_model
from .onnx_products import INT8_MAX
from .real_text import TextRows, read_rows

if TYPE_CHECKING:
    from torch import nn

BINS = 2048
BATCH = 8
RANGES = "ranges.json"


def calibrate(model: "nn.Module", rows: TextRows) -> dict[str, float]:
    """The range of every linear layer of a GPT or BERT, by its name in the module (or in its encoder)."""
    import torch

    body: Any = getattr(model, "encoder", model)
    layers = {n: m for n, m in body.named_modules() if isinstance(m, torch.nn.Linear) and n != "output"}
    if body is not model:
        layers["output"] = model.output  # type: ignore[assignment]
    largest = dict.fromkeys(layers, 0.0)
    counts = {name: np.zeros(BINS, np.int64) for name in layers}

    def look(name: str, first: bool) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
            x = inputs[0].detach().abs().flatten().float()
            if first:
                largest[name] = max(largest[name], float(x.max()))
            elif largest[name] > 0:
                counts[name] += torch.histc(x, BINS, 0.0, largest[name]).long().numpy()

        return hook

    for first in (True, False):  # the largest values, then the histograms up to them
        with ExitStack() as hooks, torch.inference_mode():
            for name, layer in layers.items():
                hooks.enter_context(layer.register_forward_hook(look(name, first)))
            for start in range(0, len(rows.calibration), BATCH):
                _run(model, torch.from_numpy(rows.calibration[start : start + BATCH]))
    return {name: best_clip(counts[name], top) for name, top in largest.items() if top > 0}


def _run(model: Any, ids: Any) -> None:
    """Every layer once, the heads of a BERT included."""
    if hasattr(model, "head") and not hasattr(model, "mlm_head"):
        model(ids)  # a GPT, or a BERT with a fine-tuned head
        return
    hidden = model.hidden(ids)
    model.mlm_features(hidden)
    model.nsp_head(hidden[:, 0])


def best_clip(counts: np.ndarray, largest: float) -> float:
    """The clip of |x| with the smallest squared error, given a histogram of |x| on [0, largest]."""
    middle = (np.arange(len(counts)) + 0.5) * (largest / len(counts))
    best, found = np.inf, largest
    for part in range(16, 129):
        clip = largest * part / 128
        step = clip / INT8_MAX
        # a value inside is off by the rounding of its bin, at least as much as evenly spread values are
        rounded = np.minimum(np.rint(middle / step), INT8_MAX) * step
        error = np.where(middle <= clip, step**2 / 12, (middle - rounded) ** 2)
        if (total := float((error * counts).sum())) < best:
            best, found = total, clip
    return found


def write_calibration(
    path: Path | str, out: Path | str, text: Path | str, overwrite: bool = False
) -> dict[str, Any]:
    """Calibrate the model at `path` on a text file; writes an artifact and returns its facts."""
    opened = open_model(path)
    rows = read_rows(text, opened.tokenizer, opened.model.config.sequence_length)
    source = Input(rows.source, "foreign", rows.sha256)
    with create_artifact(out, "calibration", inputs=[opened.input, source], overwrite=overwrite) as draft:
        ranges = calibrate(opened.model, rows)
        (draft.path / RANGES).write_text(json.dumps(ranges, indent=1) + "\n")
        facts = {"layers": len(ranges), "tokens": int(rows.calibration.size), "model": opened.input.hash}
        draft.facts |= facts
    return facts


def read_calibration(path: Path | str, model: Input) -> Mapping[str, float]:
    """The ranges of a calibration artifact. Raises Refused when it was made from other weights."""
    verify_artifact(path)
    manifest = read_manifest(path, "calibration")
    if manifest.facts["model"] != model.hash:
        raise Refused(
            "this calibration was made from another model",
            where=path,
            why=f"its model has the hash {manifest.facts['model'][:12]}, this one {model.hash[:12]}",
            fix="calibrate again: throughline export MODEL --to calibration --text FILE --out DIR",
        )
    return read_json(Path(path) / RANGES)
