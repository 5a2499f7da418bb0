"""Attention to a part of the sequence: sliding windows and block-sparse patterns that cost what they look at.

Of a config with `attention_window`; it replaces `Attention.attend` from outside. For each block of queries only the
blocks of keys that hold a visible token are gathered, and one fused kernel runs for all query blocks that have as many;
inside a gathered block a mask keeps the pattern exact to the token. Documents, padding and a relative bias come as the
mask that the models make anyway, and only its needed parts are read. A plain window is not gathered: on CUDA it is one
call of torch's variable-length kernel, on a CPU a walk along the diagonal (`attention_cpu.py`).

| kind | a token at i sees a token at j when (causal: and j <= i) |
|---|---|
| sliding | they are less than `window` apart, or either is in the first `global_blocks` blocks, or i's block drew j's |
| fixed | both are in the same stretch of `window` tokens, or j is in the last `global_blocks` blocks of a stretch |

Sources: sliding, Beltagy et al. 2020 (Longformer) and, with `random_blocks`, Zaheer et al. 2020 (BigBird);
fixed, Child et al. 2019 (Sparse Transformer, section 4.3). Each block of queries draws its random blocks from
those beyond window and global ones, one from each of as many equal stretches; other ones in every layer, as
in BigBird, but the same for all heads, which one kernel serves. A decoder draws from the past alone, so its
draws do not change as the text grows; an encoder's depend on the length.

Cost of gathering: with B blocks of keys to a block of queries, time and the memory of gathered keys and values are B
blocks a query block instead of S / block; a smaller block follows a window closer and gathers more copies,
and 128 to 256 is a good compromise for windows of 512. Where memory is short the copies need not be kept for
backward: `recompute = "selective"`.

Shape letters: B batch, S query positions, T key positions, A heads, G key-value heads, D head width; N
blocks, C tokens of a block, R query blocks computed together, M key blocks that each of them sees.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Documents, Mask, knows_windows, rows_of, scaled_dot_product
from .config import TransformerConfig
from .layers import Block
from .transformer import AttentionPattern


def block_table(pattern: AttentionPattern, length: int, causal: bool, layer: int = 0) -> Tensor:
    """(N, N) bool: which blocks of keys hold anything that a block of queries sees. The corners of a pair decide: all
    bounds but the window's are at block edges, and the tokens of two blocks that are nearest or in order are corners.
    """
    first = torch.arange(-(-length // pattern.block)) * pattern.block
    corners = torch.stack((first, first + pattern.block - 1))  # (2, N)
    seen = pattern.sees(corners[:, None, :, None], corners[None, :, None, :], causal, length, layer)
    return seen.any(0).any(0)


@dataclass(frozen=True)
class _Group:
    """Query blocks that see the same number of key blocks."""

    rows_R: Tensor
    keys_RM: Tensor
    visible_RCK: Tensor  # (R, C, M C) bool
    itself_RCK: Tensor


def _rows_by_count(
    pattern: AttentionPattern, length: int, causal: bool, layer: int
) -> list[tuple[list[int], list[list[int]]]]:
    """Query blocks that see as many key blocks, and which: numbers, which a compiler takes as constants."""
    seen = [row.nonzero()[:, 0].tolist() for row in block_table(pattern, length, causal, layer)]
    grouped: dict[int, tuple[list[int], list[list[int]]]] = {}
    for row, keys in enumerate(seen):
        rows, all_keys = grouped.setdefault(len(keys), ([], []))
        rows.append(row)
        all_keys.append(keys)
    return list(grouped.values())


# What torch.compiler.assume_constant_result does; calling it here would import the compiler with every GPT:
# 70 MB and a second.
_rows_by_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _make_groups(
    pattern: AttentionPattern, length: int, causal: bool, layer: int, device: torch.device
) -> tuple[list[_Group], Tensor]:
    """The groups of a sequence, and where each query block's result stands among theirs put in a row."""
    inside = torch.arange(pattern.block, device=device)
    groups = []
    for row_numbers, key_numbers in _rows_by_count(pattern, length, causal, layer):
        rows, keys = torch.tensor(row_numbers, device=device), torch.tensor(key_numbers, device=device)
        query_positions = rows[:, None] * pattern.block + inside
        key_positions = (keys[:, :, None] * pattern.block + inside).flatten(1)
        visible = pattern.sees(query_positions[:, :, None], key_positions[:, None, :], causal, length, layer)
        itself = query_positions[:, :, None] == key_positions[:, None, :]
        groups.append(_Group(rows, keys, visible & (key_positions < length)[:, None, :], itself))
    return groups, torch.cat([group.rows_R for group in groups]).argsort()


# An entry for each layer when blocks are drawn at random: 128 layers at the lengths of training and evaluation.
_kept_groups = functools.lru_cache(maxsize=256)(_make_groups)


