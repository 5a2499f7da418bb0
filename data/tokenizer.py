"""The tokenizer that every stage uses: a Hugging Face `tokenizer.json`, and which ids have a role.

Encoding never adds special tokens and never makes one out of text: a document that contains the characters
`<|endoftext|>` or `[MASK]` is encoded as those characters.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.artifact import MANIFEST, OPEN, Input, create_artifact, input_record, is_artifact
from ..core.errors import Refused, WrongUse, beside
from ..core.files import read_json, sha256_json

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT, GENERATION = OPEN
# tokens that end a turn besides the end of text: an answer that writes one has ended
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>")
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
CONVERT = "transformers converts it where it knows the model: "
CONVERT += "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(NEW) writes a tokenizer.json"
# Characters beyond which `encode` goes by way of a batch, where the library frees Python's lock.
LONG_TEXT = 4000
BATCH_BYTES = 1 << 20  # of text per call of the library: its encodings take about 100 bytes a token


class Tokenizer:
    """A tokenizer and the ids of its special roles. `text` is the content of a tokenizer.json."""

    name = "tokenizers"  # as a backend: the library itself

    def __init__(self, text: str, special: dict[str, int] | None = None, where: str = FILE):
        import tokenizers

        try:
            self._library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception for every fault of the file
            fix = "give a tokenizer.json in the Hugging Face format"
            raise Refused("not a tokenizer", where=where, why=str(error), fix=fix) from error
        self._library.no_padding()
        self._library.no_truncation()
        self._library.encode_special_tokens = True  # literal special text stays text
        self._text = text.encode()  # half of the str, which has two bytes a character for GPT-2's
        vocab = self.vocab
        if not vocab:
            fix = "give one that was trained"
            raise Refused("not a tokenizer", where=where, why="its vocabulary is empty", fix=fix)
        self.vocab_size = max(vocab.values()) + 1
        known = {role: vocab[name] for role in ROLES for name in reversed(KNOWN[role]) if name in vocab}
        found = known if special is None else special
        self.special = {role: found[role] for role in ROLES if role in found}
        if outside := {role: i for role, i in self.special.items() if not 0 <= i < self.vocab_size}:
            why = f"{outside} outside the vocabulary of {self.vocab_size:,}"
            raise Refused("a special token is no entry of the vocabulary", where=where, why=why)
        self.eos_id, self.bos_id, self.pad_id, self.unk_id, *others = map(self.special.get, ROLES)
        self.cls_id, self.sep_id, self.mask_id = others
        added = self._library.get_added_tokens_decoder()
        roles = [token for i in set(self.special.values()) if (token := added.get(i)) and not token.special]
        # whatever the file calls them: their text stays text
        self._library.add_special_tokens(sorted(token.content for token in roles))

    @classmethod
    def load(cls, path: Path | str, special: dict[str, int] | None = None) -> "Tokenizer":
        """Load from a tokenizer artifact, a store, a checkpoint, a model directory or a tokenizer.json.

        `special` has the ids of the roles where the place does not state them. Raises WrongUse when there is
        no tokenizer there and Refused when the file is damaged.
        """
        path = Path(path)
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            fix = "give a directory with a tokenizer.json, or make one: throughline data tokenizer"
            if any((path / name).is_file() for name in ("vocab.json", "encoder.json", "vocab.txt")):
                fix = f"make one of its vocabulary: throughline data tokenizer {path} --type import --out NEW"
            if (path / "tokenizer.model").is_file():
                fix = CONVERT
            if not path.exists():
                fix = beside(path, fix)
            raise WrongUse("no tokenizer here", where=path, why=f"{file} does not exist", fix=fix)
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            why = "it is not text" + ": a SentencePiece model by its name" * (file.suffix == ".model")
            raise Refused("not a tokenizer.json", where=file, why=why, fix=CONVERT) from None
        if file.suffix == ".tiktoken" or re.match(r"[A-Za-z0-9+/=]+ \d+\n", text):
            why = "a tiktoken file has tokens and ranks, and not the pattern that splits a text"
            raise Refused("not a tokenizer.json", where=file, why=why, fix=CONVERT)
        return cls(text, _stated_roles(file) if special is None else special, str(file))

    @cached_property
    def separators(self) -> int:
        """Separators between the two texts of a pair, as the file's template has them: BERT's one, RoBERTa's two."""
        made = self.config.get("post_processor") or {}
        for part in made.get("processors", [made]):
            if part.get("type") == "RobertaProcessing":
                return 2
            places = [at for at, piece in enumerate(part.get("pair") or ()) if "Sequence" in piece]
            if len(places) == 2:
                return max(places[1] - places[0] - 1, 1)
        return 1

    # Whoever needs these two parses anew: kept, GPT-2's would take 50 MB as Python objects.
    @property
    def config(self) -> dict[str, Any]:
        """The content of the tokenizer.json."""
        return json.loads(self._text)

    @property
    def vocab(self) -> dict[str, int]:
        """Every token's id, added tokens included."""
        return self._library.get_vocab(with_added_tokens=True)

    @cached_property
    def _steps(self) -> dict[str, Any]:
        """What the file says besides the vocabulary."""
        config = self.config
        return config | {"model": {"type": config["model"].get("type")}}

    @cached_property
    def type(self) -> str:
        """One of "bpe", "wordpiece", "char"; for other foreign models their name in lower case."""
        model = str(self._steps["model"]["type"] or "").lower()
        splits = self._steps.get("pre_tokenizer") or {}
        return "char" if model == "wordlevel" and splits.get("type") == "Split" else model

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every id that stands for no text: roles and the file's special added tokens."""
        added = self._steps.get("added_tokens") or []
        return frozenset(token["id"] for token in added if token.get("special")) | {*self.special.values()}

    @cached_property
    def framing(self) -> tuple[list[int], list[int]]:
        """The ids that the file's own template puts before a text and behind it; `encode` never does."""
        before, behind = list[int](), list[int]()
        ids = before
        for step in _flatten(self._steps.get("post_processor"), "processors"):
            for piece in step.get("single") or []:
                if special := piece.get("SpecialToken"):
                    ids += step["special_tokens"][special["id"]]["ids"]
                else:
                    ids = behind
        return before, behind

    @property
    def puts_bos(self) -> bool:
        """Whether the file's own habit is to put BOS before a text (Llama's is)."""
        return self.bos_id is not None and self.framing[0] == [self.bos_id]

    @cached_property
    def splits_at_space(self) -> bool:
        """Whether text may be cut before white space without changing its tokens (true of all made here)."""
        steps = _flatten(self._steps.get("pre_tokenizer"), "pretokenizers")
        normal = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
        if any(step["type"] not in normal for step in _flatten(self._steps.get("normalizer"), "normalizers")):
            return False
        if any(step["type"] == "ByteLevel" and step.get("add_prefix_space", True) for step in steps):
            return False
        added = [token["content"] for token in self._steps.get("added_tokens") or []]
        if any(" " in text or "\n" in text for text in added):
            return False
        return self.type == "char" or any(
            step["type"] in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
            or (step["type"] == "ByteLevel" and step.get("use_regex", True))
            for step in steps
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 (tokens,)."""
        if len(text) > LONG_TEXT:
            return self.encode_batch([text])[0]
        return np.array(self._library.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids as `encode` gives them, and where each token stands in the text: (tokens, 2) characters."""
        encoding = self._library.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts back to back, int32 (tokens,), and the tokens of each, int64 (texts,)."""
        ids: list[np.ndarray] = []
        start = size = 0
        for place, text in enumerate(texts):
            size += len(text)
            if size >= BATCH_BYTES or place + 1 == len(texts):
                part = texts[start : place + 1]
                encodings = self._library.encode_batch_fast(part, add_special_tokens=False)
                ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
                start, size = place + 1, 0
        lengths = np.array([len(row) for row in ids], np.int64)
        return np.concatenate([np.empty(0, np.int32), *ids]), lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; special tokens appear by name, bytes that are no UTF-8 as U+FFFD."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json in canonical form: the same for the same tokens in any layout."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return sha256_json({k: v for k, v in self.config.items() if k not in ("truncation", "padding")})

    def to_json(self) -> str:
        """The content of a tokenizer.json, without padding and truncation."""
        return json.dumps(self.config | {"truncation": None, "padding": None}, ensure_ascii=False)

    def facts(self) -> dict[str, Any]:
        """What an artifact's manifest says of it."""
        found = {"type": self.type, "vocab_size": self.vocab_size, "special": self.special}
        return found | {"fingerprint": self.fingerprint()}

    def save(
        self,
        path: Path | str,
        inputs: Sequence[Input] = (),
        facts: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a tokenizer artifact."""
        with create_artifact(path, "tokenizer", inputs=inputs, overwrite=overwrite) as draft:
            (draft.path / FILE).write_text(self.to_json(), encoding="utf-8")
            draft.facts.update(self.facts() | (facts or {}))


def tokenizer_records(path: Path | str) -> list[Input]:
    """How an artifact names its tokenizer: ours as such, of a foreign place the files read and no weights."""
    if is_artifact(path):
        return [input_record(path)]
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    return [input_record(found) for found in (file, file.parent / CONFIG) if found.is_file()]


def beside_model(directory: Path, name: str) -> Path:
    """A file of settings of a model directory; of a checkpoint that has none, its run's."""
    own = directory / name
    return own if own.is_file() or directory.parent.name != "checkpoints" else directory.parents[1] / name


def chat_template(directory: Path) -> str | None:
    """The chat template of a model directory: its file, or the (default) one in tokenizer_config.json."""
    if (file := beside_model(directory, CHAT)).is_file():
        return file.read_text(encoding="utf-8")
    stated = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    source = stated.get("chat_template") if isinstance(stated, dict) else None
    if isinstance(source, list):  # several by name
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def write_beside(target: Path, tokenizer: "Tokenizer", source: Path | None, longest: int) -> None:
    """What stands beside a tokenizer.json, written to a directory: tokenizer_config.json, which names the special
    tokens, and of the directory `source` what `copy_chat` takes.
    """
    texts = {i: text for text, i in tokenizer.vocab.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    config |= {f"{role}_token": texts[i] for role, i in tokenizer.special.items()}
    (target / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    if source is not None:
        copy_chat(source, target)


def copy_chat(source: Path, target: Path) -> None:
    """The chat template and the defaults of generation of a model directory, as far as it has them."""
    if (template := chat_template(source)) is not None:
        (target / CHAT).write_text(template, encoding="utf-8")
    if (defaults := beside_model(source, GENERATION)).is_file():
        (target / GENERATION).write_bytes(defaults.read_bytes())


def tokenizer_beside(store: Path | str) -> Path:
    """Where a token store's tokenizer.json is if it has one: in it, or beside a Megatron prefix."""
    store = Path(store)
    return (store if store.is_dir() else store.parent) / FILE


def _flatten(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def _stated_roles(file: Path) -> dict[str, int] | None:
    """Roles as a tokenizer artifact or a Hugging Face `tokenizer_config.json` beside the file states them."""
    manifest = file.parent / MANIFEST
    if manifest.is_file():
        stated = read_json(manifest).get("facts", {}).get("special")
        if isinstance(stated, dict):
            return {str(role): int(i) for role, i in stated.items()}
    config = file.parent / CONFIG
    if not config.is_file():
        return None
    stated, tokenizer = read_json(config), read_json(file)
    if not (isinstance(stated, dict) and isinstance(tokenizer, dict)):
        why = f"it or {FILE} is no JSON object"
        raise Refused("not a tokenizer", where=config, why=why, fix="restore both files")
    vocab = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    roles = {}
    for role in ROLES:
        token = stated.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        if name in vocab:
            roles[role] = vocab[name]
    return roles or None
