"""Small random models and the shipped tokenizers for the tests of evaluation."""

import sys
from pathlib import Path

import pytest
import torch
from throughline.data.tokenizer import Tokenizer
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.gpt import GPT

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests

LLAMA = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "gated": True,
    "activation": "silu",
    "kv_heads": 2,
    "bias": False,
    "tied": False,
}


def spread(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random weights wide enough that log-probabilities differ by whole nats between tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def gpt2_tokenizer(samples: Path) -> Tokenizer:
    from tokenizers.implementations import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer(
        str(samples / "gpt2-bpe" / "encoder.json"), str(samples / "gpt2-bpe" / "vocab.bpe")
    )
    made.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(made.to_str())


@pytest.fixture(scope="session")
def bos_tokenizer(samples: Path) -> Tokenizer:
    """A small vocabulary whose file puts <s> before every text, as Llama's does."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing

    made = ByteLevelBPETokenizer()
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:50_000]
    made.train_from_iterator(
        text.splitlines(keepends=True), vocab_size=600, special_tokens=["</s>", "<s>"], show_progress=False
    )
    made._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(made.to_str())


@pytest.fixture(scope="session")
def bert_tokenizer(samples: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers

    words = (samples / "bert-base-uncased" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    made = Library(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"])
    return Tokenizer(made.to_str())


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def gpt(request: pytest.FixtureRequest) -> GPT:
    shape = LLAMA if request.param == "llama" else {}
    return spread(GPT(GPTConfig(layers=2, width=64, heads=4, sequence_length=64, **shape)), 0)


@pytest.fixture(scope="session", params=["sliding", "fixed", "random", "some layers", "capped"])
def windowed_gpt(request: pytest.FixtureRequest) -> GPT:
    pattern = {"attention_window": 8, "attention_block": 4, "attention_global_blocks": 1}
    if request.param == "random":
        pattern |= {"attention_random_blocks": 1}
    elif request.param in ("some layers", "capped"):
        near = {"attention_window": 8, "layer_pattern": "lg"} if request.param == "some layers" else {}
        pattern = LLAMA | near | {"attention_softcap": 2.0, "logit_softcap": 5.0, "qk_norm": "head"}
    else:
        pattern |= {"attention_kind": request.param}
    return spread(GPT(GPTConfig(layers=2, width=64, heads=4, sequence_length=64, **pattern)), 5)


@pytest.fixture(scope="session")
def small_gpt() -> GPT:
    return spread(GPT(GPTConfig(layers=2, width=32, heads=2, sequence_length=96)), 1)


@pytest.fixture(scope="session")
def bert() -> BERT:
    return spread(BERT(BERTConfig(layers=2, width=64, heads=2, sequence_length=64)), 2)


@pytest.fixture(scope="session")
def gpt_directory(tmp_path_factory: pytest.TempPathFactory, gpt2_tokenizer: Tokenizer) -> Path:
    """A Hugging Face directory of a random GPT-2 that `throughline eval` and lm_eval both open."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("models") / "gpt"
    model = spread(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=128)), 3)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(gpt2_tokenizer.to_json())
    special = '"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"'
    (path / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "PreTrainedTokenizerFast", {special}}}'
    )
    return path


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory: pytest.TempPathFactory, bos_tokenizer: Tokenizer) -> Path:
    """The same with a small vocabulary: opened and scored in a moment."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("models") / "small"
    shape = {
        "vocab_size": bos_tokenizer.vocab_size,
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 16,
        "n_positions": 128,
    }
    spread(GPT2LMHeadModel(GPT2Config(**shape)), 4).save_pretrained(path)
    (path / "tokenizer.json").write_text(bos_tokenizer.to_json())
    return path
