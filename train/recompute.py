"""Activation recomputation, put around the model from outside: less memory for a second forward."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models.config import ModelConfig


def recompute(model: nn.Module, config: ModelConfig, kind: str) -> None:
    """Make `model` keep fewer activations: `none`, `full` (one per layer), `selective` (all but the attention core's).

    full costs a third more FLOPs; selective repeats only softmax and score products (Korthikanti et al. 2022, section
    5), which with a fused kernel saves little and with an explicit mask the S x S scores. Dropout is drawn again alike.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=config.dropout > 0)
    for block in model.blocks.values() if kind != "none" else ():
        if kind == "full":
            block.forward = partial(again, block.forward)
        else:
            block.attention.attend = partial(again, block.attention.attend)
