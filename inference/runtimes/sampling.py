"""How a request chooses its next tokens, and choosing those of a batch where its logits are: NumPy arrays on the CPU,
torch tensors on a GPU, by functions that both libraries have under the same names (`library`).

- Order of filters: logit bias, penalties (repetition, then frequency and presence), temperature, top-k, top-p,
  min-p; each as in transformers. Every filter is a threshold on a row's probabilities, so values are sorted but never
  indices; tokens exactly as probable as the threshold stay, which makes ties independent of their order.
- Each request draws from its own generator, one number a token, on the host: what it gets does not depend on
  its neighbours. The draw inverts the cumulated weights of its row.

Letters: B rows, V vocabulary, R those rows that need a step, N positions, K most probable tokens.
"""

import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from ...core.backend import Array, library, log_sum
from ...core.errors import WrongUse

Best = tuple[int, float]  # a token and its log-probability
SEEDS = 1 << 63  # how many there are
LEADING = 1024  # most probable tokens to look at first: top-k gains by it, top-p over wide nuclei does not
LARGEST_BIAS = 100.0  # of a logit, as OpenAI's API allows: beyond any difference that a model makes


class Sampling(msgspec.Struct, frozen=True):
    """How a request chooses tokens; the default values change nothing."""

    temperature: float = 1.0  # 0 = greedy: always the most probable token
    top_k: int = 0  # keep the k most probable; 0 = all
    top_p: float = 1.0  # keep the most probable ones that together reach this share (Holtzman et al. 2020)
    min_p: float = 0.0  # keep those at least this share as probable as the most probable
    repetition_penalty: float = 1.0  # on logits of all tokens so far, prompt included (Keskar et al. 2019)
    seed: int | None = None  # None = a new one every time
    frequency_penalty: float = 0.0  # taken from a token's logit for each time that the answer holds it
    presence_penalty: float = 0.0  # taken once from the logit of every token that the answer holds
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature, 0.0, 100.0),
            "top_k": (self.top_k, 0, 2**31),
            "top_p": (self.top_p, 1e-6, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100.0),
            "seed": (self.seed or 0, 0, SEEDS - 1),
            "frequency_penalty": (self.frequency_penalty, -2.0, 2.0),
            "presence_penalty": (self.presence_penalty, -2.0, 2.0),
        }
        for token_id, bias in self.logit_bias:
            ranges[f"logit_bias[{token_id}]"] = (bias, -LARGEST_BIAS, LARGEST_BIAS)
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # also refuses NaN
                why = f"{value} is not between {low:g} and {high:g}"
                raise WrongUse(f"{name} is out of range", where=name, why=why)

    @property
    def counts_tokens(self) -> bool:
        """Whether a choice depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


GREEDY = Sampling(temperature=0.0)


def beside(place: Array | str, values: np.ndarray) -> Array:
    """Values of the host where an array is, or the logits of a backend on this device. NumPy calls its own "cpu"."""
    device = place if isinstance(place, str) else place.device
    return values if device == "cpu" else sys.modules["torch"].from_numpy(values).to(device)


def copy_of(array: Array) -> Array:
    """The same numbers in memory of their own."""
    return library(array).asarray(array, copy=True)


class Chooser:
    """What choosing needs to know of one request: its settings, its draws and the tokens it holds."""

    def __init__(self, sampling: Sampling, prompt_ids: np.ndarray, vocab_size: int, device: str) -> None:
        self.sampling = sampling
        self.draws = np.random.Generator(np.random.Philox(sampling.seed))  # one number a token
        self.allowed_V: np.ndarray | None = None  # bool, on the host: which may come next, if not all
        self.counts_V: Array = None  # int32: how often the answer holds each token
        self.seen_V: Array = None  # bool: in the prompt or the answer
        self.bias_V: Array = None
        if sampling.counts_tokens:
            seen_V = np.zeros(vocab_size, bool)
            seen_V[np.asarray(prompt_ids)[np.asarray(prompt_ids) < vocab_size]] = True
            self.counts_V = beside(device, np.zeros(vocab_size, np.int32))
            self.seen_V = beside(device, seen_V)
        if known := {i: bias for i, bias in sampling.logit_bias if 0 <= i < vocab_size}:
            bias_V = np.zeros(vocab_size, np.float32)
            bias_V[[*known]] = [*known.values()]
            self.bias_V = beside(device, bias_V)

    def accept(self, token_id: int) -> None:
        """Note a token of the answer."""
        if self.counts_V is not None:
            self.counts_V[token_id] += 1
            self.seen_V[token_id] = True


def choose(logits_BV: Array, choosers: Sequence[Chooser]) -> Array:
    """The next token id of every row, int64 (B,), beside the logits, which stay as they are."""
    logits = penalised(logits_BV, choosers)
    ids_B = logits.argmax(1)
    drawn = [row for row, chooser in enumerate(choosers) if chooser.sampling.temperature > 0]
    if not drawn:
        return ids_B
    everyone = len(drawn) == len(choosers)
    rows = beside(logits, np.array(drawn))
    weights = filtered(logits if everyone else logits[rows], [choosers[row].sampling for row in drawn])
    uniform = np.array([choosers[row].draws.random() for row in drawn], np.float32)
    ids_B[rows] = invert(weights, beside(logits, uniform))
    return ids_B


def penalised(logits_BV: Array, choosers: Sequence[Chooser]) -> Array:
    """Logits with what a request allows, its bias and its penalties; a copy when anything changes."""
    copied, where = logits_BV, library(logits_BV).where
    for row, chooser in enumerate(choosers):
        if chooser.allowed_V is None and chooser.bias_V is None and chooser.counts_V is None:
            continue
        if copied is logits_BV:
            copied = copy_of(logits_BV)
        logits_V, sampling = copied[row], chooser.sampling
        if chooser.bias_V is not None:
            logits_V += chooser.bias_V
        if chooser.seen_V is not None and sampling.repetition_penalty != 1:
            by = sampling.repetition_penalty
            changed = where(logits_V > 0, logits_V / by, logits_V * by)
            logits_V[:] = where(chooser.seen_V, changed, logits_V)
        if chooser.counts_V is not None and (sampling.frequency_penalty or sampling.presence_penalty):
            logits_V -= chooser.counts_V * sampling.frequency_penalty
            logits_V -= (chooser.counts_V > 0) * sampling.presence_penalty
        if chooser.allowed_V is not None:
            logits_V[beside(logits_V, ~chooser.allowed_V)] = -np.inf
    return copied


def filtered(logits_RV: Array, settings: Sequence[Sampling]) -> Array:
    """Weights (R, V), not normalised, the largest of a row 1, zero for every token that a filter removed. float32
    throughout: its rounding moves a boundary by about 1e-5 of the mass.
    """
    xp = library(logits_RV)
    by_R2 = beside(logits_RV, np.array([[max(s.temperature, 1e-4), s.min_p] for s in settings], np.float32))
    weights = xp.exp((logits_RV - xp.amax(logits_RV, axis=1, keepdims=True)) / by_R2[:, :1])
    limited = [row for row, s in enumerate(settings) if 0 < s.top_k < weights.shape[1] or s.top_p < 1]
    floor_R1 = by_R2[:, 1:]
    if limited:
        rows = beside(weights, np.array(limited))
        floors = _floors(weights[rows], [settings[row] for row in limited])
        floor_R1[rows] = xp.maximum(floor_R1[rows], floors)
    weights[weights < floor_R1] = 0.0
    return weights


def _floors(weights_RV: Array, settings: Sequence[Sampling]) -> Array:
    """The smallest weight that top-k and then top-p leave in each row, (R, 1). On a CPU the `LEADING` largest decide
    for almost every row; one whose nucleus is wider is sorted whole, as all are on a GPU.
    """
    vocab_size = weights_RV.shape[1]
    if library(weights_RV) is not np:
        return _floors_of(weights_RV.sort(dim=1).values, weights_RV, settings)[0]
    if vocab_size <= LEADING:
        return _floors_of(np.sort(weights_RV, axis=1), weights_RV, settings)[0]
    leading = np.partition(weights_RV, vocab_size - LEADING, axis=1)[:, vocab_size - LEADING :]
    floors, decided = _floors_of(np.sort(leading, axis=1), weights_RV, settings)
    if wide := [row for row, done in enumerate(decided.tolist()) if not done]:
        wide_RV = weights_RV[wide]
        floors[wide] = _floors_of(np.sort(wide_RV, axis=1), wide_RV, [settings[row] for row in wide])[0]
    return floors


def _floors_of(sorted_RK: Array, weights_RV: Array, settings: Sequence[Sampling]) -> tuple[Array, Array]:
    """The floors (R, 1) from the K largest weights in rising order, and whether those decide each row (R,)."""
    xp, vocab_size, leading = library(sorted_RK), weights_RV.shape[1], sorted_RK.shape[1]
    rows = beside(sorted_RK, np.arange(len(sorted_RK)))
    limits = np.array([s.top_k if 0 < s.top_k <= leading else 0 for s in settings])
    limited_R1 = beside(sorted_RK, limits[:, None] > 0)
    first_R = beside(sorted_RK, np.where(limits > 0, leading - limits, 0))
    kept = xp.where(limited_R1 & (sorted_RK < sorted_RK[rows, first_R][:, None]), 0.0, sorted_RK)
    # The mass of weights that are not among the K; none of it is kept when top-k limits the row.
    rest_R1 = (weights_RV.sum(1) - sorted_RK.sum(1))[:, None] * ~limited_R1
    rest_R1 = rest_R1 * (rest_R1 > 0) if leading < vocab_size else rest_R1 * 0
    # A token leaves the nucleus when it and all less probable ones hold at most 1 - top_p of the mass.
    from_below = cumulated(kept) + rest_R1
    outside_R1 = beside(kept, np.array([[1 - s.top_p] for s in settings], np.float32)) * from_below[:, -1:]
    first_in = xp.maximum((from_below <= outside_R1).sum(1), first_R).clip(None, leading - 1)
    beyond = beside(kept, np.array([leading < min(s.top_k, vocab_size) for s in settings]))
    return sorted_RK[rows, first_in][:, None], (rest_R1 <= outside_R1)[:, 0] & ~beyond


def cumulated(weights_RV: Array) -> Array:
    """Sums from the first token of a row on. NumPy adds one by one: in float64, or 50,000 sums would drift."""
    if library(weights_RV) is np:
        return np.cumsum(weights_RV, axis=1, dtype=np.float64)
    return weights_RV.cumsum(1)


def invert(weights_RV: Array, uniform_R: Array) -> Array:
    """Draw by inverting the cumulated weights at `uniform` in [0, 1): never a token of weight zero."""
    sums_RV = cumulated(weights_RV)
    ids = (sums_RV <= uniform_R[:, None] * sums_RV[:, -1:]).sum(1)
    return library(ids).minimum(ids, (sums_RV < sums_RV[:, -1:]).sum(1))  # rounding may reach the end


def probabilities(logits_NV: Array, ids_N: Array, most: int) -> list[tuple[float, tuple[Best, ...]]]:
    """Log-probabilities before any filter: of each given token, and of the K most probable; in one transfer."""
    xp, k = library(logits_NV), min(most, logits_NV.shape[1])
    norm_N1 = log_sum(logits_NV)
    of_N1 = logits_NV[beside(logits_NV, np.arange(len(logits_NV))), ids_N][:, None] - norm_N1
    if xp is np:
        found = np.argpartition(-logits_NV, k - 1, axis=1)[:, :k] if k else np.zeros((len(logits_NV), 0), int)
        values = np.take_along_axis(logits_NV, found, 1)
        order = np.lexsort((found, -values), axis=1)  # the first of equally probable ones first
        top_ids, top = (np.take_along_axis(part, order, 1) for part in (found, values - norm_N1))
        host = np.concatenate((of_N1, top, top_ids), axis=1)
    else:
        best = logits_NV.topk(k, dim=1)
        host = xp.cat((of_N1, best.values - norm_N1, best.indices), dim=1).cpu()
    # ids are below 2^24: float32 has them
    return [(line[0], tuple(zip(map(int, line[1 + k :]), line[1 : 1 + k]))) for line in host.tolist()]