def make_attend(pattern: AttentionPattern, causal: bool, layer: int = 0) -> Callable[..., Tensor]:
    """What replaces `Attention.attend` in a layer of a causal or a bidirectional model."""
    assert not pattern.validate(), pattern.validate()

    def attend(
        q_BASD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        dropout: float = 0.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        length = q_BASD.shape[2]
        if isinstance(mask, Documents) and mask.parted:
            return mask.attend(q_BASD, k_BGTD, v_BGTD, causal, dropout, pattern.window, sinks)
        along = pattern.is_band and not isinstance(mask, Tensor) and knows_windows(v_BGTD, dropout)
        if softcap or (sinks is not None and (torch.compiler.is_compiling() or not along)):
            places = torch.arange(length, device=q_BASD.device)
            seen = pattern.sees(places[:, None], places, causal, length, layer)
            mask = mask.mask(len(q_BASD), length, is_causal) if isinstance(mask, Documents) else mask
            mask = seen if mask is None else mask & seen
            return scaled_dot_product(q_BASD, k_BGTD, v_BGTD, mask=mask, softcap=softcap, sinks=sinks)
        near = pattern.kind == "sliding" and length <= pattern.window
        if near and sinks is None:  # the dense kernel
            return scaled_dot_product(q_BASD, k_BGTD, v_BGTD, mask=mask, is_causal=is_causal, dropout=dropout)
        if along:
            runs = mask if isinstance(mask, Documents) else rows_of(q_BASD)
            return runs.attend(q_BASD, k_BGTD, v_BGTD, causal, dropout, pattern.window, sinks)
        return _attend_blocks(pattern, causal, layer, (q_BASD, k_BGTD, v_BGTD), mask, dropout)

    return attend


def _attend_blocks(
    pattern: AttentionPattern,
    causal: bool,
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    dropout: float,
) -> Tensor:
    """Attention group by group; (B, A, S, D)."""
    size, length = pattern.block, qkv[0].shape[2]
    make = _make_groups if torch.compiler.is_compiling() else _kept_groups  # compiled, they are constants
    groups, places = make(pattern, length, causal, layer, qkv[0].device)
    missing = -length % size
    q, k, v = (_blocks(x, size, missing) for x in qkv)  # each (B, N, C, heads, D)
    if isinstance(mask, Documents):
        mask = F.pad(mask.ids(len(q), length), (0, missing), value=-1)
    elif mask is not None:
        mask = F.pad(mask, (0, missing, 0, missing if mask.shape[2] > 1 else 0))
    results = []
    for group in groups:
        queries = q.index_select(1, group.rows_R).flatten(0, 1).transpose(1, 2)  # (B R, A, C, D)
        gathered = (x.index_select(1, group.keys_RM.flatten()) for x in (k, v))
        split = (x.unflatten(1, group.keys_RM.shape) for x in gathered)
        keys, values = (x.flatten(2, 3).flatten(0, 1).transpose(1, 2) for x in split)  # (B R, G, M C, D)
        visible = _group_mask(group, mask, len(q))
        part = scaled_dot_product(queries, keys, values, mask=visible, dropout=dropout)
        results.append(part.transpose(1, 2).unflatten(0, (len(q), -1)))  # (B, R, C, A, D)
    whole = torch.cat(results, 1).index_select(1, places) if len(results) > 1 else results[0]
    return whole.flatten(1, 2)[:, :length].transpose(1, 2)


def _blocks(x_BASD: Tensor, size: int, missing: int) -> Tensor:
    """(B, heads, S, D) -> (B, N, C, heads, D); zeros fill up the last block."""
    x_BSAD = x_BASD.transpose(1, 2)
    if missing:
        x_BSAD = F.pad(x_BSAD, (0, 0, 0, 0, 0, missing))
    return x_BSAD.unflatten(1, (-1, size))


def _group_mask(group: _Group, mask: Tensor | None, batch: int) -> Tensor:
    """The pattern and the model's own mask, or the numbers of the documents (B, S), for one group: bool or a bias,
    (B R, 1 or A, C, M C). A query that would see nothing (a padded place) sees itself: a softmax over nothing is NaN,
    and would reach the others through the next layer.
    """
    visible_RCK = group.visible_RCK
    size = visible_RCK.shape[1]
    if mask is None:
        return visible_RCK.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    if mask.dim() == 2:
        blocks = mask.unflatten(1, (-1, size))  # (B, N, C)
        keys = blocks[:, group.keys_RM].flatten(2)  # (B, R, M C)
        taken = (blocks[:, group.rows_R][..., None] == keys[:, :, None])[:, :, None]  # (B, R, 1, C, M C)
    else:
        square = mask.expand(-1, -1, mask.shape[3], -1)
        blocks = square.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (b, a, N, C, N, C)
        taken = blocks[:, :, group.rows_R[:, None], :, group.keys_RM]  # (R, M, b, a, C, C)
        taken = taken.permute(2, 0, 3, 4, 1, 5).flatten(4)  # (b, R, a, C, M C)
    visible = visible_RCK[None, :, None]
    seen = visible & (taken if taken.dtype == torch.bool else taken > float("-inf"))
    seen = seen | (group.itself_RCK[None, :, None] & ~seen.any(-1, keepdim=True))
    if taken.dtype != torch.bool:
        seen = taken.masked_fill(taken == float("-inf"), 0.0).masked_fill(~seen, float("-inf"))
    return seen.expand(batch, *seen.shape[1:]).flatten(0, 1)


def windowed(config: TransformerConfig, blocks: nn.ModuleDict) -> dict[str, nn.Module]:
    """Those of the blocks that see a part of the sequence."""
    return {layer: block for layer, block in blocks.items() if config.kind_of(int(layer)) == "l"}


def apply_pattern(blocks: Mapping[str, nn.Module], pattern: AttentionPattern, causal: bool) -> None:
    """Let blocks, by their layer, attend by the pattern: their weights, names and inputs stay what they are."""
    for layer, block in blocks.items():
        number = int(layer) if pattern.random_blocks else 0
        cast(Block, block).attention.attend = make_attend(pattern, causal, number)
