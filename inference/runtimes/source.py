"""Opening a model wherever it lies: a run, a checkpoint, a model artifact or a Hugging Face directory."""

import contextlib
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ...core.artifact import Input, input_record, is_artifact, read_manifest, verify_artifact
from ...core.errors import WrongUse, download_hint, nearest

if TYPE_CHECKING:
    import torch

    from ...models.bert import BERT, BERTWithHead
    from ...models.gpt import GPT


class OpenedModel(NamedTuple):
    """A model in eval mode, its tokenizer.json (None when it has none) and what to record as an input."""

    model: "GPT | BERT | BERTWithHead"
    tokenizer: Path | None
    input: Input


class FoundModel(NamedTuple):
    """A model looked for and not yet read: its directory, and its tokenizer.json (None when it has none)."""

    directory: Path
    tokenizer: Path | None

    def stored_dtype(self, device: str) -> "torch.dtype | None":
        """The dtype that most of its weights are stored in. Of a checkpoint, whose masters are fp32, the 16 bits that
        it was trained in, and None on a CPU.
        """
        import torch

        if not _is_huggingface(self.directory):
            halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
            trained = read_manifest(self.directory).facts.get("precision")
            return None if device == "cpu" else halves.get(str(trained))
        from safetensors import SafetensorError, safe_open

        sizes: Counter[str] = Counter()
        with contextlib.suppress(SafetensorError):  # a cut file: `open` says so
            for file in sorted(self.directory.glob("*.safetensors")):
                with safe_open(file, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (this is no dict)
                        part = tensors.get_slice(name)
                        sizes[part.get_dtype()] += math.prod(part.get_shape())
        dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return dtypes.get(max(sizes, key=lambda dtype: sizes[dtype])) if sizes else None

    def open(self, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
        """Read it. Raises as `open_model` does."""
        if not _is_huggingface(self.directory):
            from ...train.checkpoints.checkpoint import load_model

            model, tokenizer = load_model(self.directory, device, dtype)
            return OpenedModel(cast("GPT | BERT", model), tokenizer, input_record(self.directory))
        import torch

        from ...models.huggingface import load_huggingface

        if is_artifact(self.directory):
            verify_artifact(self.directory)
        model = load_huggingface(self.directory, dtype or torch.float32).to(device).eval()
        return OpenedModel(model, self.tokenizer, input_record(self.directory))


def no_model(path: Path) -> WrongUse:
    """The error of a path that is not there, with the nearest name beside it."""
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, beside)
    fix = f"did you mean {path.parent / near[0]}?" if near else "check the spelling; runs are under runs/"
    fix += download_hint(path)
    return WrongUse("no such model", where=path, fix=fix)


def find_model(path: Path | str) -> FoundModel:
    """The torch model that `path` means. Raises WrongUse when there is none there."""
    path = Path(path)
    if not path.exists():
        raise no_model(path)
    if path.is_file():
        what, why = "this file is no model", "of models that are one file only .gguf is read"
        fix = "give its directory: an ONNX artifact, a Hugging Face directory, a run or a checkpoint"
        raise WrongUse(what, where=path, why=why, fix=fix)
    if not _is_huggingface(path):
        if is_artifact(path) and (kind := read_manifest(path).kind) in ("onnx", "engine", "gguf"):
            what = f"a torch model is needed, this is an artifact of kind {kind}"
            fix = "give the run or checkpoint that it was exported from (`throughline show` names it)"
            raise WrongUse(what, where=path, fix=fix)
        from ...train.checkpoints.run_directory import locate

        path = locate(path)
    tokenizer = path / "tokenizer.json"
    return FoundModel(path, tokenizer if tokenizer.is_file() else None)


def _is_huggingface(path: Path) -> bool:
    return (path / "config.json").is_file()


def open_model(path: Path | str, device: str = "cpu", dtype: "torch.dtype | None" = None) -> OpenedModel:
    """The torch model at `path`: a run (its latest checkpoint), a checkpoint, a model artifact, a Hugging
    Face directory.

    Raises WrongUse when there is no model there, Refused when a file of it is cut or changed or the model is
    of a kind that ours cannot express.
    """
    return find_model(path).open(device, dtype)
