"""Does an exported model compute what the torch model computes? The report that every export ends with.

Both are driven through the same protocol over a sweep of shapes: length 1, odd lengths, the whole context, ragged
batches, prompts in pieces, decoding on ragged pasts. An output passes when its largest error is at most `BOUND` times the
scale of the reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.backend import CausalBackend, EncoderBackend
from ..core.errors import Refused
from .backends import Loaded
from .generation import Request, generate

# fp32 rounds at 6e-8; the same sums of 10^3 to 10^4 terms in another order differ by about 1e-6 of their scale after tens of
# layers. A wrong weight, mask or position shows at 1e-2 and above: 1e-4 is a hundred times from both.
BOUND = 1e-4
TOP1_BOUND = 0.99  # below that, errors are not confined to near ties
GREEDY_TOKENS = 64

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One shape of the sweep: its name and what to compute with a loaded model."""

    name: str
    ids_BS: np.ndarray
    lengths_B: np.ndarray  # real tokens per row; the rest is padding


def sweep(vocab_size: int, context: int, seed: int = 0) -> list[Case]:
    """Random ids in the shapes that break exports; nothing is longer than the context."""
    rng = np.random.default_rng(seed)
    cases = []
    for batch, length in ((1, 1), (1, 2), (1, 7), (2, 16), (3, 33), (1, context), (5, min(context, 65))):
        length = min(length, context)
        ids = rng.integers(0, vocab_size, (batch, length))
        cases.append(Case(f"{batch} x {length}", ids, np.full(batch, length)))
        if batch > 1:
            ragged = rng.integers(1, length + 1, batch)
            ragged[0] = length
            cases.append(Case(f"{batch} x {length} ragged", ids, ragged))
    return cases


def compare(reference: Loaded, candidate: Loaded, bound: float = BOUND) -> dict[str, Any]:
    """The parity report: per case and output, and over all of them; `passed` says whether every bound holds."""
    rows = []
    for case in sweep(reference.config.vocab_size, reference.config.sequence_length):
        ours, theirs = run_case(reference, case), run_case(candidate, case)
        rows += [row_of(case.name, name, ours[name], theirs[name], bound) for name in ours]
    summary = {
        name: summarise([row for row in rows if row["output"] == name])
        for name in {row["output"]: None for row in rows}
    }
    report = {
        "bound": bound,
        "bound_of": "the reference's largest absolute value, at least 1",
        "outputs": summary,
    }
    report["passed"] = all(row["passed"] for row in rows)
    if reference.causal is not None and candidate.causal is not None:
        same, asked = greedy_agreement(reference.causal, candidate.causal)
        report["greedy_tokens"] = {"equal": same, "asked": asked}
    return report | {"cases": rows}


def run_case(loaded: Loaded, case: Case) -> Outputs:
    """Every output of a model for a case, one row per real token where an output has one per token."""
    if loaded.causal is not None:
        return dict(_causal_outputs(loaded.causal, case))
    assert loaded.encoder is not None
    return _encoder_outputs(loaded.encoder, case)


