"""A GGUF file of anybody's: its shape, its precision and its tokenizer, read from its metadata.

Decoders of every architecture that llama.cpp runs, and BERT encoders. The tokenizer is rebuilt as a tokenizer.json
for GPT-2's byte-level BPE and for WordPiece; for another kind a tokenizer.json beside the file is used.
"""

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from ...core.errors import Refused, extra
from ...data.tokenizer import CONFIG, FILE
from ...models.config import BERTConfig, GPTConfig, ModelConfig
from ...models.sentence import Sentence
from .llama_backend import EXTRA
from .source import no_model

PRECISIONS = {0: "f32", 1: "f16", 2: "q4_0", 7: "q8_0"}  # by llama.cpp's number of the file type
ROLES = {  # ours by llama.cpp's
    **{role: role for role in ("bos", "eos", "cls", "mask")},
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",
}
POOLINGS: dict[int, Literal["mean", "cls"]] = {0: "mean", 1: "mean", 2: "cls"}  # llama.cpp's, none among them
CONTEXT_MOST = 8192  # tokens; a cache of every row takes this much memory


def read_gguf(path: Path) -> tuple[ModelConfig, str, Path | None, Sentence]:
    """Config, precision, tokenizer.json and how a BERT embeds. Raises WrongUse without the gguf library or the file,
    Refused for a file that is cut or of a shape that is not known.
    """
    if not path.is_file():
        raise no_model(path)
    gguf = extra("gguf", "reading a GGUF file", EXTRA)
    try:
        reader = gguf.GGUFReader(path)
        given = {name: field.contents() for name, field in reader.fields.items()}
        config = config_of(given, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise Refused(
            "this is no whole GGUF model", where=path, why=why, fix="fetch or export it again"
        ) from error
    number = given.get("general.file_type", -1)
    kind = given.get("bert.pooling_type", gguf.PoolingType.NONE)
    if kind not in POOLINGS:
        why = f"it pools by {gguf.PoolingType(kind).name}"
        raise Refused("this model embeds in a way that is not here", where=path, why=why)
    sentence = Sentence(POOLINGS[kind])
    return config, PRECISIONS.get(number, f"gguf-{number}"), _tokenizer_file(path, given), sentence


def config_of(given: dict[str, Any], tied: bool) -> ModelConfig:
    """The shape that the metadata describe. Raises KeyError for a field that is missing."""
    name = given["general.architecture"]
    size = {key: given[f"{name}.{key}"] for key in ("context_length", "embedding_length", "block_count")}
    heads, texts = given[f"{name}.attention.head_count"], given.get("tokenizer.ggml.tokens", [])
    shape: dict[str, Any] = {
        "vocab_size": given.get(f"{name}.vocab_size", len(texts)),
        "sequence_length": min(size["context_length"], CONTEXT_MOST),
        "layers": size["block_count"],
        "width": size["embedding_length"],
        "heads": heads,
        "mlp_width": given[f"{name}.feed_forward_length"],
    }
    if name == "bert":
        return BERTConfig(**shape, nsp=False)
    shape |= {"kv_heads": given.get(f"{name}.attention.head_count_kv", heads)}
    shape |= {"head_width": given.get(f"{name}.attention.key_length", size["embedding_length"] // heads)}
    if name == "gpt2":
        return GPTConfig(**shape, tied=tied)
    llama: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True}
    theta = given.get(f"{name}.rope.freq_base", 10000.0)
    return GPTConfig(**shape, **llama, bias=False, tied=tied, rope_theta=theta)


def _tokenizer_file(path: Path, given: dict[str, Any]) -> Path | None:
    """A tokenizer.json: the one beside the file, or one made of the metadata, which lasts as long as this process."""
    if (beside := path.with_name(FILE)).is_file():
        return beside
    kind, pre = given.get("tokenizer.ggml.model", "none"), given.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "none":
        return None
    if kind != "bert" and (kind, pre) != ("gpt2", "gpt-2"):
        fix = "put its tokenizer.json beside the file"
        why = f"{kind}, {pre}"
        raise Refused("a tokenizer of this kind is not rebuilt from GGUF", where=path, why=why, fix=fix)
    folder = Path(tempfile.mkdtemp(prefix="throughline-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _rebuilt(given, kind).save(str(folder / FILE))
    texts, roles = given["tokenizer.ggml.tokens"], ROLES | ({"bos": "cls"} if kind == "bert" else {})
    named = {
        f"{role}_token": texts[given[key]]
        for name, role in roles.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in given
    }
    (folder / CONFIG).write_text(json.dumps(named))
    return folder / FILE


def _rebuilt(given: dict[str, Any], kind: str) -> Any:
    """GPT-2's byte-level BPE, or BERT's WordPiece in lower case, as llama.cpp reads it."""
    from gguf import TokenType
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    texts, kinds = list(given["tokenizer.ggml.tokens"]), given.get("tokenizer.ggml.token_type", [])
    kinds = [*kinds, *[TokenType.NORMAL] * (len(texts) - len(kinds))]
    while texts and kinds[len(texts) - 1] == TokenType.UNUSED:  # padding
        texts.pop()
    control = [text for text, what in zip(texts, kinds) if what == TokenType.CONTROL]
    if kind == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in given["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        plain = [text[1:] if text.startswith("\u2581") else "##" + text for text in texts]
        vocab = {(text if text in control else plain[i]): i for i, text in enumerate(texts)}
        unknown = texts[given["tokenizer.ggml.unknown_token_id"]]
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(control)
    return tokenizer
