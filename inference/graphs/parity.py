"""Does an exported model compute what the torch model computes? The report that every export ends with.

Both are driven through the same protocol over a sweep of shapes: length 1, odd lengths, the whole context, ragged
batches, prompts in pieces, decoding on ragged pasts. An output passes when its largest error is at most a bound times
the scale of the reference. Logits are compared in pieces of `PIECE_NUMBERS`, whatever the vocabulary and the length.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core import backend as protocol
from ...core.artifact import Input
from ...core.backend import CausalBackend, EncoderBackend, Ids, Span
from ...core.errors import Refused
from ...models.config import GPTConfig
from ..runtimes.source import Loaded
from ..runtimes.torch_backend import run_module
from .graph_options import Pooling

GREEDY_TOKENS = 128
PIECE_NUMBERS = 1 << 23  # logits compared at a time: 32 MiB of each side
AT_ONCE_TOKENS = 1024  # longer prompts are read in pieces only: attention over 8,192 tokens at once takes GBs

Outputs = dict[str, np.ndarray]
Pair = tuple[str, np.ndarray, np.ndarray]  # an output's name, and what both models say
Adapt = Callable[[Outputs, np.ndarray], Outputs]  # given the positions asked for too
Score = Callable[[Loaded], dict[str, float]]


@dataclass(frozen=True)
class Bounds:
    """What an export may differ by; the last of a case, `kl`, `contested` and `score` on real text."""

    error: float  # as a share of the output's scale
    top1: float  # agreement of the logits
    kl: float  # mean divergence in nats
    contested: float  # agreement where the reference is right with a probability below 0.9
    score: float  # how much a task's score may fall
    sweep_kl: float = np.inf  # mean divergence of the logits of each case


# fp32 rounds at 6e-8; the same sums of 10^3 to 10^4 terms in another order differ by about 1e-6 of their
# scale after tens of layers. A wrong weight, mask or position shows at 1e-2 and above: 1e-4 is a hundred
# times from both. fp16 rounds at 5e-4, so 3e-2 is the same sixty roundings. Rounded weights change every
# output by per cents, more so on the random ids of the sweep: there the sweep is for shapes, real text judges.
BOUNDS = {
    "fp32": Bounds(error=1e-4, top1=0.99, kl=1e-6, contested=0.9999, score=0.001),
    "fp16": Bounds(error=3e-2, top1=0.9, kl=1e-4, contested=0.999, score=0.005),
    "bf16": Bounds(error=0.2, top1=0.8, kl=3e-3, contested=0.98, score=0.005),  # rounds at 4e-3
    "int8": Bounds(error=0.5, top1=0.0, kl=0.01, contested=0.98, score=0.01),
    "int4": Bounds(error=1.0, top1=0.0, kl=0.05, contested=0.95, score=0.02),
}


def with_experts(bounds: Bounds, config: Any) -> Bounds:
    """Where products round, near ties of a router fall either way: of experts the divergence judges."""
    if not getattr(config, "experts", 0) or bounds.error <= BOUNDS["fp32"].error:
        return bounds
    return dataclasses.replace(
        bounds, error=1.0, sweep_kl=1e-2 if bounds.sweep_kl == np.inf else bounds.sweep_kl
    )


@dataclass(frozen=True)
class Case:
    """One shape of the sweep."""

    name: str
    ids_BS: np.ndarray
    lengths_B: np.ndarray  # real tokens per row; the rest is padding


def sweep(vocab_size: int, context: int, limits: protocol.Limits = protocol.ALL) -> list[Case]:
    """Random ids in the shapes that break exports; nothing is longer than the context, or beyond the limits."""
    rng = np.random.default_rng(0)
    cases = []
    context = min(context, limits.tokens or context)
    for batch, length in ((1, 1), (1, 2), (1, 7), (2, 16), (3, 33), (1, context), (5, min(context, 65))):
        batch, length = min(batch, limits.rows or batch), min(length, context)
        ids = rng.integers(0, vocab_size, (batch, length))
        cases.append(Case(f"{batch} x {length}", ids, np.full(batch, length)))
        if batch > 1:
            ragged = rng.integers(1, length + 1, batch)
            ragged[0] = length
            cases.append(Case(f"{batch} x {length} ragged", ids, ragged))
    return cases


def compare(
    reference: Loaded, candidate: Loaded, bounds: Bounds = BOUNDS["fp32"], cases: list[Case] | None = None
) -> dict[str, Any]:
    """The parity report: per case (None: `sweep`) and output, and over all of them: whether every bound holds."""
    rows, backends = [], (reference.backend, candidate.backend)
    outputs: Callable[[Any, Case], Iterator[Pair]] = _causal_outputs if reference.causal else _encoder_outputs
    for case in cases or sweep(reference.config.vocab_size, reference.config.sequence_length):
        tallies: dict[str, Tally] = {}
        for name, ours, theirs in outputs(backends, case):
            tallies.setdefault(name, Tally("logits" in name)).add(ours, theirs)
        rows += [tally.row(case.name, name, bounds) for name, tally in tallies.items()]
    names = dict.fromkeys(row["output"] for row in rows)
    report = {
        "bound": bounds.error,
        "bound_of": "the reference's largest absolute value, at least 1",
        "outputs": {name: summarise([row for row in rows if row["output"] == name]) for name in names},
        "passed": all(row["passed"] for row in rows),
    }
    if reference.causal is not None and candidate.causal is not None:
        same, asked = greedy_agreement(reference.causal, candidate.causal)
        report["greedy_tokens"] = {"equal": same, "asked": asked}
    return report | {"cases": rows}


def _causal_outputs(backends: tuple[CausalBackend, CausalBackend], case: Case) -> Iterator[Pair]:
    """Logits of real tokens: of one call, of calls with a piece each, and with ragged pasts token by token."""
    batch, length = case.ids_BS.shape
    most = max(1, PIECE_NUMBERS // (batch * backends[0].vocab_size))
    texts = [ids[:real] for ids, real in zip(case.ids_BS, case.lengths_B)]
    caches = [b.new_cache(batch) for b in backends]  # of llama.cpp the logits are its memory

    def both(starts: Sequence[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [ids[start : start + tokens] for ids, start in zip(texts, starts)]
        spans = [Span(i, starts[i], ids, min(most, len(ids))) for i, ids in enumerate(parts) if len(ids)]
        ours, theirs = (protocol.on_host(b.step(spans, cache)) for b, cache in zip(backends, caches))
        return ours, theirs

    if length <= AT_ONCE_TOKENS:
        yield "logits at once", *both([0] * batch, length)
        caches = [b.new_cache(batch) for b in backends]
    if length == 1:
        return
    step = min(most, length // 2)
    for start in range(0, length, step):
        yield "logits in pieces", *both([start] * batch, step)
    # Two single tokens of each row on top of its own past, which the pieces above have left in the caches.
    for number in range(min(2, int(case.lengths_B.min()))):
        starts = np.maximum(case.lengths_B - 2, 0) + number
        yield "logits of ragged decode", *both(starts.tolist(), 1)


def _encoder_outputs(backends: tuple[EncoderBackend, EncoderBackend], case: Case) -> Iterator[Pair]:
    """Everything that is said of a real token, and of a row."""
    batch, length = case.ids_BS.shape
    everywhere = np.tile(np.arange(length), (batch, 1))
    real = everywhere < case.lengths_B[:, None]
    types = (everywhere * 2 >= case.lengths_B[:, None]).astype(np.int64)
    most = max(1, PIECE_NUMBERS // (batch * backends[0].vocab_size))
    asked = np.unique(np.linspace(0, length - 1, min(most, length)).astype(np.int64))
    given = case.ids_BS, types, real, np.tile(asked, (batch, 1))
    ours, theirs = (backend.forward(*given) for backend in backends)

    def of_real(name: str, value: np.ndarray) -> np.ndarray:
        if name in ("start_logits", "end_logits"):
            return np.where(real, value, value[:, :1])  # one distribution over the places of each row
        if name == "mlm_logits":
            return value[real[:, asked]]
        return value[real] if value.ndim == 3 else value

    for name in ours:
        yield name, of_real(name, ours[name]), of_real(name, theirs[name])


class Tally:
    """Errors of one output, added up over pieces."""

    def __init__(self, logits: bool) -> None:
        self.logits = logits
        self.max_abs = self.scale = self.total = self.kl = 0.0
        self.numbers = self.rows = self.agreeing = 0

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """A piece: rows of the reference and of the candidate."""
        error = ours - theirs  # fp32 is enough: near values subtract exactly
        np.abs(error, out=error)
        self.max_abs = float(np.maximum(self.max_abs, error.max()))  # NaN stays NaN
        self.scale = float(np.max([self.scale, -ours.min(), ours.max()]))
        self.total += float(error.sum(dtype=np.float64))
        self.numbers += error.size
        self.rows += len(ours)
        del error
        if self.logits:
            self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            if ours.ndim == 2 and ours.shape[-1] > 1:
                self.kl += float(protocol.divergence(ours, theirs).sum(dtype=np.float64))

    def errors(self) -> dict[str, float]:
        """Largest and mean error, and the largest value of the reference."""
        return {"scale": self.scale, "max_abs": self.max_abs, "mean_abs": self.total / self.numbers}

    def row(self, case: str, output: str, bounds: Bounds) -> dict[str, Any]:
        scale = float(np.maximum(1.0, self.scale))  # infinity is no bound
        row: dict[str, Any] = {"case": case, "output": output} | self.errors() | {"scale": scale}
        row["passed"] = bool(self.max_abs <= bounds.error * scale < np.inf)  # false for NaN
        if self.logits:
            row["top1_agreement"] = self.agreeing / self.rows
            row["kl"] = self.kl / self.rows
            one_tie = self.rows - self.agreeing <= 1  # not as a share: 6/7 < 1 - 1/7 in floating point
            row["passed"] &= one_tie or row["top1_agreement"] >= bounds.top1
            row["passed"] &= row["kl"] <= bounds.sweep_kl
        return row


WORST: dict[str, Any] = dict.fromkeys(("max_abs", "mean_abs", "kl", "scale"), np.max)  # of NaN it is NaN
WORST |= dict.fromkeys(("passed", "top1_agreement"), np.min)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of an output's lines."""
    return {key: of([row[key] for row in rows]).item() for key, of in WORST.items() if key in rows[0]}


