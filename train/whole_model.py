"""The whole model of an engine, whatever its layout, for scores that are to be those of its checkpoint."""

import torch
from torch import Tensor, nn

from .engine import Engine
from .loss import Model


@torch.no_grad()
def whole_model(engine: Engine) -> Model | None:
    """On the first process the model with the weights that a checkpoint saves, in eval mode; None on the others.
    Collective.

    One process lends its values. In a layout the first process needs room for all of them in the dtype of the
    masters, and every process for the largest parameter, of which each adds its part to zeros.
    """
    engine.wait()
    model = engine.objective.empty(engine.wide)
    held = {local.name: local for local in engine.local_shards if local.spec.primary}
    for name, shape in engine.shapes.items():
        local = held.get(name)
        if engine.layout.world == 1:
            assert local is not None
            value: Tensor = local.value.detach().to(engine.device)
        else:
            value = torch.zeros(shape, dtype=engine.wide, device=engine.device)
            if local is not None:
                value[local.spec.box.slices()] = local.value.detach().to(engine.device)
            engine.mesh.world.all_reduce(value)
        if engine.mesh.rank == 0:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    return model.eval() if engine.mesh.rank == 0 else None
