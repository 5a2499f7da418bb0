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


class FoundModel(NamedTuple):
    """A model that has been looked for and not yet read: its directory, and its tokenizer.json (None when it has none)."""

    directory: Path
    tokenizer: Path | None

    def open(self, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
        """Read it. Raises as `open_model` does."""
        if not _is_huggingface(self.directory):
            from ..train.checkpoint import load_model

            model, tokenizer = load_model(self.directory, device, dtype)
            return OpenedModel(cast("GPT | BERT", model), tokenizer, input_record(self.directory))
        import torch

        from ..models.huggingface import from_huggingface

        if is_artifact(self.directory):
            verify_artifact(self.directory)
        model = from_huggingface(self.directory, dtype or torch.float32).to(device).eval()
        return OpenedModel(model, self.tokenizer, input_record(self.directory))


def find_model(path: Path | str) -> FoundModel:
    """The torch model that `path` means. Raises WrongUse when there is none there."""
    path = Path(path)
    if not path.exists():
        raise WrongUse("no such model", where=path, fix="check the spelling; runs are under runs/")
    if not _is_huggingface(path):
        if is_artifact(path) and (kind := read_manifest(path).kind) == "onnx":
            raise WrongUse(
                f"a torch model is needed, this is an artifact of kind {kind}", where=path,
                fix="give the run or checkpoint that it was exported from (`throughline show` names it)",
            )  # fmt: skip
        from ..train.checkpoint import locate

        path = locate(path)
    tokenizer = path / "tokenizer.json"
    return FoundModel(path, tokenizer if tokenizer.is_file() else None)


def _is_huggingface(path: Path) -> bool:
    return (path / "config.json").is_file()


def open_model(path: Path | str, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
    """The torch model at `path`: a run (its latest checkpoint), a checkpoint, a model artifact, a Hugging Face directory.

    Raises WrongUse when there is no model there, Refused when a file of it is cut or changed or the model is of a kind
    that ours cannot express.
    """
    return find_model(path).open(device, dtype)
