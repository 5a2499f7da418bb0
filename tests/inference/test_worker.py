"""The process of a model: what its first forward must give before anybody asks."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from throughline.core.backend import BackendOptions
from throughline.core.errors import Refused
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.serving.worker import first_outputs, warm_up

ON_CPU = BackendOptions(device="cpu", threads=1)


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_model_that_computes_no_finite_number_is_refused_before_it_serves(
    family: str, bad: float | None, gpt_dir: Path, bert_dir: Path, tmp_path: Path
) -> None:
    """One NaN or infinity in a weight of the last layer's MLP, in a directory that no manifest checks."""
    source, directory = gpt_dir if family == "gpt" else bert_dir, tmp_path / "model"
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    if bad is not None:
        name = next(name for name in sorted(weights, reverse=True) if "mlp" in name or "intermediate" in name)
        weights[name].view(-1)[0] = bad
    save_file(weights, directory / "model.safetensors")
    loaded = open_backend(directory, ON_CPU)
    if bad is None:
        assert warm_up(loaded) == (sorted(first_outputs(loaded)) if family == "bert" else [])
        return
    with pytest.raises(Refused, match="no finite number") as refused:
        warm_up(loaded)
    assert refused.value.where == str(directory) and "--dtype fp32" in refused.value.fix


def test_a_model_with_some_infinite_logits_serves(gpt_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minus infinity for a token that is never to be chosen is no fault."""
    loaded = open_backend(gpt_dir, ON_CPU)
    step = loaded.backend.step

    def masked(*given: object) -> object:
        logits_NV = step(*given)
        logits_NV[:, 5] = -torch.inf
        return logits_NV

    monkeypatch.setattr(loaded.backend, "step", masked)
    assert warm_up(loaded) == []
