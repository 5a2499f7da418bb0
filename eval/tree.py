"""One question as one row: what its pairs have in common is computed once, the rest branches off.

The pairs (context, continuation) of a question become a common prefix followed by one branch a pair. A branch
sees the prefix and itself, and its positions go on where the prefix ends, so every token gets the numbers it
would get in a sequence of its own. Four choices of 20 tokens after a context of 60 cost 140 token steps
instead of 320.

Rows of a batch lie behind one another in one sequence without padding between them: matrix products and norms
see one token a line, and only attention knows where a row begins. Results are then the same whatever shares a
batch: a matrix product on the CPU gives each line the same bits however many lines there are, from 4 a thread
on (measured, MKL), so the sequence is filled up to whole blocks a thread (`logits.whole_blocks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.scorer import Question
from ..models.attention import scaled_dot_product
from ..models.transformer import AttentionPattern

ONE_CALL_TOKENS = 64  # up to this length one masked attention call beats a causal and a masked one


@dataclass(frozen=True)
class Tree:
    """A question laid out as one row of S tokens: a prefix, then branches."""

    ids: np.ndarray  # (S,) int64
    positions: np.ndarray  # (S,) int64
    prefix: int  # tokens of the common prefix
    branches: tuple[int, ...]  # tokens of each branch; none for a plain sequence
    lines: tuple[np.ndarray, ...]  # for each pair, the rows that predict its continuation, (n,) int64
    targets: tuple[np.ndarray, ...]  # for each pair, the continuation's ids, (n,) int64

    @property
    def tokens(self) -> int:
        return len(self.ids)


def plant(question: Question, window: int) -> Tree:
    """Lay out a question. Inputs are cut from the left to `window` tokens; a continuation must fit (checked
    by the caller).
    """
    wholes = [np.array(context + continuation, np.int64) for context, continuation in question.pairs]
    inputs = [whole[-(window + 1) :][:-1] for whole in wholes]
    shortest = min(map(len, inputs))
    same = np.all([ids[:shortest] == inputs[0][:shortest] for ids in inputs], axis=0)
    prefix = int(np.append(same, False).argmin())
    rests = [ids[prefix:] for ids in inputs]
    branches = tuple(len(rest) for rest in rests if len(rest))
    starts = prefix + np.concatenate([[0], np.cumsum([len(rest) for rest in rests])])
    lines = []
    for (_, continuation), ids, start in zip(question.pairs, inputs, starts):
        place = np.arange(len(ids) - len(continuation), len(ids))
        lines.append(np.where(place < prefix, place, place - prefix + start))
    return Tree(
        ids=np.concatenate([inputs[0][:prefix], *rests]),
        positions=np.concatenate([np.arange(prefix), *(prefix + np.arange(len(rest)) for rest in rests)]),
        prefix=prefix,
        branches=branches if len(branches) > 1 else (),
        lines=tuple(lines),
        targets=tuple(np.array(continuation, np.int64) for _, continuation in question.pairs),
    )


class TreeAttention:
    """Attention of a packed batch, with the signature of `Attention.attend`, in its place for one forward."""

    def __init__(
        self,
        trees: Sequence[Tree],
        device: torch.device,
        dtype: torch.dtype,
        pattern: AttentionPattern | None = None,
        layer: int = 0,
    ) -> None:
        self.calls: list[
            tuple[int, int, int, Tensor | None]
        ] = []  # lines that ask, first line seen, mask or causal
        start = 0
        for tree in trees:
            stop = start + tree.tokens
            mask = _mask(tree, device, dtype, pattern, layer)
            asked = stop if mask is None else stop - len(mask)
            if asked > start:
                self.calls.append((start, asked, start, None))
            if mask is not None:
                self.calls.append((asked, stop, start, mask))
            start = stop
        self.tokens = start
        self._made_of = trees, device, dtype, pattern

    def of_layer(self, layer: int) -> "TreeAttention":
        """That of a layer: the same for all, unless their pattern draws random blocks."""
        pattern = self._made_of[3]
        return self if pattern is None or not pattern.random_blocks else TreeAttention(*self._made_of, layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0, **_: Any) -> Tensor:
        """q (1, A, S, D), k and v (1, G, S, D) -> (1, A, S, D); lines behind the last row are zero."""
        out = q.new_empty(1, q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        out[:, :, self.tokens :] = 0
        for first, stop, seen, mask in self.calls:
            asked, given = slice(first, stop), slice(seen, stop)
            out[:, :, asked] = scaled_dot_product(
                *(q[:, :, asked], k[:, :, given], v[:, :, given]),
                mask=mask,
                is_causal=mask is None,
                softcap=softcap,
            )
        return out


def _mask(
    tree: Tree, device: torch.device, dtype: torch.dtype, pattern: AttentionPattern | None, layer: int
) -> Tensor | None:
    """What the last rows of a tree may see, (rows, S), 0 or -inf; None when the whole tree is one causal
    sequence.

    With a `pattern` all rows need a mask: who sees whom goes by the positions of the sequence that a branch
    stands for.
    """
    if not tree.branches and pattern is None:
        return None
    branch = np.repeat(np.arange(len(tree.branches) + 1), (tree.tokens - sum(tree.branches), *tree.branches))
    order = np.arange(tree.tokens)
    first = 0 if pattern is not None or tree.tokens <= ONE_CALL_TOKENS else tree.prefix
    mine = branch[first:, None]
    seen = ((branch == 0) | (branch == mine)) & (order <= order[first:, None])
    if pattern is not None:
        seen &= pattern.sees(tree.positions[first:, None], tree.positions, causal=True, layer=layer)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(torch.from_numpy(~seen).to(device), float("-inf"))
