"""Activation recomputation, put around the model from outside: less memory for a second forward."""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from ..models.config import ModelConfig


def recompute(model: Any, config: ModelConfig, kind: str) -> None:
    """Make `model` keep fewer activations: `none`, `full` (one per layer), `selective` (all but the attention
    core's).

    full costs a third more FLOPs; selective repeats only softmax and score products (Korthikanti et al. 2022,
    section 5), which with a fused kernel saves little and with an explicit mask the S x S scores. Dropout is
    drawn again alike.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=config.dropout > 0)
    blocks: Any = model.blocks.values() if kind != "none" else ()
    for block in blocks:
        if kind == "full":
            block.forward = partial(again, block.forward)
        else:
            block.attention.attend = partial(again, block.attention.attend)
