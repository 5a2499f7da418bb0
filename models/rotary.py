"""Rotary positions (Su et al. 2021), for the layout that pairs i with i + D/2 (as Llama's weights do), and the ways in
which they are scaled to texts longer than those that were trained.

| rope_scaling | what it does to the frequencies | source |
|---|---|---|
| linear | divides all by the factor | Chen et al. 2023 |
| dynamic | raises the base once a row is longer than the trained length | NTK-aware, as transformers has it |
| yarn | divides the slow ones, leaves the fast ones, a ramp between; larger cos and sin | Peng et al. 2023 |
| llama3 | divides the slow ones, leaves the fast ones, a ramp over their turns | Llama 3.1's own code |

ALiBi (Press et al. 2022) turns nothing: scores fall with the distance, by a slope for each head. It is a bias of all
scores, so no fused kernel of documents takes it: a dense mask (1 or B, A, S, P).

Frequencies, angles, cosines and sines are float32 at least, operation by operation as in transformers: angles reach
thousands, where another rounding of a frequency is another angle. The rotation is float32 too, and rounded once; in a
16-bit model transformers rounds cosines and sines before and each product after, so that two tokens a distance apart
score up to 1 % differently at other places of a row.
"""

import math

import torch
from torch import Tensor

from .config import TransformerConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin, each (1 or B, 1, S, D), D numbers of a head that are turned
Tables = dict[str, Rotary]  # by the kind of layer


def layer_tables(
    config: TransformerConfig, positions: Tensor, dtype: torch.dtype, row_length: int | None = None
) -> Tables:
    """Cosines and sines by the kind of layer; none where nothing is turned. `row_length`: see `frequencies`."""
    if config.positions != "rotary":
        return {}
    usual = rotary_table(config, positions, dtype, row_length=row_length)
    local = rotary_table(config, positions, dtype, local=True) if config.rope_local_theta else usual
    return {"g": usual, "l": local}


def rotary_table(
    config: TransformerConfig,
    positions: Tensor,
    dtype: torch.dtype,
    local: bool = False,
    row_length: int | None = None,
) -> Rotary:
    """Cosines and sines at `positions` (S,) or (B, S), for heads of `dtype`; `local`: of the layers that have a base of
    their own.
    """
    angles = positions[..., None].float() * frequencies(
        config, positions, local, row_length
    )  # (1 or B, S, D/2)
    angles = torch.cat((angles, angles), dim=-1)
    angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scaling == "yarn" and not local:
        part, whole = config.rope_magnitude_part, config.rope_magnitude_all
        size = yarn_magnitude(config, part) / yarn_magnitude(config, whole) if part and whole else 0.0
        size = config.rope_magnitude or size or yarn_magnitude(config, 1.0)
        cos, sin = cos * size, sin * size
    wide = torch.promote_types(dtype, torch.float32)
    return cos.to(wide), sin.to(wide)


def yarn_magnitude(config: TransformerConfig, share: float) -> float:
    """What yarn makes larger by a factor of the length."""
    return 0.1 * share * math.log(config.rope_factor) + 1.0


def frequencies(
    config: TransformerConfig, positions: Tensor, local: bool = False, row_length: int | None = None
) -> Tensor:
    """Radians for each step of position, (D/2,) float32.

    Only `dynamic` depends on how long the row is: `row_length`, by default the largest of these positions. Training
    gives the length, because a process or a micro-batch may hold a part of the row, or short documents alone.
    """
    size, device = config.rotary_size, positions.device
    steps = torch.arange(0, size, 2, device=device).float() / size
    theta = config.rope_local_theta if local else config.rope_theta
    length = config.rope_original_length or config.sequence_length
    factor = config.rope_factor
    if local or config.rope_scaling == "none":
        return 1.0 / theta**steps
    if config.rope_scaling == "linear":
        return 1.0 / theta**steps / factor
    if config.rope_scaling == "dynamic":
        longest: Tensor | int = (positions.max() + 1).clamp(min=length)
        if row_length is not None:
            longest = max(row_length, length)
        base = theta * (factor * longest / length - (factor - 1)) ** (size / (size - 2))
        return 1.0 / base**steps
    if config.rope_scaling == "yarn":
        kept = 1 - _ramp(config, size, length).to(device)
        return 1.0 / (factor * theta**steps) * (1 - kept) + 1.0 / theta**steps * kept
    whole = 1.0 / theta**steps
    turn = 2 * math.pi / whole  # positions until it is back
    slow, fast = turn > length / config.rope_low, turn < length / config.rope_high
    share = (length / turn - config.rope_low) / (config.rope_high - config.rope_low)
    between = (1 - share) * whole / factor + share * whole
    return torch.where(slow, whole / factor, torch.where(fast, whole, between))


def _ramp(config: TransformerConfig, size: int, length: int) -> Tensor:
    """From 0 at the last frequency that yarn leaves alone to 1 at the first that it divides, (D/2,)."""

    def place(turns: float) -> float:  # of the frequency that turns so often in the trained length
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = place(config.rope_high), place(config.rope_low)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return ((torch.arange(size // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def rotate(x_BASD: Tensor, rotary: Rotary) -> Tensor:
    """Each pair (i, i + D/2) of the first D numbers of a head turned by its angle."""
    cos, sin = rotary
    if cos.shape[-1] < x_BASD.shape[-1]:
        turned, rest = x_BASD.tensor_split((cos.shape[-1],), -1)
        return torch.cat((rotate(turned, rotary), rest), dim=-1)
    first, second = x_BASD.chunk(2, dim=-1)
    rotated = x_BASD * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x_BASD.dtype)


def alibi(heads: int, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What the scores get for which keys a query may see, (1 or B, 1, S, P) bool -> (1 or B, A, S, P).

    A slope times the key's place: a softmax over a row does not see that the query's place is left out.
    """
    # the slopes of a power of two, and every second one of the next
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    places = torch.arange(visible.shape[-1], device=visible.device)
    bias_AP = torch.tensor(slopes, device=visible.device)[:, None] * places
    return bias_AP[:, None].to(dtype).masked_fill(~visible, -math.inf)
