"""Log-probabilities of chosen tokens without ever holding the logits of a whole vocabulary.

The output matrix is used in pieces of `PIECE` tokens with a running maximum and sum (the online softmax), so
the logits of a piece stay in the cache: for 50,257 tokens half the time of a full log-softmax on a narrow
model, and 2 MB instead of 100. Sums and the softmax are float32 whatever the model's dtype.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..models.linear import linear

LINES = 512  # positions at a time
PIECE = {"cpu": 1024, "cuda": 16384}  # tokens of the vocabulary at a time
LINES_PER_THREAD = 16  # whole vector registers, and enough lines for the general matrix product (see tree.py)


def whole_blocks(lines: int) -> int:
    """`lines` rounded up so that every thread gets whole blocks."""
    block = LINES_PER_THREAD * torch.get_num_threads()
    return -(-lines // block) * block


def token_logprobs(
    weight_VW: Tensor,
    bias_V: Tensor | None,
    hidden_SW: Tensor,
    lines: np.ndarray,
    targets: np.ndarray,
    *,
    ranks: bool = False,
    softcap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each target id (T,) at position `lines` (T,) of `hidden`: log-probability float32, whether it is
    the arg-max (the first of equals), and with `ranks` how many tokens are more probable (else zeros).

    A position asked for several targets has its logits computed once. `softcap`: see `GPTConfig.logit_softcap`.
    """
    places, which = np.unique(lines, return_inverse=True)
    logprobs, greedy, above = (
        np.empty(len(lines), np.float32),
        np.empty(len(lines), bool),
        np.zeros(len(lines), np.int64),
    )
    order = np.argsort(which, kind="stable")
    cuts = np.searchsorted(which[order], np.arange(0, len(places) + LINES, LINES))
    for piece, (first, last) in enumerate(pairwise(cuts)):
        chunk = places[piece * LINES : (piece + 1) * LINES]
        filled = np.resize(chunk, whole_blocks(len(chunk)))  # repeats lines up to whole blocks
        asked = order[first:last]
        rows = which[asked] - piece * LINES
        hidden_NW = hidden_SW[torch.from_numpy(filled).to(hidden_SW.device)]
        part = _Chunk(weight_VW, bias_V, hidden_NW, rows, targets[asked], softcap)
        logprobs[asked], greedy[asked] = part.scores()
        if ranks:
            above[asked] = part.ranks()
    return logprobs, greedy, above


@dataclass(eq=False)
class _Chunk:
    """Up to LINES positions and the targets asked of them."""

    weight: Tensor
    bias: Tensor | None
    hidden: Tensor
    rows: np.ndarray
    targets: np.ndarray
    softcap: float

    def __post_init__(self) -> None:
        self.size = PIECE.get(self.hidden.device.type, PIECE["cpu"])
        self.starts = range(0, len(self.weight), self.size)

    def logits(self, start: int) -> Tensor:
        """(N, PIECE) float32: logits of the tokens from `start` on."""
        stop = start + self.size
        bias = None if self.bias is None else self.bias[start:stop]
        logits = linear(self.hidden, self.weight[start:stop], bias).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        device = self.hidden.device
        lines = len(self.hidden)
        highest = torch.full((lines, 1), -torch.inf, device=device)
        total = torch.zeros((lines, 1), device=device)
        maxima = torch.empty((len(self.starts), lines), device=device)
        self.chosen = torch.empty(len(self.targets), device=device)
        first_here = torch.zeros(len(self.targets), dtype=torch.bool, device=device)
        for number, start in enumerate(self.starts):
            logits = self.logits(start)
            best = logits.amax(dim=-1, keepdim=True)
            maxima[number] = best[:, 0]
            here = np.flatnonzero((self.targets >= start) & (self.targets < start + self.size))
            if len(here):
                asked = (here, self.rows[here], self.targets[here] - start)
                index, row, token = (torch.from_numpy(array).to(device) for array in asked)
                self.chosen[index] = logits[row, token]
                leads = (logits[row, token] == best[row, 0]).nonzero().flatten()
                first_here[index[leads]] = logits[row[leads]].argmax(dim=-1) == token[leads]
            lifted = torch.maximum(highest, best)
            total = total * torch.exp(highest - lifted) + logits.sub_(lifted).exp_().sum(dim=-1, keepdim=True)
            highest = lifted
        row = torch.from_numpy(self.rows).to(device)
        logprobs = self.chosen - (highest + torch.log(total))[row, 0]
        leading_piece = maxima.argmax(dim=0)[row]
        greedy = first_here & (leading_piece == torch.from_numpy(self.targets // self.size).to(device))
        return logprobs.cpu().numpy(), greedy.cpu().numpy()

    def ranks(self) -> np.ndarray:
        """How many tokens have a larger logit than each target; call after `scores`."""
        row = torch.from_numpy(self.rows).to(self.hidden.device)
        larger = [(self.logits(start)[row] > self.chosen[:, None]).sum(dim=-1) for start in self.starts]
        return torch.stack(larger).sum(dim=0).cpu().numpy()
