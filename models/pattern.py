"""Which tokens see which, as numbers of a config. No torch here."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class AttentionPattern:
    """Which tokens see which, in tokens and blocks; the table in `attention_patterns.py` says how."""

    kind: Literal["sliding", "fixed"] = "sliding"
    window: int = (
        512  # tokens: reach (both ways when bidirectional) of a sliding one, length of a fixed stretch
    )
    block: int = 256  # tokens handled together
    global_blocks: int = 0  # blocks that every token sees
    random_blocks: int = 0  # sliding: blocks beyond the window that each block sees, others in each layer

    def validate(self) -> list[str]:
        """Everything that is wrong with it, one sentence each."""
        problems = []
        if self.window < 1 or self.block < 1 or min(self.global_blocks, self.random_blocks) < 0:
            problems.append(
                "attention_window and attention_block must be at least 1, global and random blocks at least 0"
            )
        elif self.kind == "fixed" and self.random_blocks:
            problems.append("attention_random_blocks belong to a sliding window, not to a fixed one")
        elif self.kind == "fixed" and self.window % self.block:
            problems.append(
                f"a fixed window of {self.window} tokens is no whole number of blocks of {self.block}"
            )
        elif self.kind == "fixed" and self.global_blocks * self.block > self.window:
            problems.append(
                f"{self.global_blocks} global blocks of {self.block} do not fit in a window of {self.window}"
            )
        return problems

    @property
    def is_band(self) -> bool:
        """Whether a token sees those less than `window` away and no others."""
        return self.kind == "sliding" and not self.global_blocks and not self.random_blocks

    def sees(self, queries: Any, keys: Any, causal: bool, length: int = 0, layer: int = 0) -> Any:
        """Whether the token at each query position sees the one at each key position: int arrays or tensors,
        which broadcast.

        `length` of the sequence and `layer` matter to random blocks alone, the length only when
        bidirectional.
        """
        wide = self.global_blocks * self.block
        if self.kind == "sliding":
            seen = (abs(queries - keys) < self.window) | (keys < wide) | (queries < wide)
            for draw in range(self.random_blocks):
                seen = seen | (
                    keys // self.block == self._drawn(queries // self.block, draw, causal, length, layer)
                )
        else:
            seen = (queries // self.window == keys // self.window) | (
                keys % self.window >= self.window - wide
            )
        return seen & (keys <= queries) if causal else seen

    def _drawn(self, rows: Any, draw: int, causal: bool, length: int, layer: int) -> Any:
        """The block that each block of queries draws, -1 where nothing is left to draw from.

        What lies beyond the window and the global blocks is cut into as many stretches as there are draws,
        and each draw takes one block of its stretch: none twice. A function of (layer, row, draw), the same
        for all heads.
        """
        reach = (self.window + self.block - 2) // self.block  # blocks of the window on each side
        left = (rows - reach - self.global_blocks) * (rows > reach + self.global_blocks)
        right = (
            0 * rows
            if causal
            else (-(-length // self.block) - 1 - rows - reach) * (rows + reach < -(-length // self.block))
        )
        first = (left + right) * draw // self.random_blocks
        room = (left + right) * (draw + 1) // self.random_blocks - first
        number = rows + 1
        for salt in (
            draw + 1,
            layer + 1,
            1,
            1,
        ):  # Park and Miller's generator, something new mixed in each time
            number = (number * 48271 + salt * 69621) % 2147483647
        taken = first + number // 8 % (room + (room == 0))
        block = self.global_blocks + taken + (taken >= left) * (rows + reach + 1 - left - self.global_blocks)
        return block * (room > 0) - (room == 0) * 1

    def widest(self, length: int) -> int:
        """Columns of the band that is left of a (length, length) square; global tokens count as one stripe."""
        return min(length, 2 * self.window + (self.global_blocks + self.random_blocks) * self.block)