def greedy_agreement(reference: CausalBackend, candidate: CausalBackend) -> tuple[int, int]:
    """How many greedy tokens are equal before the first difference, and how many would have been compared."""
    backends, past = (reference, candidate), 0
    ids = np.arange(min(4, reference.context - 1)) % reference.vocab_size
    asked = min(GREEDY_TOKENS, reference.context - len(ids))
    caches = [backend.new_cache(1) for backend in backends]
    for same in range(asked):
        chosen = [int(b.step([Span(0, past, ids)], cache)[0].argmax()) for b, cache in zip(backends, caches)]
        if chosen[0] != chosen[1]:
            return same, asked
        past, ids = past + len(ids), np.array(chosen[:1])
    return asked, asked


def compare_scores(reference: Loaded, candidate: Loaded, score: Score, bounds: Bounds) -> dict[str, Any]:
    """What a scorer passed in says of both models, by name, and the difference; higher scores are better."""
    ours, theirs = score(reference), score(candidate)
    differences = {name: theirs[name] - ours[name] for name in ours}
    facts = {"torch": ours, "exported": theirs, "difference": differences, "bound": bounds.score}
    return facts | {"passed": all(change >= -bounds.score for change in differences.values())}


def require(report: dict[str, Any], what: str, bad_node: Callable[[], str] = lambda: "") -> None:
    """Raise Refused, by the first line above a bound, if a report did not pass; `bad_node` says where a NaN begins."""
    scores, text = report.get("scores"), report.get("text")
    if scores and not scores["passed"]:
        name, change = min(scores["difference"].items(), key=lambda item: item[1])
        before, after = scores["torch"][name], scores["exported"][name]
        why = f"{before:.4f} became {after:.4f}: {change:.4f}, the bound is -{scores['bound']:g}"
        fix = "choose a higher precision"
        raise Refused(f"{what} scores lower than the torch model", where=name, why=why, fix=fix)
    if text and not text["passed"]:
        why = f"mean KL {text['kl']:.2g} nats (bound {text['kl_bound']:g})"
        if text["contested"] is not None:
            why += ", agreement where the torch model is right with a probability below 0.9: "
            why += f"{text['contested']:.2%} (bound {text['contested_bound']:.2%})"
        where = f"{text['tokens']:,} tokens of {text['source']}"
        fix = "choose a higher precision, or calibrate on text that is nearer to the model's own"
        what += " says other things than the torch model on real text"
        raise Refused(what, where=where, why=why, fix=fix)
    if report["passed"]:
        return
    bad = next(row for row in report["cases"] if not row["passed"])
    where = f"{bad['output']}, case {bad['case']}"
    if not np.isfinite(bad["scale"]):
        fix = "export an earlier checkpoint; metrics.jsonl of its run says where the loss left the finite numbers"
        raise Refused("the torch model itself gives numbers that are not finite", where=where, fix=fix)
    if not np.isfinite(bad["max_abs"]):
        fix = "export with --precision fp32: its numbers do not overflow"
        raise Refused(f"{what} gives numbers that are not finite", where=where, why=bad_node(), fix=fix)
    numbers = f"largest error {bad['max_abs']:.3g} (bound {report['bound']:g} x {bad['scale']:.3g})"
    if "top1_agreement" in bad:
        numbers += f", top-1 agreement {bad['top1_agreement']:.2%}, mean KL {bad['kl']:.3g} nats"
    fix = "nothing was written; report this with the model's model.json"
    raise Refused(f"{what} does not compute what the torch model computes", where=where, why=numbers, fix=fix)


