"""Opening a model wherever it lies: a run, a checkpoint, a model artifact or a Hugging Face directory."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ..core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ..core.errors import WrongUse

if TYPE_CHECKING:
    import torch

    from ..models.bert import BERT
    from ..models.gpt import GPT


class OpenedModel(NamedTuple):
    """A model in eval mode, its tokenizer.json (None when it has none) and what to record as an input."""

    model: "GPT | BERT"
    tokenizer: Path | None
    input: Input


def open_model(path: Path | str, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
    """The torch model at `path`: a run (its latest checkpoint), a checkpoint, a model artifact, a Hugging Face directory.

    Raises WrongUse when there is no model there, Refused when a file of it is cut or changed or the model is of a kind
    that ours cannot express.
    """
    path = Path(path)
    if not path.exists():
        raise WrongUse("no such model", where=path, fix="check the spelling; runs are under runs/")
    if (path / "config.json").is_file():
        return _open_huggingface(path, device, dtype)
    if is_artifact(path) and (kind := read_manifest(path).kind) == "onnx":
        raise WrongUse(
            f"a torch model is needed, this is an artifact of kind {kind}", where=path,
            fix="give the run or checkpoint that it was exported from (`throughline show` names it)",
        )  # fmt: skip
    from ..train.checkpoint import load_model, locate

    checkpoint = locate(path)
    model, tokenizer = load_model(checkpoint, device, dtype)
    return OpenedModel(cast("GPT | BERT", model), tokenizer, input_record(checkpoint))


def _open_huggingface(path: Path, device: str, dtype: "torch.dtype | None") -> OpenedModel:
    import torch

    from ..models.huggingface import from_huggingface

    if is_artifact(path):
        verify_artifact(path)
    model = from_huggingface(path, dtype or torch.float32).to(device).eval()
    tokenizer = path / "tokenizer.json"
    return OpenedModel(model, tokenizer if tokenizer.is_file() else None, input_record(path))
