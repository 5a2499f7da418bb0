"""From a path to a scorer: a run, a checkpoint, a model directory or an ONNX artifact, GPT or BERT."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.artifact import Input, is_artifact
from ..core.backend import BackendOptions
from ..core.console import warn
from ..core.errors import WrongUse
from ..core.hardware import return_freed_memory
from ..core.scorer import Scorer

LEAST_SHARE = 0.9  # of a vocabulary: models are padded by some per cent at most


@dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """How to open a scorer. None: its own window, a batch for the device, BOS as the tokenizer has it."""

    device: str = "auto"
    bos: bool | None = None
    window: int | None = None
    batch_tokens: int | None = None
    keep_tokens: bool = False
    pll: str = "within_word_l2r"
    dtype: str = "auto"
    apply_chat_template: bool = False  # the one beside the tokenizer
    url: str | None = None  # of a server; then its model's name, the tokenizer's path, and requests at once
    model: str | None = None
    tokenizer: Path | None = None
    clients: int = 8


@dataclass(frozen=True)
class Opened:
    """A scorer with what a report says of its model."""

    scorer: Scorer
    family: str
    input: Input
    step: int | None
    model: Any = None  # the torch module, None for an exported graph
    tokenizer: Any = None


def open_scorer(path: Path | str, options: ScorerOptions = ScorerOptions()) -> Opened:
    """The scorer of the model at `path`. Raises WrongUse when there is none, or it has no tokenizer."""
    from ..data.model_settings import end_ids
    from ..data.tokenizer import Tokenizer
    from ..inference.runtimes.backends import kind_of, open_backend

    path = Path(path)
    kind = kind_of(path)
    device = own_gpu(options.device, not kind or runs_on_gpu(kind))
    loaded = open_backend(path, BackendOptions(device, options.dtype))
    if (file := loaded.tokenizer) is None:
        why = "there is no tokenizer.json beside its weights"
        fix = "put the tokenizer.json that it was trained with into its directory"
        raise WrongUse("the model has no tokenizer", where=path, why=why, fix=fix)
    tokenizer = Tokenizer.load(file)
    if tokenizer.vocab_size < LEAST_SHARE * loaded.config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, and the model predicts {loaded.config.vocab_size:,}"
        warn(f"{file} has {sizes}: if it is not the model's own, the scores mean nothing")
    module: Any = None if kind else loaded.backend.model
    if hasattr(module, "encoder"):
        why = f"its head is {module.head.kind}"
        raise WrongUse("this BERT has no masked-word head to score with", where=path, why=why)
    own = {"identity": loaded.input.hash, "chat": open_chat(options, file.parent, tokenizer, loaded.family)}
    if loaded.family == "gpt":
        own["end_ids"] = end_ids(file.parent, tokenizer)
    scorer = scorer_of(module or loaded.backend, loaded.family, tokenizer, options, **own)
    return_freed_memory()  # scoring would come on top of it
    step = re.fullmatch(r"step-(\d+)", Path(loaded.input.path).name)
    return Opened(scorer, loaded.family, loaded.input, int(step[1]) if step else None, module, tokenizer)


def scorer_of(
    model: Any, kind: Any, tokenizer: Any, options: ScorerOptions = ScorerOptions(), **own: Any
) -> Scorer:
    """The scorer of a module or a backend, by its family or by what makes one; `own`: see `BatchedScorer`."""
    common = {key: getattr(options, key) for key in ("window", "batch_tokens", "keep_tokens")} | own
    made: Any
    if kind == "bert":
        from .masked import MaskedScorer

        made, ignored = MaskedScorer, "--bos" if options.bos is not None else ""
        common["pll"] = options.pll
    else:
        from .causal import CausalScorer

        made = CausalScorer if kind == "gpt" else kind
        ignored = "--pll" if options.pll != ScorerOptions.pll else ""
        common["bos"] = tokenizer.puts_bos if options.bos is None else options.bos
    scorer: Scorer = made(model, tokenizer, **common)
    if ignored:
        warn(f"{ignored} says how a {'GPT' if kind == 'bert' else 'BERT'} is scored: here it changes nothing")
    if options.window is not None and options.window > (longest := scorer.recipe["window"]):
        warn(f"--window {options.window:,} is longer than the model's {longest:,} tokens, which are used")
    return scorer


def open_chat(options: ScorerOptions, directory: Path, tokenizer: Any, family: str = "gpt") -> Any:
    """The chat template beside the tokenizer, None where none is asked for. Raises WrongUse when there is none."""
    if not options.apply_chat_template:
        return None
    from ..data.chat import ChatTemplate

    if family != "gpt" or (found := ChatTemplate.find(directory, tokenizer)) is None:
        why = f"a {family} with neither chat_template.jinja nor one in tokenizer_config.json"
        fix = "leave --apply-chat-template out, or put the model's template beside its tokenizer"
        raise WrongUse("the model has no chat template", where=directory, why=why, fix=fix)
    return found


def runs_on_gpu(kind: str) -> bool:
    """Whether the runtime of an exported file could use a GPU."""
    if kind == "gguf":
        from ..inference.runtimes.llama_backend import has_gpu

        return has_gpu()
    from ..inference.runtimes.backends import pick_onnx_device

    return kind == "engine" or pick_onnx_device("auto") != "cpu"


def own_gpu(device: str, auto: bool = True) -> str:
    """The device as torch names it; under a launcher `cuda` and (with `auto`) "auto" are the GPU of this process.
    Raises WrongUse for a device that the machine has not, or has fewer of than processes.
    """
    if device == "auto" and not auto:
        return "cpu"
    from ..inference.runtimes.source import pick_device

    picked = pick_device(device)
    if picked == "cpu" or ":" in device:
        return picked
    import torch

    from ..train.parallel.mesh import own_device

    return str(own_device(torch.device("cuda")))


def checkpoints_of(run: Path | str) -> list[Path]:
    """The complete checkpoints of a run, oldest first. Raises WrongUse when there are none."""
    found = sorted(path for path in (Path(run) / "checkpoints").glob("step-*") if is_artifact(path))
    if not found:
        raise WrongUse("no checkpoints here", where=run, fix="--all-checkpoints needs the directory of a run")
    return found


def task_scorer(names: str, limit: int | None = None) -> Callable[[Any], dict[str, float]]:
    """A function that scores a loaded backend on tasks: {"task metric": value} of metrics of which more is better."""
    from ..data.model_settings import end_ids
    from ..data.tokenizer import Tokenizer
    from .asked import Settings
    from .runner import evaluate
    from .task import find_tasks

    tasks = find_tasks([name.strip() for name in names.split(",") if name.strip()])

    def score(loaded: Any) -> dict[str, float]:
        if loaded.tokenizer is None:
            raise WrongUse("the model has no tokenizer, so no task can be scored", where="--tasks")
        tokenizer = Tokenizer.load(loaded.tokenizer)
        own: dict[str, Any] = {}
        if loaded.causal:
            own["end_ids"] = end_ids(loaded.tokenizer.parent, tokenizer)
        scorer = scorer_of(loaded.causal or loaded.encoder, loaded.family, tokenizer, **own)
        return {
            f"{scores.summary['task']} {name}": metric["value"]
            for scores in evaluate(scorer, tasks, Settings(limit=limit))
            for name, metric in scores.summary["metrics"].items()
            if metric["higher_is_better"]
        }

    return score
