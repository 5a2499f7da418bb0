"""Small token stores and recipes for the tests of training: made text with something to learn, no shared
data.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from common import index_file
from throughline.core.artifact import create_artifact
from throughline.core.recipe import build_recipe
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.tokenizer import Tokenizer
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build
from throughline.train.build import RunPlan, plan_run
from throughline.train.finetune.run import write_model
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES

# The modules beside the tests. Last: other folders on the path have a conftest that tests import from.
sys.path.append(str(Path(__file__).parent))
from finetune_cases import WORDS

SUBJECTS = [
    "the cat",
    "a dog",
    "my horse",
    "the old king",
    "a small bird",
    "her brother",
    "this child",
    "the moon",
]
VERBS = ["sees", "follows", "likes", "never finds", "has lost", "waits for", "sings of", "dreams about"]


def sentences(count: int, seed: int) -> list[str]:
    """Sentences whose words depend on one another."""
    draw = np.random.default_rng(seed)
    picks = draw.integers(0, 8, (count, 2))
    return [f"{SUBJECTS[a]} {VERBS[(a + b) % 8]} {SUBJECTS[(a * 3 + b) % 8]}." for a, b in picks]


def write_store(path: Path, tokenizer: Tokenizer, documents: list[list[str]]) -> Path:
    """A token store with one sequence per sentence."""
    parts = [tokenizer.encode(sentence) for document in documents for sentence in document]
    lengths = np.array([len(part) for part in parts])
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    with create_artifact(path, "tokens") as draft:
        np.concatenate(parts).astype(np.uint16).tofile(draft.path / "00000.bin")
        index_file(draft.path / "00000.idx", lengths, bounds, np.uint16)
        (draft.path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        draft.facts |= {
            "vocab_size": tokenizer.vocab_size,
            "largest_id": int(max(part.max() for part in parts)),
            "tokenizer": tokenizer.fingerprint(),
        }
    return path


@pytest.fixture(scope="session")
def gpt_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 27,000 characters in one document."""
    text = [" " + sentence for sentence in sentences(800, 1)]
    return write_store(tmp_path_factory.mktemp("stores") / "gpt", train_tokenizer(text, "char", 64), [text])


@pytest.fixture(scope="session")
def bert_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 documents of 10 sentences in word pieces."""
    documents = [sentences(10, seed) for seed in range(120)]
    tokenizer = train_tokenizer(
        [sentence for document in documents for sentence in document], "wordpiece", 120
    )
    return write_store(tmp_path_factory.mktemp("stores") / "bert", tokenizer, documents)


@pytest.fixture(scope="session")
def make_store() -> Callable[..., Path]:
    """`write_store`, for tests that need stores of their own."""
    return write_store


@pytest.fixture(scope="session")
def two_stores(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A store of 1,200 sentences and one of 60, of one tokenizer; the small one's sentences are written backwards."""
    folder = tmp_path_factory.mktemp("mixture")
    large = [[" " + sentence] for sentence in sentences(1200, 1)]
    small = [[" " + sentence[::-1]] for sentence in sentences(60, 2)]
    tokenizer = train_tokenizer([text for document in large for text in document], "char", 64)
    return [
        str(write_store(folder / "large", tokenizer, large)),
        str(write_store(folder / "small", tokenizer, small)),
    ]


SMALL = {"layers": 2, "width": 32, "heads": 2}


@pytest.fixture(scope="session")
def make_recipe(gpt_store: Path, bert_store: Path) -> Callable[..., Recipe]:
    """`make_recipe("gpt", train={"steps": 3})`: a small run's resolved recipe with sections updated."""

    def make(family: str = "gpt", **sections: dict[str, Any]) -> Recipe:
        tree: dict[str, Any] = {
            "data": {"train": str(gpt_store if family == "gpt" else bert_store)},
            "model": {"family": family, "overrides": SMALL},
            "train": {
                "steps": 6,
                "sequence_length": 32,
                "batch_rows": 4,
                "compile": "off",
                "device": "cpu",
                "seed": 5,
            },
            "optimizer": {"learning_rate": 3e-3},
        }
        for name, fields in sections.items():
            tree[name] = tree.get(name, {}) | fields
        return resolve(build_recipe(tree, Recipe, RULES))

    return make


@pytest.fixture(scope="session")
def make_plan(make_recipe: Callable[..., Recipe]) -> Callable[..., RunPlan]:
    """As `make_recipe`, opened and checked."""
    return lambda family="gpt", **sections: plan_run(make_recipe(family, **sections))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Results depend on the thread count; one is also what tests in parallel can have."""
    torch.set_num_threads(1)


SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained tiny models with a tokenizer of whole words."""
    vocabulary = {word: place for place, word in enumerate([*SPECIAL_TOKENS, *WORDS])}
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(SPECIAL_TOKENS)
    folder = tmp_path_factory.mktemp("bases")
    library.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    shape: Any = {"vocab_size": tokenizer.vocab_size, "sequence_length": 32, "layers": 2, "width": 32}
    shape |= {"heads": 2, "dropout": 0.0}
    mixture = shape | {"norm": "rmsnorm", "bias": False, "activation": "silu", "gated": True, "tied": False}
    mixture |= {"positions": "rotary", "mlp_width": 32, "experts": 4}
    made = {"bert": build(BERTConfig(**shape)), "gpt": build(GPTConfig(**shape))}
    made["mixtral"] = build(GPTConfig(**mixture))
    for name, model in made.items():
        (folder / name).mkdir()
        write_model(model, tokenizer, (folder / "tokenizer.json").read_bytes(), folder / name)
    return {name: folder / name for name in made}
