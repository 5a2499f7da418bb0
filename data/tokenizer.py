"""The tokenizer that every stage uses: a Hugging Face `tokenizer.json`, and which ids have a role.

There are two ways to encode. `encode` is for documents: it adds no special token and makes none out of text,
so the characters `<|endoftext|>` or `[MASK]` stay characters. `encode_prompt` is for prompts that a user or a
template wrote: it gives the ids of transformers' `tokenizer(text)`. Both depend on nothing but the text:
truncation, padding and the random merges of BPE (dropout), which a file may ask for, are switched off.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.artifact import Input, create_artifact, input_record, is_artifact
from ..core.errors import Refused, WrongUse, beside
from ..core.files import sha256_json
from .detokenizer import Detokenizer, JoinedBytes, JoinedTokens, TokenTexts, WindowDetokenizer, pieces_of
from .framing import framing_of, steps_of
from .roles import ROLES, TURN_ENDS, manifest_roles, pick_roles, settings_beside

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
# Put into a special token that a message spells: the token is then encoded as characters. No text holds it by chance.
BREAK = "\ufdd0\ufdd1\ufdd0"
CONVERT = "transformers converts it where it knows the model: "
CONVERT += "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(NEW) writes a tokenizer.json"
# Characters beyond which `encode` goes by way of a batch, where the library frees Python's lock.
LONG_TEXT = 4000
BATCH_BYTES = 1 << 20  # of text per call of the library: its encodings take about 100 bytes a token


class Tokenizer:
    """A tokenizer and the ids of its special roles. `text` is the content of a tokenizer.json."""

    name = "tokenizers"  # as a backend: the library itself

    def __init__(
        self,
        text: str,
        special: dict[str, int] | None = None,
        where: str = FILE,
        settings: dict[str, Any] | None = None,
    ):
        """`special` has the ids of the roles; `settings` are those of `settings_beside`."""
        try:
            self._library = _library(text)
        except Exception as error:  # the library raises plain Exception for every fault of the file
            fix = "give a tokenizer.json in the Hugging Face format"
            raise Refused("not a tokenizer", where=where, why=str(error), fix=fix) from error
        self._library.encode_special_tokens = True  # literal special text stays text
        self.where = where
        self._text = text.encode()  # half of the str, which has two bytes a character for GPT-2's
        vocab = self.vocab
        if not vocab:
            fix = "give one that was trained"
            raise Refused("not a tokenizer", where=where, why="its vocabulary is empty", fix=fix)
        self.vocab_size = max(vocab.values()) + 1
        self.special = pick_roles(special, settings or {}, vocab)
        if outside := {role: i for role, i in self.special.items() if not 0 <= i < self.vocab_size}:
            why = f"{outside} outside the vocabulary of {self.vocab_size:,}"
            raise Refused("a special token is no entry of the vocabulary", where=where, why=why)
        self.eos_id, self.bos_id, self.pad_id, self.unk_id, *others = map(self.special.get, ROLES)
        self.cls_id, self.sep_id, self.mask_id = others
        # whatever the file calls them, the text of roles stays text; how they take blanks stays, too
        added = self.added_tokens
        roles = [added[i] for i in sorted({*self.special.values()}) if i in added and not added[i].special]
        for token in roles:
            token.special = True
        self._role_tokens = roles
        self._library.add_special_tokens(roles)

    @classmethod
    def load(cls, path: Path | str, special: dict[str, int] | None = None) -> "Tokenizer":
        """Load from a tokenizer artifact, a store, a checkpoint, a model directory or a tokenizer.json.

        `special` has the ids of the roles where the place does not state them. Raises WrongUse when there is
        no tokenizer there and Refused when the file is damaged.
        """
        path = Path(path)
        latest = path / "checkpoints" / "latest"
        if latest.is_file() and not (path / FILE).is_file():  # a run's is beside its weights
            path = latest.parent / latest.read_text(encoding="utf-8").strip()
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            fix = "give a directory with a tokenizer.json, or make one: throughline data tokenizer TEXT --out DIRECTORY"
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
        if special is None:
            special = manifest_roles(file)
        return cls(text, special, str(file), settings_beside(file))

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
        """The content of the tokenizer.json, without what makes encoding depend on more than the text."""
        config = json.loads(self._text) | {"truncation": None, "padding": None}
        if config["model"].get("dropout") is not None:
            config["model"]["dropout"] = None
        return config

    @property
    def vocab(self) -> dict[str, int]:
        """Every token's id, added tokens included."""
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[int, Any]:
        """The library's `AddedToken` of every id that stands outside of the model's own vocabulary."""
        return self._library.get_added_tokens_decoder()

    @property
    def guarded_tokens(self) -> list[Any]:
        """The added tokens that a message must not spell: special ones, and those that end turns by any flag."""
        added = self.added_tokens.values()
        return [token for token in added if token.special or token.content in TURN_ENDS]

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
        """The ids that the post-processor puts before a text and behind it; `encode` never does."""
        return framing_of(self._steps.get("post_processor"))

    @cached_property
    def document_framing(self) -> tuple[list[int], list[int]]:
        """The framing of a document that a decoder learns from or continues: BOS, and EOS where the file asks
        for it.

        It is empty for the tokenizer of an encoder, one with a mask token: BERT's rows get their [CLS] and
        [SEP] later.
        """
        return ([], []) if self.mask_id is not None else self.framing

    @property
    def puts_bos(self) -> bool:
        """Whether the post-processor puts BOS before a text (Llama's does)."""
        return self.bos_id is not None and self.framing[0] == [self.bos_id]

    @cached_property
    def splits_at_space(self) -> bool:
        """Whether text may be cut before white space without changing its tokens (true of all made here)."""
        steps = steps_of(self._steps.get("pre_tokenizer"), "pretokenizers")
        normal = {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
        if any(step["type"] not in normal for step in steps_of(self._steps.get("normalizer"), "normalizers")):
            return False
        if any(step["type"] == "ByteLevel" and step.get("add_prefix_space", True) for step in steps):
            return False
        if any(step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" for step in steps):
            return False
        for token in self._steps.get("added_tokens") or []:
            takes_blanks = token.get("lstrip") or token.get("rstrip") or re.search(r"\s", token["content"])
            if takes_blanks and not token.get("special"):  # `encode` finds no special tokens
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

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Ids of a prompt, int64 (tokens,): those of transformers' `tokenizer(text, add_special_tokens=...)`.

        Special tokens that the text spells are those tokens. The post-processor's BOS and EOS are added, but
        never a second time to a text that begins or ends with them. A prompt without any token is the
        end-of-text token, after which a model begins a document.
        """
        ids = self.parse(text)
        if add_special_tokens:
            ids = self.framed(ids)
        if not ids and self.eos_id is not None:
            ids = [self.eos_id]
        return np.array(ids, np.int64)

    def parse(self, text: str) -> list[int]:
        """Ids of a text in which special tokens count, except those that hold a `BREAK`; nothing is added."""
        if BREAK in text:
            return self._parse_marked(text)
        if len(text) > LONG_TEXT:  # the library frees Python's lock for a batch
            return self._parsing.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._parsing.encode(text, add_special_tokens=False).ids

    def _parse_marked(self, text: str) -> list[int]:
        """The same for a text with a `BREAK`: guarded tokens without one become their aliases, all else characters."""
        library, aliases, ids = self._aliased
        parts = re.split("(" + "|".join(map(re.escape, aliases)) + ")", text)
        # no text may spell an alias
        joined = "".join(aliases.get(part) or re.sub(f"[{BREAK}]", "", part) for part in parts)
        encoding = library.encode_batch_fast([joined], add_special_tokens=False)[0]
        return [ids.get(i, i) for i in encoding.ids]

    def framed(self, ids: list[int]) -> list[int]:
        """The ids of a text with those that the post-processor adds, unless the text brings them itself."""
        before, behind = self.framing
        if before and ids[: len(before)] == before:
            before = []
        if behind and ids[-len(behind) :] == behind:
            behind = []
        return before + ids + behind

    @cached_property
    def _parsing(self) -> Any:
        """The library's tokenizer that makes special tokens out of their text."""
        library = _library(self._text.decode())
        library.add_special_tokens(self._role_tokens)
        return library

    @cached_property
    def _aliased(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """A tokenizer in which each guarded token has an alias, the alias of each text, the id of each alias's id."""
        import tokenizers

        library = _library(self._text.decode())
        library.encode_special_tokens = True
        guarded = self.guarded_tokens
        for token in guarded:
            token.special = True  # else the library makes it out of text
        library.add_special_tokens(guarded)
        guarded.sort(key=lambda token: -len(token.content))  # of two that begin alike the longer one counts
        aliases, ids = dict[str, str](), dict[int, int]()
        for number, token in enumerate(guarded):
            alias = f"{BREAK}{chr(0xE000 + number)}{BREAK}"
            strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            library.add_tokens([tokenizers.AddedToken(alias, normalized=False, **strips)])
            aliases[token.content] = alias
            ids[library.token_to_id(alias)] = library.token_to_id(token.content)
        return library, aliases, ids

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Where `encode_prompt` finds special tokens in a text: (first, last + 1) characters of each."""
        encoding = self._parsing.encode(text, add_special_tokens=False)
        special = self.texts.special_ids
        return [span for i, span in zip(encoding.ids, encoding.offsets) if i in special]

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

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = False) -> str:
        """Text of the ids by the library; special tokens appear by name unless skipped, bytes that are no
        UTF-8 as U+FFFD.
        """
        return self._library.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @cached_property
    def texts(self) -> TokenTexts:
        """Text that each token contributes to a decoded answer."""
        return TokenTexts(self._library, self._steps.get("decoder"))

    def detokenizer(self, before: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Text from ids that come one by one and continue those of `before`. See `Detokenizer`."""
        if self.texts.is_byte_level:
            return JoinedBytes(self.texts, before, skip_special_tokens)
        if self.texts.is_separate:
            return JoinedTokens(self.texts, before, skip_special_tokens)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens), before)

    def pieces(
        self, ids: Sequence[int] | np.ndarray, before: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each id; their join is the text of all. A character of several tokens is the last
        one's.

        The sums of their lengths are the tokens' offsets in the text.
        """
        return pieces_of(self.detokenizer(before, skip_special_tokens), ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 that a token adds behind another one, which may be a part of a character."""
        return self.texts.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds behind another one, U+FFFD for a part of a character; special tokens by
        name.
        """
        return self.texts.text_of(token_id)

    def fingerprint(self) -> str:
        """sha256 of the tokenizer.json in canonical form: the same for the same tokens in any layout."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return sha256_json({k: v for k, v in self.config.items() if k not in ("truncation", "padding")})

    def to_json(self) -> str:
        """The content of a tokenizer.json, as `config` has it."""
        return json.dumps(self.config, ensure_ascii=False)

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


def tokenizer_beside(store: Path | str) -> Path:
    """Where a token store's tokenizer.json is if it has one: in it, or beside a Megatron prefix."""
    store = Path(store)
    return (store if store.is_dir() else store.parent) / FILE


def _library(text: str) -> Any:
    """The library's tokenizer of a tokenizer.json, whose ids depend on the text alone."""
    import tokenizers

    library = tokenizers.Tokenizer.from_str(text)
    library.no_padding()
    library.no_truncation()
    if getattr(library.model, "dropout", None) is not None:
        library.model.dropout = None
    return library