def reference_of(model: Any, tokenizer: Any, source: Input, pooling: Pooling = "mean") -> Loaded:
    """The torch model in float32 behind the protocol of its family; embeddings are pooled as the export's."""
    loaded = run_module(model.float(), tokenizer, source)
    if loaded.encoder is None or pooling == "mean":
        return loaded

    def pooled(outputs: Outputs, ask_BN: np.ndarray) -> Outputs:
        vector = outputs["cls_embedding" if pooling.startswith("cls") else "sentence_embedding"]
        if pooling.endswith("normalised"):
            vector = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), 1e-12)
        return outputs | {"sentence_embedding": vector}

    return dataclasses.replace(loaded, backend=Adapted(loaded.encoder, pooled))


def at_asked_positions(outputs: Outputs, ask_BN: np.ndarray) -> Outputs:
    """What a pretraining BERT's graph under optimum's names gives, whose logits are of every position."""
    outputs = dict(outputs)
    return outputs | {"mlm_logits": np.take_along_axis(outputs.pop("logits"), ask_BN[..., None], 1)}


class Adapted(protocol.OneCall):
    """An encoder whose outputs `adapt` brings onto other terms. `one_type`: all tokens are of the first type."""

    def __init__(self, encoder: EncoderBackend, adapt: Adapt, one_type: bool = False) -> None:
        self.name, self.vocab_size, self.context = encoder.name, encoder.vocab_size, encoder.context
        self.device, self.dtype = encoder.device, encoder.dtype
        self._encoder, self._adapt, self._one_type = encoder, adapt, one_type

    def forward(self, ids_BS: Ids, types_BS: Ids, mask_BS: Ids, ask_BN: Ids, want: Any = None) -> Outputs:
        types_BS = np.zeros_like(types_BS) if self._one_type else types_BS
        return self._adapt(self._encoder.forward(ids_BS, types_BS, mask_BS, ask_BN), ask_BN)


