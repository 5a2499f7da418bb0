"""Tokenizers like those that users bring, made here: SentencePiece's BPE with byte fallback (Llama 2,
Mistral, Phi-3), Unigram, byte-level BPE (Llama 3, Qwen), WordPiece and characters. `write_sentencepiece`
makes a model directory.

The vocabularies are small, so most characters of other scripts are spelled in bytes or unknown.
"""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = (*string.ascii_letters, *string.digits, *string.punctuation, "\n")
# Words of the vocabularies; each grows by one letter in a merge.
WORDS = ("the", "and", "hello", "world", "answer", "é", "ж", "日", "न")
TURNS = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _merges(words: tuple[str, ...]) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens and the merges that make each word from its left end."""
    tokens, merges = list[str](), list[tuple[str, str]]()
    for word in words:
        for end in range(2, len(word) + 1):
            if (pair := (word[: end - 1], word[end - 1])) not in merges:
                merges.append(pair)
                tokens.append(word[:end])
    return tokens, merges


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2 and Phi-3: a blank before the text, bytes for unknown characters, `<s>` in front, marks of
    turns that strip the white space beside them, and a line break of the user's own.
    """
    words = tuple(f"\u2581{word}" for word in WORDS)
    tokens, merges = _merges(words)
    letters = dict.fromkeys([*LETTERS, "\u2581", *"".join(WORDS)])
    bytes_256 = [f"<0x{byte:02X}>" for byte in range(256)]
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *bytes_256, *letters, *tokens])
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    marks = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    made.add_special_tokens([AddedToken(name, normalized=False, rstrip=True) for name in marks])
    made.add_special_tokens([AddedToken("<|mark|>", normalized=False, lstrip=True)])
    made.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("<think>", normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    return made


def unigram() -> tokenizers.Tokenizer:
    """As T5 and XLM-R: a Unigram model over words with a blank in front, `</s>` behind a text, no bytes."""
    names = [*LETTERS, "\u2581", *"".join(WORDS), *(f"\u2581{word}" for word in WORDS)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(name, -3.0 - 1 / len(name)) for name in dict.fromkeys(names)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 1)]
    )
    return made


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3: bytes as letters, a BOS in front, marks of turns that are special and one that is not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = _merges(tuple(f"\u0120{word}" for word in WORDS if word.isascii()))
    vocab = {name: number for number, name in enumerate([*letters, *tokens])}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>")
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    made.add_tokens([AddedToken("</think>", normalized=False)])
    begin = made.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def wordpiece() -> tokenizers.Tokenizer:
    """As BERT: lower case, pieces of words, [CLS] and [SEP] around a text."""
    letters = [letter for letter in LETTERS if letter.strip() and letter == letter.lower()]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *WORDS])
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def characters() -> tokenizers.Tokenizer:
    """Every character a token, others unknown."""
    special = ["<|endoftext|>", "<|unk|>"]
    names = dict.fromkeys([*special, *LETTERS, " ", *"".join(WORDS), "🙂"])
    vocab = {name: number for number, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(special)
    return made


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "byte-level": byte_level,
    "wordpiece": wordpiece,
    "characters": characters,
}


def write_sentencepiece(directory: Path, generation: dict[str, Any] | None = None) -> Path:
    """A small Llama of random weights with the SentencePiece tokenizer, a chat template and two end tokens,
    as a Hugging Face directory. `generation`: further fields of generation_config.json.
    """
    from safetensors.torch import save_file
    from throughline.models.config import GPTConfig
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build

    library = sentencepiece()
    directory.mkdir(parents=True)
    library.save(str(directory / "tokenizer.json"))
    form = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False}
    size = {"sequence_length": 256, "layers": 2, "width": 48, "heads": 4}
    config = GPTConfig(vocab_size=library.get_vocab_size(), tied=False, **size, **form)
    fields, state = to_huggingface(build(config, 3))
    tensors = {name: (tensor * 8 if tensor.dim() == 2 else tensor) for name, tensor in state.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    ends = [library.token_to_id(name) for name in ("</s>", "<|end|>")]
    stated = {
        "config.json": fields | {"bos_token_id": 1, "eos_token_id": 2},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": ends} | (generation or {}),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": TURNS,
        },
    }
    for name, content in stated.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def write_ending(source: Path, directory: Path) -> Path:
    """The model of `write_sentencepiece` with weights that make it say id 0 alone, which generation_config.json and
    config.json name as an end.
    """
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": tensors["model.norm.weight"] * 0}, directory / "model.safetensors"
    )
    for name in ("config.json", "generation_config.json"):
        stated = json.loads((source / name).read_text()) | {"eos_token_id": [2, 0]}
        (directory / name).write_text(json.dumps(stated))
    return directory
