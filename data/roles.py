"""Which tokens have a role: end of text, begin of text, padding, ..."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.artifact import MANIFEST
from ..core.files import read_json

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

ROLES = ("eos", "bos", "pad", "unk", "cls", "sep", "mask")
# Names by which the tokens of a role are known where no manifest says so: GPT-2, Llama, BERT and ours.
KNOWN = {
    "eos": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
    "pad": ("[PAD]", "<|pad|>", "<pad>"),
    "unk": ("[UNK]", "<|unk|>", "<unk>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}


def manifest_roles(file: Path) -> dict[str, int] | None:
    """Roles as the manifest of a tokenizer artifact beside the file states them."""
    manifest = file.parent / MANIFEST
    if not manifest.is_file():
        return None
    stated = read_json(manifest).get("facts", {}).get("special")
    return {str(role): int(i) for role, i in stated.items()} if isinstance(stated, dict) else None


def pick_roles(
    special: dict[str, int] | None, settings: dict[str, Any], vocab: dict[str, int]
) -> dict[str, int]:
    """The ids of the roles: those given, else those named by a tokenizer_config.json, else those of usual
    names.
    """
    if special is not None:
        return {role: special[role] for role in ROLES if role in special}
    named: dict[str, int] = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str) and name in vocab:
            named[role] = vocab[name]
    return named or {role: vocab[name] for role in ROLES for name in reversed(KNOWN[role]) if name in vocab}


def no_end(tokenizer: "Tokenizer") -> str:
    """A sentence for a tokenizer whose end-of-text token is unknown: how to name the token."""
    texts = [token.content for token in tokenizer.added_tokens.values()]
    likely = [text for text in texts if re.search("end|eos|eot|</s>|stop", text, re.IGNORECASE)]
    name = f'"eos_token": "{(likely or ["TOKEN"])[0]}"'
    what = "no end-of-text token is known of the tokenizer"
    file = Path(tokenizer.where).parent / "tokenizer_config.json"
    if file.is_file():
        return f"{what}; add {name} to {file}"
    return f"{what}; name it: echo '{{{name}}}' > {file}"
