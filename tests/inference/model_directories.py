"""Small models with tokenizers, written as Hugging Face directories."""

import json
from pathlib import Path

import tokenizers
from safetensors.torch import save_file
from throughline.models.huggingface import to_huggingface
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Wörter mit Umlauten, café, naïve, 東京, Ελλάδα and 🙂 emoji.",
    "A model reads text and says which word is likely to come next.",
] * 20


def gpt_tokenizer(vocab_size: int = 300) -> tokenizers.Tokenizer:
    """Byte-level BPE with an end-of-text token: random ids decode to cut characters, as a bad model's do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def bert_tokenizer() -> tokenizers.Tokenizer:
    """WordPiece with BERT's special tokens, every word of the text and every letter."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for line in TEXT for word in line.replace(",", " ,").replace(".", " .").split()})
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocab = dict.fromkeys([*special, *words, *letters, *(f"##{letter}" for letter in letters)])
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_model(path: Path, model, tokenizer: tokenizers.Tokenizer) -> Path:
    """A Hugging Face directory of ours."""
    path.mkdir()
    fields, state = to_huggingface(model)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def opinionated(model):
    """Scale the matrices up, so that logits differ by several units and no arg-max hangs on rounding."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return model
