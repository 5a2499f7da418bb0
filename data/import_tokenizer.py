"""Tokenizers made of the vocabularies that others published: GPT-2's, BERT's, or a tokenizer.json."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ..core.errors import Refused, WrongUse
from ..core.files import read_json
from .tokenizer import FILE, Tokenizer

EOT = "<|endoftext|>"
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_library(vocab: dict[str, int], lowercase: bool) -> Library:
    """BERT's tokenizer over a vocabulary: its normaliser, its splitting, greedy WordPiece."""
    unknown = "[UNK]"
    library = Library(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    roles = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    library.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", roles
    )
    library.add_special_tokens(list(BERT_SPECIAL))
    return library


def import_tokenizer(path: Path | str, lowercase: bool | None = None) -> tuple[Tokenizer, list[Path]]:
    """A GPT-2 vocabulary (encoder.json + vocab.bpe, vocab.json + merges.txt), vocab.txt, or tokenizer.json.

    `path` is the directory or one of the files; also returned are the files it was made from. `lowercase` of
    a BERT vocabulary is found out from its entries when not given. Raises WrongUse and Refused.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise WrongUse("no such path", where=path, fix="check the spelling")
    for names in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        files = [folder / name for name in names]
        if (path.is_dir() or path in files) and all(file.is_file() for file in files):
            return _gpt2(*files), files
    vocab = path / "vocab.txt" if path.is_dir() else path
    if vocab.suffix == ".txt" and vocab.is_file():
        return _bert(vocab, lowercase), [vocab]
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return Tokenizer.load(file), [file]
    why = "looked for encoder.json + vocab.bpe, vocab.json + merges.txt, vocab.txt, tokenizer.json"
    fix = "give the directory that holds one of these"
    raise WrongUse("no vocabulary here", where=path, why=why, fix=fix)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fix = "give the file as it was published"
        raise Refused("a vocabulary is no UTF-8 text", where=file, why=str(error), fix=fix) from error


def _gpt2(encoder: Path, merges: Path) -> Tokenizer:
    vocab: dict[str, int] = read_json(encoder)
    lines = _read(merges).split("\n")
    pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    known = all(
        len(pair) == 2 and pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab for pair in pairs
    )
    if not known:
        fix = f"give the {merges.name} that came with {encoder.name}"
        raise WrongUse("merges and vocabulary do not belong together", where=merges, fix=fix)
    library = Library(models.BPE(vocab, pairs))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if EOT in vocab:
        library.add_special_tokens([EOT])
    return Tokenizer(library.to_str())


def _bert(file: Path, lowercase: bool | None) -> Tokenizer:
    tokens = _read(file).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): place for place, token in enumerate(tokens)}
    if missing := [name for name in BERT_SPECIAL if name not in vocab]:
        why = f"it lacks {', '.join(missing)}"
        raise WrongUse("not a BERT vocabulary", where=file, why=why, fix="give BERT's vocab.txt")
    if lowercase is None:
        lowercase = not any(token != token.lower() for token in vocab if not token.startswith("["))
    return Tokenizer(bert_library(vocab, lowercase).to_str())