def _causal_outputs(backend: CausalBackend, case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Logits of every real token: read at once, in two pieces, and with ragged pasts token by token."""
    batch, length = case.ids_BS.shape
    everywhere = np.tile(np.arange(length), (batch, 1))
    real = everywhere < case.lengths_B[:, None]
    zeros = np.zeros(batch, np.int64)
    yield "logits at once", backend.forward(case.ids_BS, zeros, everywhere, backend.new_cache(batch))[real]
    if length == 1:
        return
    cut, cache = length // 2, backend.new_cache(batch)
    first = backend.forward(case.ids_BS[:, :cut], zeros, everywhere[:, :cut], cache)
    second = backend.forward(case.ids_BS[:, cut:], zeros + cut, everywhere[:, : length - cut], cache)
    yield "logits in pieces", np.concatenate((first, second), axis=1)[real]
    # Prompts of different lengths in one padded call, then two single tokens on top of each row's own past.
    past = np.maximum(case.lengths_B - 2, 0)
    cache, steps = backend.new_cache(batch), []
    backend.forward(case.ids_BS, zeros, everywhere[:, :0], cache)
    for step in range(min(2, int(case.lengths_B.min()))):
        at = (past + step)[:, None]
        steps.append(
            backend.forward(np.take_along_axis(case.ids_BS, at, 1), past + step, np.zeros_like(at), cache)[
                :, 0
            ]
        )
    yield "logits of ragged decode", np.concatenate(steps)


def _encoder_outputs(backend: EncoderBackend, case: Case) -> Outputs:
    batch, length = case.ids_BS.shape
    everywhere = np.tile(np.arange(length), (batch, 1))
    real = everywhere < case.lengths_B[:, None]
    types = (everywhere * 2 >= case.lengths_B[:, None]).astype(np.int64)
    outputs = backend.forward(case.ids_BS, types, real, everywhere)
    return {
        name: value[real] if name in ("last_hidden_state", "mlm_logits") else value
        for name, value in outputs.items()
    }


def row_of(case: str, output: str, ours: np.ndarray, theirs: np.ndarray, bound: float) -> dict[str, Any]:
    """One line of the report."""
    error = np.abs(
        ours - theirs
    )  # fp32: 1,024 positions of GPT-2's vocabulary are 200 MB; near values subtract exactly
    scale = float(np.maximum(1.0, np.abs(ours).max()))  # NaN stays NaN, and infinity is no bound
    row: dict[str, Any] = {"case": case, "output": output, "scale": scale}
    row |= {"max_abs": float(error.max()), "mean_abs": float(error.mean(dtype=np.float64))}
    row["passed"] = bool(error.max() <= bound * scale < np.inf)  # false for NaN
    if "logits" in output:
        row["top1_agreement"] = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
        one_tie = 1 - 1 / len(ours)
        row["passed"] = row["passed"] and row["top1_agreement"] >= min(TOP1_BOUND, one_tie)
    return row


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of an output's lines (the mean for the mean error)."""
    summary = {
        "max_abs": float(np.max([row["max_abs"] for row in rows])),
        "mean_abs": float(np.mean([row["mean_abs"] for row in rows])),
        "scale": max(row["scale"] for row in rows),
        "passed": all(row["passed"] for row in rows),
    }
    if "top1_agreement" in rows[0]:
        summary["top1_agreement"] = min(row["top1_agreement"] for row in rows)
    return summary


def greedy_agreement(reference: CausalBackend, candidate: CausalBackend) -> tuple[int, int]:
    """How many greedy tokens are equal before the first difference, and how many were compared."""
    prompt = np.arange(min(4, reference.context - 1)) % reference.vocab_size
    asked = min(GREEDY_TOKENS, reference.context - len(prompt))
    answers = []
    for backend in (reference, candidate):
        request = Request(prompt, asked)
        answers.append(
            [piece.token.id for _, piece in generate(backend, lambda ids: "", [request]) if piece.token]
        )
    same = next((i for i, (a, b) in enumerate(zip(*answers)) if a != b), asked)
    return same, asked


def require(report: dict[str, Any], what: str) -> None:
    """Raise Refused when a report did not pass, naming the first line above its bound."""
    if report["passed"]:
        return
    bad = next(row for row in report["cases"] if not row["passed"])
    where = f"{bad['output']}, case {bad['case']}"
    if not np.isfinite(bad["scale"]):
        fix = "export an earlier checkpoint; metrics.jsonl of its run says where the loss left the finite numbers"
        raise Refused("the torch model itself gives numbers that are not finite", where=where, fix=fix)
    numbers = f"largest error {bad['max_abs']:.3g} > {report['bound']:g} x {bad['scale']:.3g}"
    if "top1_agreement" in bad:
        numbers += f", top-1 agreement {bad['top1_agreement']:.2%}"
    raise Refused(
        f"{what} does not compute what the torch model computes",
        where=where,
        why=numbers,
        fix="nothing was written; report this with the model's model.json",
    )
