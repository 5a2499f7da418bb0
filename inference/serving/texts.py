"""Text in, text or vectors out, for the command line: opens the model at a path and runs it here."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...core.backend import AUTO, BackendOptions
from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_backend
from ..runtimes.sampling import Sampling
from .encoding import embed, frame, shortened
from .generation import Request, TextDelta
from .slots import generate


def continue_text(
    path: Path | str,
    prompt: str,
    settings: Sequence[Sampling],
    max_tokens: int,
    stop: tuple[str, ...] = (),
    options: BackendOptions = AUTO,
) -> Iterator[tuple[int, TextDelta]]:
    """Continue `prompt` once per setting with the GPT at `path`; yields (number, delta) as text is made.

    The answer ends with the model's context when `max_tokens` would go beyond it. Raises WrongUse when the
    model is no GPT or the prompt alone fills its context.
    """
    loaded, tokenizer = open_text_model(path, "gpt", options)
    assert loaded.causal is not None
    ids = tokenizer.encode(prompt)
    if len(ids) == 0 and tokenizer.eos_id is not None:
        ids = np.array([tokenizer.eos_id])  # the beginning of a document
    room = loaded.causal.context - len(ids)
    if room < 1:
        raise WrongUse(
            "the prompt fills the model's context",
            where="prompt",
            why=f"{len(ids)} tokens, the context is {loaded.causal.context}",
            fix="shorten the prompt",
        )
    requests = [
        Request(ids, min(max_tokens, room), sampling, stop, tokenizer.eos_id) for sampling in settings
    ]
    yield from generate(loaded.causal, tokenizer.decode, requests, vocab_size=tokenizer.vocab_size)


def embed_texts(
    path: Path | str, texts: Sequence[str], options: BackendOptions = AUTO, *, truncate: bool = False
) -> np.ndarray:
    """Embeddings of the texts with the BERT at `path`, each of length 1, float32 (texts, width).

    `truncate` embeds the beginning of what is longer than the model's context, which is refused without it.
    """
    loaded, tokenizer = open_text_model(path, "bert", options)
    assert loaded.encoder is not None
    sizes = (loaded.config.sequence_length, loaded.config.vocab_size)
    rows = [
        frame(
            tokenizer,
            shortened(tokenizer, text, sizes[0]) if truncate else text,
            *sizes,
            f"text {number}: {text[:60]}",
        )
        for number, text in enumerate(texts, 1)
    ]
    return embed(loaded.encoder, rows, tokenizer.pad_id or 0)


def open_text_model(path: Path | str, family: str, options: BackendOptions) -> tuple[Loaded, Tokenizer]:
    """The model at `path` with its tokenizer. Raises WrongUse when it is of the other family or has none."""
    loaded = open_backend(path, options)
    if loaded.family != family:
        needed = "generating needs a GPT" if family == "gpt" else "embedding needs a BERT"
        raise WrongUse(needed, where=path, why=f"this is a {loaded.family.upper()}")
    if loaded.tokenizer is None:
        raise WrongUse("this model has no tokenizer.json", where=path, fix="put one beside the weights")
    return loaded, Tokenizer.load(loaded.tokenizer)