class OptimumCausal:
    """A GPT graph under optimum's names, row by row: of `core.backend.CausalBackend` enough to compare it."""

    name, device, dtype, limits = "onnxruntime", "cpu", "fp32", protocol.ALL

    def __init__(self, session: Any, config: GPTConfig) -> None:
        self.session = session
        self.vocab_size, self.context = config.vocab_size, config.sequence_length
        pasts = [given for given in session.get_inputs() if given.name.startswith("past_key_values.")]
        none = np.zeros((1, config.key_value_heads, 0, config.head_size))
        none = none.astype(np.float16 if "16" in pasts[0].type else np.float32)
        self._empty = dict.fromkeys((given.name for given in pasts), none)

    def new_cache(self, rows: int) -> list[dict[str, np.ndarray]]:
        return [dict(self._empty) for _ in range(rows)]

    def step(self, spans: Sequence[Span], cache: list[dict[str, np.ndarray]]) -> np.ndarray:
        found = []
        names = [output.name for output in self.session.get_outputs()]
        for span in spans:
            kept, new = cache[span.row], len(span.ids)
            feeds = {name: value[:, :, : span.past] for name, value in kept.items()}
            feeds["input_ids"] = span.ids[None]
            feeds["position_ids"] = (span.past + np.arange(new))[None]
            feeds["attention_mask"] = np.ones((1, span.past + new), np.int64)
            values = dict(zip(names, self.session.run(names, feeds)))
            found.append(values["logits"][0, new - span.asked :])
            kept |= {name: values[name.replace("past_key_values", "present")] for name in kept}
        return np.concatenate(found)
