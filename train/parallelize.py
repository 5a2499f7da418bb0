"""All that is done to a model before it trains, in the order in which it is done: one screen.

Each line puts something on from outside and does nothing where its axis is alone or its option is off, so one process
and a thousand go through the same lines. The model is on the meta device: no process ever holds more than its part.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from ..models.attention_cuda import take_newest
from .compile import compile_stage
from .float8 import convert_products
from .loss import pad_vocabulary
from .parallel.data import shard_stage, share_experts
from .parallel.mesh import Mesh
from .parallel.tensor import apply_tensor_parallel
from .precision import computing_dtype
from .stage import Stage


def parallelize(
    stage: Stage, mesh: Mesh, precision: str, matmul: str, compiling: str, recomputing: str
) -> None:
    """Cut, change and wrap a stage of the model by the recipe's words for it."""
    model, trunk = stage.model, stage.trunk  # with its heads, and what has the blocks
    apply_tensor_parallel(model, mesh.tensor, recomputing == "full")  # cut layers in place of plain ones
    share_experts(trunk, mesh.expert)  # each process its part of them, and their rows sent there
    pad_vocabulary(trunk, mesh.device)  # of what was cut: every process has whole tiles
    # the context axis: `Stage.encode` gives the blocks documents of whole rows, which attend around the ring
    convert_products(trunk, matmul)  # fp8, in the layers that the tensor axis left
    if not trunk.config.dropout:
        take_newest(mesh.device)
    if compiling != "off":
        compile_stage(stage, compiling)  # blocks and head; what gathers or waits around them stays outside
    recompute(trunk, recomputing)  # repeats a block's compiled forward
    # last: it gathers for all that
    shard_stage(stage, trunk.blocks.values(), mesh, computing_dtype(precision))


def recompute(model: Any, kind: str) -> None:
    """Make `model` keep fewer activations: `none`, `full` (one per layer, for a third more FLOPs), `selective` (all but
    the attention core's: Korthikanti et al. 2022, section 5). Dropout is drawn again alike.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=model.config.dropout > 0)
    blocks: Any = model.blocks.values() if kind != "none" else ()
    for block in blocks:
        if kind == "full":
            block.forward = partial(again, block.forward)
        else:
            block.attention.attend = partial(again, block.attention.attend)
