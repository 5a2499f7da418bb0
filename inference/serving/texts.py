"""Text in, text or vectors out, for the command line: opens the model at a path and runs it here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from ...core.backend import AUTO, BackendOptions
from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_backend
from .encoding import Reader, embed
from .generation import Job, TextDelta, prompt_ids
from .slots import answer


def text_job(loaded: Loaded, tokenizer: Tokenizer, prompt: str, like: Job) -> Job:
    """Continue `prompt` as a job without one says, to the end of the model's context where `max_tokens` would go
    beyond it. Raises WrongUse when the prompt alone fills it.
    """
    ids = prompt_ids(tokenizer, prompt)
    context = loaded.backend.context
    if len(ids) >= context:
        what, why = "the prompt fills the model's context", f"{len(ids)} tokens, the context is {context}"
        raise WrongUse(what, where="prompt", why=why, fix="shorten the prompt")
    return replace(like, prompt_ids=ids, max_tokens=min(like.max_tokens, context - len(ids)))


def continue_text(
    path: Path | str, prompt: str, like: Job, options: BackendOptions = AUTO
) -> Iterator[tuple[int, TextDelta]]:
    """Continue `prompt` with the GPT at `path` as a job without one says; yields (number of the answer, delta) as
    text is made. Raises WrongUse as `text_job` does and when the model is no GPT.
    """
    loaded, tokenizer = open_text_model(path, "gpt", options)
    job = text_job(loaded, tokenizer, prompt, like)
    rest = tokenizer.decode, tokenizer.eos_id, tokenizer.vocab_size, min(job.n, 8)
    for _, number, delta in answer(loaded.backend, [job], *rest):
        yield number, delta


def embed_texts(
    path: Path | str,
    texts: Sequence[str],
    options: BackendOptions = AUTO,
    *,
    truncate: bool = False,
    prompt: str | None = None,
) -> np.ndarray:
    """Embeddings of the texts with the BERT at `path`, each of length 1, float32 (texts, width).

    `truncate` embeds the beginning of what is longer than the model's context, which is refused without it.
    """
    loaded, tokenizer = open_text_model(path, "bert", options)
    sentence = loaded.sentence.prompted(prompt)
    context = sentence.context(loaded.backend.context)
    reader = Reader(tokenizer, context, loaded.backend.vocab_size)
    named = {f"text {number}: {text[:60]}": sentence.text(text) for number, text in enumerate(texts, 1)}
    rows = [reader.frame({name: text}, truncate) for name, text in named.items()]
    return embed(loaded.backend, rows, tokenizer.pad_id or 0, sentence.output())


def open_text_model(path: Path | str, family: str, options: BackendOptions) -> tuple[Loaded, Tokenizer]:
    """The model at `path` with its tokenizer. Raises WrongUse when it is of the other family or has none."""
    loaded = open_backend(path, options)
    if loaded.family != family:
        needed = "generating needs a GPT" if family == "gpt" else "embedding needs a BERT"
        raise WrongUse(needed, where=path, why=f"this is a {loaded.family.upper()}")
    if loaded.tokenizer is None:
        raise WrongUse("this model has no tokenizer.json", where=path, fix="put one beside the weights")
    return loaded, Tokenizer.load(loaded.tokenizer)
