"""What a recipe's data section names, opened and checked: token stores, or text that is made into stores first."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.artifact import Input, input_record, is_artifact, read_manifest
from ..core.errors import Failed, Refused, WrongUse
from ..core.files import sha256_file, sha256_json
from ..data.ingest.inputs import expand_inputs
from ..data.ingest.tokenize import make_plan, tokenize
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer, tokenizer_beside
from .recipes.own_text import VOCABULARY, here, text_bytes, token_bytes
from .recipes.recipe import Recipe
from .recipes.resolved import is_text


@dataclass(frozen=True)
class Corpus:
    """What a run reads. While `text_bytes` of text are still to be tokenised there are no stores, only estimates."""

    train: Sequence[TokenStore]
    validation: Sequence[TokenStore]
    vocab_size: int
    tokenizer: Tokenizer | None  # None for a foreign store, which has none
    tokenizer_json: bytes | None
    inputs: Sequence[Input]
    text_bytes: int = 0
    beside: Path | None = None  # of the weights begun with: its chat template goes where the tokenizer does
    estimated_tokens: tuple[Sequence[int], Sequence[int]] = (
        (),
        (),
    )  # of each source, to train and to validate on

    @property
    def train_tokens(self) -> list[int]:
        """Tokens in the training part of each store."""
        return [store.tokens for store in self.train] or list(self.estimated_tokens[0])

    @property
    def validation_tokens(self) -> list[int]:
        return [store.tokens for store in self.validation] or list(self.estimated_tokens[1])


def open_corpus(recipe: Recipe, cache: Path | None = None) -> Corpus:
    """Text is tokenised into `cache`, once; without it its size is told. Raises WrongUse, Refused, as `tokenize`."""
    data = recipe.data
    paths, validation = [source.path for source in data.sources()], data.validation
    untrained = cache is None and not data.tokenizer and any(map(is_text, paths))
    if not data.tokenizer and not untrained:
        return _stores(recipe, paths, validation)
    texts = [path for path in (*paths, validation) if path and not list(Path(path).glob("*.idx"))]
    if cache is None:
        return _untokenised(recipe, texts)
    made = {path: _tokenised(recipe, path, cache) for path in texts}
    corpus = _stores(recipe, [made.get(path, path) for path in paths], made.get(validation, validation))
    inputs = [item for store in made.values() for item in read_manifest(store).inputs]
    if validation and validation not in made:
        inputs.append(_record(validation))
    return replace(corpus, inputs=list(dict.fromkeys(inputs)))


def _untokenised(recipe: Recipe, texts: Sequence[str]) -> Corpus:
    """The corpus of text that is not tokenised yet, perhaps by a tokenizer that is not trained yet: with estimates."""
    data, options = recipe.data, recipe.data.read_options()
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    vocab_size, content = recipe.model.overrides.get("vocab_size", VOCABULARY), None
    if tokenizer is not None:
        vocab_size = _one_vocabulary(recipe, [tokenizer.facts()], [data.tokenizer])
        content = tokenizer.to_json().encode()
    sizes = []
    for path in (*(source.path for source in data.sources()), data.validation):
        if path in texts:
            sources = expand_inputs([path])
            size = text_bytes(sources, options)
            if not size and sources == here(sources):
                raise Failed("no text in the input", where=path, fix="name files that hold text")
            sizes.append(size / token_bytes(sources, options, tokenizer))
        elif path:
            sizes.append(TokenStore.open(path).tokens)
    held_out = [sizes.pop()] if data.validation else [size * data.validation_fraction for size in sizes]
    if not data.validation:
        sizes = [size * (1 - data.validation_fraction) for size in sizes]
    estimates = [round(size) for size in sizes], [round(size) for size in held_out]
    bytes_of_text = sum(source.bytes for source in expand_inputs(list(texts)))
    return Corpus([], [], vocab_size, tokenizer, content, [], bytes_of_text, None, estimates)


def _tokenised(recipe: Recipe, text: str, cache: Path) -> str:
    """The token store of a text. Every process of a run comes here: they help each other, and one completes it."""
    data, objective = recipe.data, recipe.objective
    sentences = objective is not None and objective.sentences != "none"
    options = data.read_options()
    plan = make_plan([text], Tokenizer.load(data.tokenizer), options, None, sentences, None)
    out = cache / f"text-{plan.hash[:16]}"
    if not is_artifact(out):
        tokenize([text], data.tokenizer, out, options=options, sentences=sentences)
    return str(out)


def _stores(recipe: Recipe, paths: list[str], held_apart: str) -> Corpus:
    cut, paths = 1 - recipe.data.validation_fraction, [*paths, held_apart] if held_apart else paths
    stores = [TokenStore.open(path) for path in paths]
    vocab_size = _one_vocabulary(recipe, [_facts(store) for store in stores], paths)
    train, validation = (stores[:-1], stores[-1:]) if held_apart else (stores, stores[:0])
    if cut < 1 and not held_apart:
        train = [store.view(0.0, cut) for store in stores]
        validation = [store.view(cut, 1.0) for store in stores]
    file = tokenizer_beside(paths[0])
    content = file.read_bytes() if file.is_file() else None
    tokenizer = None if content is None else Tokenizer.load(file)
    return Corpus(train, validation, vocab_size, tokenizer, content, [_record(path) for path in paths])


def _facts(store: TokenStore) -> dict[str, Any]:
    """What a store says of itself, and the largest id of one that says nothing, by a pass over it."""
    facts = store.facts
    if facts.get("foreign"):
        facts["largest_id"] = max(int(shard.data.max()) for shard in store.shards if shard.tokens)
    return facts


def _record(path: str) -> Input:
    """The record of a store: also of a Megatron prefix, which is no path itself."""
    if os.path.exists(path):
        return input_record(path)
    hashes = [sha256_file(f"{path}{suffix}") for suffix in (".bin", ".idx")]
    return Input(os.path.abspath(path), "foreign", sha256_json(hashes))


def _one_vocabulary(recipe: Recipe, every: Sequence[dict[str, Any]], paths: Sequence[str]) -> int:
    """The vocabulary that all stores share, or the recipe's. Refuses ids without an embedding."""
    marks = {str(facts.get("tokenizer", "")): path for facts, path in zip(every, paths)}
    if len(marks) > 1:
        where, fix = ", ".join(marks.values()), "tokenise all with one tokenizer"
        raise Refused("token stores of different tokenizers", where=where, fix=fix)
    vocab_size = recipe.model.overrides.get("vocab_size") or every[0].get("vocab_size")
    if not vocab_size:
        what, why = "the size of the vocabulary is not known", "the store is foreign"
        fix = "set model.overrides.vocab_size, and train with a tokenizer.json beside the store to evaluate text"
        raise WrongUse(what, where=paths[0], why=why, fix=fix)
    for facts, path in zip(every, paths):
        largest = facts.get("largest_id", -1)
        if largest >= vocab_size:
            why = f"largest id {largest}, vocab_size {vocab_size}"
            least = facts.get("vocab_size", largest + 1)
            fix = f"set model.overrides.vocab_size to at least {least}, or leave it out"
            raise Refused("the tokens do not fit the model's vocabulary", where=path, why=why, fix=fix)
    return int(vocab_size)
