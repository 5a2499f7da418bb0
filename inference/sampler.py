"""Choosing the next tokens of a batch where its logits are: on the CPU or on a GPU.

- Order of filters: logit bias, penalties (repetition, then frequency and presence), temperature, top-k, top-p,
  min-p; each as in transformers. Every filter is a threshold on a row's probabilities (the k-th largest, the
  smallest of the nucleus, a share of the largest), so values are sorted but never indices; tokens exactly as
  probable as the threshold stay, which makes ties independent of their order.
- Each request draws from its own generator, one number a token, on the host: what it gets does not depend on
  its neighbours. The draw inverts the cumulated weights of its row.
- Greedy rows cost one arg-max; rows without top-k and top-p are not sorted.

Letters: B rows, V vocabulary, R those rows that need a step, N positions, K most probable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .sampling import Sampling

LEADING = (
    1024  # most probable tokens that are looked at first: top-k gains by it, top-p over wide nuclei does not
)


class Chooser:
    """What choosing needs to know of one request: its settings, its draws and the tokens it holds.

    `allowed_V`, when somebody sets it, says which tokens may come next (bool, on the host or the device).
    """

    def __init__(self, sampling: Sampling, prompt_ids: np.ndarray, vocab_size: int, device: str) -> None:
        self.sampling, self._device = sampling, device
        self.draws = sampling.generator()
        self.allowed_V: Tensor | np.ndarray | None = None
        self.counts_V: Tensor | None = None  # int32: how often the answer holds each token
        self.seen_V: Tensor | None = None  # bool: in the prompt or the answer
        self.bias_V: Tensor | None = None
        if sampling.counts_tokens:
            known = torch.from_numpy(np.asarray(prompt_ids)[np.asarray(prompt_ids) < vocab_size])
            self.counts_V = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self.seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen_V[known.to(device)] = True
        if pairs := [(i, bias) for i, bias in sampling.logit_bias if 0 <= i < vocab_size]:
            self.bias_V = torch.zeros(vocab_size, device=device)
            ids, values = zip(*pairs)
            self.bias_V[torch.tensor(ids, device=device)] = torch.tensor(values, device=device)

    def accept(self, token_id: int) -> None:
        """Note a token of the answer."""
        if self.counts_V is not None and self.seen_V is not None:
            self.counts_V[token_id] += 1
            self.seen_V[token_id] = True


def choose(logits_BV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """The next token id of every row, int64 (B,) on the device of the logits, which stay as they are."""
    logits = penalised(logits_BV, choosers)
    ids_B = logits.argmax(dim=1)
    drawn = [row for row, chooser in enumerate(choosers) if chooser.sampling.temperature > 0]
    if not drawn:
        return ids_B
    everyone = len(drawn) == len(choosers)
    rows = torch.tensor(drawn, device=logits.device)
    weights = filtered(logits if everyone else logits[rows], [choosers[row].sampling for row in drawn])
    uniform = torch.tensor([choosers[row].draws.random() for row in drawn], device=logits.device)
    ids = invert(weights, uniform.float())
    return ids if everyone else ids_B.index_copy(0, rows, ids)


def penalised(logits_BV: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Logits with what a request allows, its bias and its penalties; a copy when anything changes."""
    copied = logits_BV
    for row, chooser in enumerate(choosers):
        if chooser.allowed_V is None and chooser.bias_V is None and chooser.counts_V is None:
            continue
        if copied is logits_BV:
            copied = logits_BV.clone()
        logits_V, sampling = copied[row], chooser.sampling
        if chooser.bias_V is not None:
            logits_V += chooser.bias_V
        if chooser.seen_V is not None and sampling.repetition_penalty != 1:
            by = sampling.repetition_penalty
            changed = torch.where(logits_V > 0, logits_V / by, logits_V * by)
            logits_V.copy_(torch.where(chooser.seen_V, changed, logits_V))
        if chooser.counts_V is not None and (sampling.frequency_penalty or sampling.presence_penalty):
            logits_V -= chooser.counts_V * sampling.frequency_penalty
            logits_V -= (chooser.counts_V > 0) * sampling.presence_penalty
        if chooser.allowed_V is not None:
            allowed = torch.as_tensor(chooser.allowed_V, device=logits_V.device)
            logits_V.masked_fill_(~allowed, -torch.inf)
    return copied


