"""What real text says of an export: how far its predictions are from the torch model's. Random ids show whether a graph
is right; only text shows whether a precision is enough.

Other rows of the text calibrate int8 with fixed scales. The range of a layer is the clip of |x| with the smallest
squared error of rounding to 255 values: a few outliers are cut when that serves the many. An artifact of kind
`calibration` holds ranges.json; it belongs to the weights that it was made from.

Letters: R rows, S tokens of a row, N positions asked for, V vocabulary.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.artifact import Input, create_artifact, read_manifest, verify_artifact
from ...core.backend import Span, log_softmax, on_host
from ...core.errors import Refused, WrongUse
from ...core.files import read_json, sha256_file
from ...models.config import SINGLE_LABEL
from ..runtimes.backends import Loaded
from ..runtimes.source import open_model
from .onnx_writer import INT8_MAX
from .parity import PIECE_NUMBERS, Bounds, Tally

ROW_TOKENS = 128
ROWS = 128  # of each half, 16,384 tokens: agreement of 98 % is then known to about 0.3 %
READ_BYTES = 4 << 20  # of the text, from its beginning
MASKED = 0.15
CERTAIN = 0.9
LEVEL = 0.01  # chance of refusing an export that agrees as often as its bound
Predictions = tuple[np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class TextRows:
    """A text cut into rows (R, S): even ones are for calibration, odd ones for judging."""

    source: str
    sha256: str
    ids_RS: np.ndarray
    mask_id: int | None

    @property
    def calibration(self) -> np.ndarray:
        return self.ids_RS[0::2]

    @property
    def judging(self) -> np.ndarray:
        return self.ids_RS[1::2]


def read_rows(path: Path | str, tokenizer: Path | None, context: int) -> TextRows:
    """A text file as rows of tokens, behind BOS for a decoder whose prompts have it and framed by [CLS] and [SEP] for a
    BERT. Raises WrongUse without tokenizer, file, two rows.
    """
    from ...data.tokenizer import Tokenizer

    path = Path(path)
    if tokenizer is None:
        fix = "put the tokenizer.json that it was trained with into its directory"
        raise WrongUse("the model has no tokenizer, so no text can be read", where="--text", fix=fix)
    if not path.is_file():
        raise WrongUse("no such text file", where=path, fix="give a plain text file with --text")
    loaded = Tokenizer.load(tokenizer)
    with open(path, "rb") as file:
        text = file.read(READ_BYTES).decode("utf-8", errors="ignore")
    ids = loaded.encode(" ".join(text.split())) if loaded.cls_id is not None else loaded.encode(text)
    before = loaded.document_framing[0]
    behind = list[int]()
    if loaded.cls_id is not None and loaded.sep_id is not None:
        before, behind = [loaded.cls_id], [loaded.sep_id]
    length = min(ROW_TOKENS, context) - len(before) - len(behind)
    count = len(ids) // length
    if count < 2:
        why = f"{len(ids):,} tokens, two rows are {2 * length:,}"
        raise WrongUse("the text is too short", where=path, why=why, fix="give a longer one")
    chosen = np.unique(np.linspace(0, count - 1, min(count, 2 * ROWS)).astype(np.int64))
    rows = ids[: count * length].reshape(count, length)[chosen].astype(np.int64)
    around = [np.tile(np.array(ids, np.int64), (len(rows), 1)) for ids in (before, behind)]
    rows = np.concatenate((around[0], rows, around[1]), axis=1)
    return TextRows(str(path), sha256_file(path), rows, loaded.mask_id)


def compare_on_text(reference: Loaded, candidate: Loaded, rows: TextRows, bounds: Bounds) -> dict[str, Any]:
    """Mean KL divergence and top-1 agreement on the judging rows (a GPT's next tokens, a BERT's 15 % that are masked
    here, the labels of a fine-tuned one), and whether they are within the bounds. `contested`: agreement where the
    reference is right, of labels undecided, with a probability below 0.9; None where it nowhere is.
    """
    tally, losses = Tally(logits=True), np.zeros(2)
    contested = missed = 0
    for ours_NV, theirs_NV, truth_N in _predictions(reference, candidate, rows):
        tally.add(ours_NV, theirs_NV)
        top_N = ours_NV.argmax(-1)
        decided = np.exp(log_softmax(ours_NV).max(-1)) < CERTAIN
        if truth_N is not None:
            decided &= top_N == truth_N
            for side, logits in enumerate((ours_NV, theirs_NV)):
                right = np.take_along_axis(log_softmax(logits), truth_N[:, None], -1)
                losses[side] -= float(right.sum(dtype=np.float64))
        contested += int(decided.sum())
        missed += int((decided & (top_N != theirs_NV.argmax(-1))).sum())
    report: dict[str, Any] = {
        "source": rows.source,
        "tokens": int(rows.judging.size),
        "predictions": tally.rows,
        "kl": tally.kl / tally.rows,
        "kl_bound": bounds.kl,
        "top1_agreement": tally.agreeing / tally.rows,
        "contested": 1 - missed / contested if contested else None,
        "contested_predictions": contested,
        "contested_bound": bounds.contested,
    }
    if losses.any():
        report |= {"torch_loss": losses[0] / tally.rows, "exported_loss": losses[1] / tally.rows}
    enough = missed <= allowed_disagreements(contested, bounds.contested)
    return report | {"passed": bool(report["kl"] <= bounds.kl and enough)}


def allowed_disagreements(predictions: int, bound: float) -> int:
    """The most disagreements among so many predictions that do not yet show, at the level of 1 %, an agreement below
    the bound (a quantile of the binomial distribution, at least one): near ties fall either way in any precision.
    """
    if not 0 < bound < 1:
        return 1 if bound >= 1 else predictions
    counts = torch.arange(predictions + 1, dtype=torch.float64)
    wrong = torch.distributions.Binomial(predictions, torch.tensor(1 - bound, dtype=torch.float64))
    return max(int((wrong.log_prob(counts).exp().cumsum(0) < 1 - LEVEL).sum()), 1)


def _predictions(reference: Loaded, candidate: Loaded, rows: TextRows) -> Iterator[Predictions]:
    """Logits of both models (N, V) and the true ids (N,), None where there is no truth; a few rows at a time."""
    backends = reference.backend, candidate.backend
    step = max(1, PIECE_NUMBERS // (rows.judging.shape[1] * reference.config.vocab_size))
    limits = candidate.backend.limits
    step = min(step, limits.rows or step)
    for start in range(0, len(rows.judging), step):
        ids = rows.judging[start : start + step, : limits.tokens]
        if reference.causal is not None:
            spans = [Span(row, 0, line, len(line)) for row, line in enumerate(ids)]
            caches = [b.new_cache(len(ids)) for b in backends]  # of llama.cpp the logits are its memory
            both = (on_host(b.step(spans, cache)) for b, cache in zip(backends, caches))
            ours, theirs = (_lines(logits.reshape(*ids.shape, -1)[:, :-1]) for logits in both)
            yield ours, theirs, ids[:, 1:].reshape(-1)
        else:
            labels = len(reference.classes)
            alone = labels > 0 and (labels == 1 or reference.problem != SINGLE_LABEL)
            yield from _masked_tokens(backends, ids, rows.mask_id, start, alone)


def _masked_tokens(
    backends: Any, ids: np.ndarray, mask_id: int | None, seed: int, alone: bool = False
) -> Iterator[Predictions]:
    """Of a BERT with a fine-tuned head its labels for the rows as they are; `alone`: each is judged for itself."""
    real, types = np.ones(ids.shape, bool), np.zeros_like(ids)
    count = max(1, int(MASKED * ids.shape[1]))
    rng = np.random.default_rng(seed)
    inner = np.arange(1, ids.shape[1] - 1) if ids.shape[1] > 2 else np.arange(ids.shape[1])
    ask = np.sort(np.stack([rng.choice(inner, min(count, len(inner)), replace=False) for _ in ids]), axis=1)
    masked = ids.copy()
    if mask_id is not None:
        np.put_along_axis(masked, ask, mask_id, 1)
    ours, theirs = (backend.forward(masked, types, real, ask) for backend in backends)
    truth = np.take_along_axis(ids, ask, 1).reshape(-1) if "mlm_logits" in ours else None
    if truth is None:
        ours, theirs = (backend.forward(ids, types, real, ask) for backend in backends)
    for name in ("mlm_logits", "logits", "start_logits", "end_logits"):
        if name in ours:
            pair = _lines(ours[name]), _lines(theirs[name])
            yield *(map(_yes_or_no, pair) if alone and name == "logits" else pair), truth


def _lines(logits: np.ndarray) -> np.ndarray:
    return logits.reshape(-1, logits.shape[-1])


def _yes_or_no(logits_NL: np.ndarray) -> np.ndarray:
    """Outputs that are judged one by one, each as the logits (0, x) of a choice of two: (N L, 2)."""
    return np.stack((np.zeros(logits_NL.size, logits_NL.dtype), logits_NL.reshape(-1)), -1)


BINS = 2048
BATCH = 8
RANGES = "ranges.json"


def calibrate(model: nn.Module, rows: TextRows) -> dict[str, float]:
    """The range of every linear layer of a GPT or BERT, by its name in the module (or in its encoder)."""
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
                ids: Any = torch.from_numpy(rows.calibration[start : start + BATCH])
                if hasattr(model, "head") and not hasattr(model, "mlm_head"):
                    model(ids)  # a GPT, or a BERT with a fine-tuned head
                    continue
                hidden = body.hidden(ids)
                body.mlm_features(hidden)
                body.nsp_head(hidden[:, 0])
    return {name: best_clip(counts[name], top) for name, top in largest.items() if top > 0}


def best_clip(counts: np.ndarray, largest: float) -> float:
    """The clip of |x| with the smallest squared error, given a histogram of |x| on [0, largest]."""
    middle = (np.arange(len(counts)) + 0.5) * (largest / len(counts))
    clips = largest * np.arange(16, 129)[:, None] / 128
    # a value inside is off as evenly spread values are, one beyond by what is cut of it
    error = np.where(middle <= clips, (clips / INT8_MAX) ** 2 / 12, (middle - clips) ** 2)
    return float(clips[(error * counts).sum(-1).argmin(), 0])


def write_calibration(
    path: Path | str, out: Path | str, text: Path | str, overwrite: bool = False
) -> dict[str, Any]:
    """Calibrate the model at `path` on a text file; writes an artifact and returns its facts."""
    opened = open_model(path)
    rows = read_rows(text, opened.tokenizer, opened.model.config.sequence_length)
    inputs = [opened.input, Input(rows.source, "foreign", rows.sha256)]
    with create_artifact(out, "calibration", inputs=inputs, overwrite=overwrite) as draft:
        ranges = calibrate(opened.model, rows)
        (draft.path / RANGES).write_text(json.dumps(ranges, indent=1) + "\n")
        draft.facts |= {"layers": len(ranges), "tokens": rows.calibration.size, "model": opened.input.hash}
    return draft.facts


def read_calibration(path: Path | str, model: Input) -> Mapping[str, float]:
    """The ranges of a calibration artifact. Raises Refused when it was made from other weights."""
    verify_artifact(path)
    manifest = read_manifest(path, "calibration")
    if manifest.facts["model"] != model.hash:
        why = f"its model has the hash {manifest.facts['model'][:12]}, this one {model.hash[:12]}"
        fix = "calibrate again: throughline export MODEL --to calibration --text FILE --out DIR"
        raise Refused("this calibration was made from another model", where=path, why=why, fix=fix)
    return read_json(Path(path) / RANGES)
