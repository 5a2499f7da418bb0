"""Token roles: end of text, begin of text, padding, ..."""

from pathlib import Path
from typing import Any

from ..core.artifact import MANIFEST
from ..core.errors import Refused
from ..core.files import read_json

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
# Tokens that end a turn, where the template does not show by itself what ends one.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")


def manifest_roles(file: Path) -> dict[str, int] | None:
    """Roles as the manifest of a tokenizer artifact beside the file states them."""
    manifest = file.parent / MANIFEST
    if not manifest.is_file():
        return None
    stated = read_json(manifest).get("facts", {}).get("special")
    return {str(role): int(i) for role, i in stated.items()} if isinstance(stated, dict) else None


def settings_beside(file: Path) -> dict[str, Any]:
    """What stands beside a tokenizer.json about its tokens: tokenizer_config.json, where older models have it
    special_tokens_map.json, and the end token of the model's config.json as `eos_token_id`.
    """
    settings = _object_beside(file, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # as transformers decides which of the two counts
        settings |= _object_beside(file, "special_tokens_map.json")
    end = _object_beside(file, "config.json").get("eos_token_id")
    return settings | {"eos_token_id": end[0] if isinstance(end, list) and end else end}


def _object_beside(file: Path, name: str) -> dict[str, Any]:
    """The content of a file of settings beside a tokenizer.json, empty where there is none."""
    place = file.parent / name
    if not place.is_file():
        return {}
    stated = read_json(place)
    if not isinstance(stated, dict):
        raise Refused("not a tokenizer", where=place, why="it is no JSON object", fix="restore the file")
    return stated


def pick_roles(
    special: dict[str, int] | None, settings: dict[str, Any], vocab: dict[str, int]
) -> dict[str, int]:
    """The ids of the roles: those given, else those that the settings name, else those of usual names.

    The end token that the model's config.json states counts where no other is known.
    """
    if special is not None:
        return {role: special[role] for role in ROLES if role in special}
    roles: dict[str, int] = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str) and name in vocab:
            roles[role] = vocab[name]
    if not roles:
        roles = {role: vocab[name] for role in ROLES for name in reversed(KNOWN[role]) if name in vocab}
    end = settings.get("eos_token_id")
    if "eos" not in roles and isinstance(end, int) and end in vocab.values():
        roles["eos"] = end
    return {role: roles[role] for role in ROLES if role in roles}