def filtered(logits_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Weights float32 (R, V), not normalised, the largest of a row 1, zero for every token that a filter
    removed.

    float32 throughout: its rounding moves a boundary by about 1e-5 of the mass.
    """
    device = logits_RV.device
    by_R2 = torch.tensor([[max(s.temperature, 1e-4), s.min_p] for s in settings], device=device)
    weights = ((logits_RV - logits_RV.amax(dim=1, keepdim=True)) / by_R2[:, :1]).exp_()
    limited = [row for row, s in enumerate(settings) if 0 < s.top_k < weights.shape[1] or s.top_p < 1]
    floor_R1 = by_R2[:, 1:]
    if limited:
        rows = torch.tensor(limited, device=device)
        floors = _floors(weights[rows], [settings[row] for row in limited])
        floor_R1 = torch.maximum(floor_R1, torch.zeros_like(floor_R1).index_copy(0, rows, floors))
    return weights.masked_fill_(weights < floor_R1, 0.0)


def _floors(weights_RV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The smallest weight that top-k and then top-p leave in each row, (R, 1).

    On a CPU the `LEADING` largest weights decide for almost every row, and numpy selects and sorts them with
    vector instructions; a row whose nucleus is wider is sorted whole, as all are on a GPU.
    """
    vocab_size = weights_RV.shape[1]
    if weights_RV.device.type != "cpu":
        return _floors_of(weights_RV.sort(dim=1).values, weights_RV, settings)[0]
    values = weights_RV.numpy()
    if vocab_size <= LEADING:
        return _floors_of(torch.from_numpy(np.sort(values, axis=1)), weights_RV, settings)[0]
    leading = np.sort(np.partition(values, vocab_size - LEADING, axis=1)[:, vocab_size - LEADING :], axis=1)
    floors, decided = _floors_of(torch.from_numpy(leading), weights_RV, settings)
    if wide := [row for row, done in enumerate(decided.tolist()) if not done]:
        whole = torch.from_numpy(np.sort(values[wide], axis=1))
        floors[wide] = _floors_of(whole, weights_RV[wide], [settings[row] for row in wide])[0]
    return floors


def _floors_of(sorted_RK: Tensor, weights_RV: Tensor, settings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The floors (R, 1) from the K largest weights in rising order, and whether those decide each row (R,)."""
    vocab_size, leading, device = weights_RV.shape[1], sorted_RK.shape[1], weights_RV.device
    limits = [s.top_k if 0 < s.top_k <= leading else 0 for s in settings]
    limited = torch.tensor([[bool(k)] for k in limits], device=device)
    first_R1 = torch.tensor([[leading - k if k else 0] for k in limits], device=device)
    kept = sorted_RK.masked_fill(limited & (sorted_RK < sorted_RK.gather(1, first_R1)), 0.0)
    # The mass of weights that are not among the K; none of it is kept when top-k limits the row.
    rest_R1 = (weights_RV.sum(1, keepdim=True) - sorted_RK.sum(1, keepdim=True)).clamp(min=0.0)
    rest_R1 = rest_R1 * ~limited if leading < vocab_size else torch.zeros_like(rest_R1)
    # A token leaves the nucleus when it and all less probable ones hold at most 1 - top_p of the mass.
    from_below = kept.cumsum(dim=1) + rest_R1
    outside_R1 = torch.tensor([[1 - s.top_p] for s in settings], device=device) * from_below[:, -1:]
    first_in = torch.searchsorted(from_below, outside_R1, right=True)
    first_in = torch.maximum(first_in, first_R1).clamp(max=leading - 1)
    beyond = torch.tensor([leading < min(s.top_k, vocab_size) for s in settings], device=device)
    return sorted_RK.gather(1, first_in), (rest_R1 <= outside_R1)[:, 0] & ~beyond


def invert(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw by inverting the cumulated weights at `uniform` in [0, 1): never a token of weight zero."""
    cumulated = weights_RV.cumsum(dim=1)
    ids = torch.searchsorted(cumulated, uniform_R[:, None] * cumulated[:, -1:], right=True)[:, 0]
    return torch.minimum(ids, (cumulated < cumulated[:, -1:]).sum(dim=1))  # rounding may reach the end


@dataclass(frozen=True)
class Probabilities:
    """Log-probabilities of given tokens (N,) and of the K most probable ones (N, K), on the host."""

    of: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


def probabilities(logits_NV: Tensor, ids_N: Tensor, most: int) -> Probabilities:
    """The model's own log-probabilities, before any filter, one transfer for all of them."""
    norm_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    of_N1 = logits_NV.gather(1, ids_N[:, None]) - norm_N1
    top = logits_NV.topk(min(most, logits_NV.shape[1]), dim=1)
    packed = torch.cat((of_N1, top.values - norm_N1, top.indices), dim=1)  # float32: ids are below 2^24
    host = packed.cpu().numpy()
    k = top.indices.shape[1]
    return Probabilities(host[:, 0], host[:, 1 + k :].astype(np.int64), host[:, 1 : 1 + k])
