"""Tokenizers as the metadata of GGUF files have them, both ways: GPT-2's byte-level BPE, and BERT's WordPiece in lower
case, as llama.cpp reads it.
"""

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Library

from ..core.errors import Refused
from .framing import template_of
from .model_settings import GENERATION
from .new_tokenizer import byte_level, wordpiece
from .tokenizer import CONFIG, FILE, Tokenizer

ROLES = {"unknown": "unk", "padding": "pad", "seperator": "sep"}  # ours by llama.cpp's
ROLES |= {role: role for role in ("bos", "eos", "cls", "mask")}
ENDS = ("eos", "eot", "eom")  # of the text, of a turn, of a message


def tokenizer_file(path: Path, given: dict[str, Any]) -> Path | None:
    """A tokenizer.json: the one beside the file, or one made of the metadata, which lasts as long as this process.
    None where it has none. Raises Refused for a kind that is not rebuilt.
    """
    if (beside := path.with_name(FILE)).is_file():
        return beside
    kind, pre = given.get("tokenizer.ggml.model", "none"), given.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "none":
        return None
    if kind != "bert" and (kind, pre) != ("gpt2", "gpt-2"):
        why, fix = f"{kind}, {pre}", "put its tokenizer.json beside the file"
        raise Refused("a tokenizer of this kind is not rebuilt from GGUF", where=path, why=why, fix=fix)
    folder = Path(tempfile.mkdtemp(prefix="throughline-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from_gguf(given, kind).save(str(folder / FILE))
    texts, roles = given["tokenizer.ggml.tokens"], ROLES | ({"bos": "cls"} if kind == "bert" else {})
    named = {
        f"{role}_token": texts[given[key]]
        for name, role in roles.items()
        if (key := f"tokenizer.ggml.{name}_token_id") in given
    }
    chat = {"chat_template": given.get("tokenizer.chat_template")}
    (folder / CONFIG).write_text(json.dumps(named | chat))
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ENDS)
    if kind != "bert" and (ends := sorted({given[key] for key in keys if key in given})):
        (folder / GENERATION).write_text(json.dumps({"eos_token_id": ends}))
    return folder / FILE


def from_gguf(given: dict[str, Any], kind: str) -> Library:
    """The tokenizer of the metadata of a file whose kind is `gpt2` or `bert`."""
    from gguf import TokenType

    texts, kinds = list(given["tokenizer.ggml.tokens"]), given.get("tokenizer.ggml.token_type", [])
    kinds = [*kinds, *[TokenType.NORMAL] * (len(texts) - len(kinds))]
    while texts and kinds[len(texts) - 1] == TokenType.UNUSED:  # padding
        texts.pop()
    control, added = (
        [text for text, kind in zip(texts, kinds) if kind == which]
        for which in (TokenType.CONTROL, TokenType.USER_DEFINED)
    )
    if kind == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in given["tokenizer.ggml.merges"]]
        tokenizer = byte_level(models.BPE({text: i for i, text in enumerate(texts)}, merges))
        around = [given.get(f"tokenizer.ggml.add_{role}_token", False) for role in ("bos", "eos")]
        ids = [given.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")]
        before, behind = ({} if i is None or not added else {texts[i]: i} for i, added in zip(ids, around))
        if before or behind:
            tokenizer.post_processor = template_of(before, behind)
    else:
        plain = [text[1:] if text.startswith("\u2581") else "##" + text for text in texts]
        vocab = {(text if text in control else plain[i]): i for i, text in enumerate(texts)}
        tokenizer = wordpiece(vocab, True, texts[given["tokenizer.ggml.unknown_token_id"]])
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def to_gguf(tokenizer: Tokenizer, file: Path) -> tuple[str, list[str], list[str]]:
    """llama.cpp's name of the tokenizer's kind (byte-level BPE has to have GPT-2's own pattern), the tokens by id, and
    the merges. Raises Refused for one that it would read otherwise, or not at all.
    """
    config = tokenizer.config
    texts = [f"[UNUSED{i}]" for i in range(tokenizer.vocab_size)]
    for text, i in tokenizer.vocab.items():
        texts[i] = text
    kind, before = config["model"]["type"], config.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    plain = [step.get("type") for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True)
    plain = plain and config.get("normalizer") is None and not steps[0].get("add_prefix_space", True)
    if kind == "BPE" and plain and not config["model"].get("ignore_merges"):
        merges = config["model"]["merges"]
        pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        return "gpt2", texts, pairs
    if kind == "WordPiece" and (config.get("normalizer") or {}).get("lowercase") is not False:
        special = set(tokenizer.special.values())
        phantom = [
            text if i in special else text[2:] if text.startswith("##") else "\u2581" + text
            for i, text in enumerate(texts)
        ]
        return "bert", phantom, []
    what = "a WordPiece with upper case" if kind == "WordPiece" else f"this {kind} tokenizer"
    why = "of BPE it knows GPT-2's pattern here, and what it reads by WordPiece it puts in lower case: ids would differ"
    fix = "export to ONNX or Hugging Face, or move tokenizer.json away for a file that takes ids alone"
    raise Refused(f"llama.cpp does not read {what}", where=file, why=why, fix=fix)
