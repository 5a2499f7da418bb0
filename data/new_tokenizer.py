"""New tokenizers: byte-level BPE, WordPiece and characters, trained on a sample of text, or made of others' vocabulary.

Training is a pure function of the files and the settings. The library's WordPiece trainer is not (ids of continuing
characters follow the order of a hash map), so WordPiece is trained by its BPE trainer over words whose continuing
characters are letters of their own.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from ..core.console import amount, progress, say, warn
from ..core.errors import Failed, Refused, WrongUse
from ..core.files import read_json
from ..core.hardware import memory_limit_bytes
from .ingest.inputs import Source
from .ingest.readers import Reader, ReadOptions, splittable
from .ingest.text import MAX_REPLACED, check_replaced, utf8_bytes
from .tokenizer import FILE, Tokenizer

EOT = "<|endoftext|>"
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def byte_level(model: models.BPE) -> Library:
    """GPT-2's splitting around a BPE."""
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def wordpiece(vocab: dict[str, int], lowercase: bool, unknown: str = "[UNK]") -> Library:
    """BERT's normaliser, its splitting, greedy WordPiece over a vocabulary."""
    library = Library(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def bert_library(vocab: dict[str, int], lowercase: bool) -> Library:
    """BERT's tokenizer over a vocabulary, with its special tokens around a text."""
    library = wordpiece(vocab, lowercase)
    roles = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    library.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, roles)
    library.add_special_tokens(list(BERT_SPECIAL))
    return library


def import_tokenizer(path: Path | str, lowercase: bool | None = None) -> tuple[Tokenizer, list[Path]]:
    """A GPT-2 vocabulary (encoder.json + vocab.bpe, vocab.json + merges.txt), vocab.txt, or tokenizer.json, of which
    `path` is the directory or a file; and the files read. `lowercase` of a BERT vocabulary is seen from its entries
    when not given. Raises WrongUse and Refused.
    """
    path = Path(path)
    whole = path.is_dir()
    folder = path if whole else path.parent
    if not path.exists():
        raise WrongUse("no such path", where=path, fix="check the spelling")
    for names in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        files = [folder / name for name in names]
        if (whole or path in files) and all(file.is_file() for file in files):
            return _gpt2(*files), files
    vocab, file = (path / name if whole else path for name in ("vocab.txt", FILE))
    if vocab.suffix == ".txt" and vocab.is_file():
        return _bert(vocab, lowercase), [vocab]
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
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in pairs):
        fix = f"give the {merges.name} that came with {encoder.name}"
        raise WrongUse("merges and vocabulary do not belong together", where=merges, fix=fix)
    library = byte_level(models.BPE(vocab, pairs))
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


RUN = re.compile(r"\S{1000}")  # longer runs are broken for training: their pieces are no words anyway
BLANKS = re.compile(r"(?<!\s)(\s{1000})\s+")  # more of a run teaches nothing, and merging it takes hours
UNK = "<|unk|>"
CONTINUES = 0xF0000  # private-use code points (planes 15, 16) stand for a word's continuing characters
MOST_SPACED = 1_000_000  # words between spaces held before they are taken apart
WATCH_BYTES = 16 << 20  # of text, in which distinct words are counted for the estimate of memory
WORD_BYTES = 700  # of memory per distinct word while merging: 20 MB of novels, 363,000 words, took 268 MB

Type = Literal["bpe", "wordpiece", "char"]


def train_tokenizer(texts: Iterable[str], kind: Type, vocab_size: int, lowercase: bool = True) -> Tokenizer:
    """Train on `texts`, at most `vocab_size` entries, special tokens included. Raises Failed when there is no text or
    merging would not fit into memory, WrongUse for a vocabulary too small.
    """
    if kind == "char":
        return _characters(texts, vocab_size)
    if kind == "wordpiece":
        return _wordpiece(texts, vocab_size, lowercase)
    return _bpe(texts, vocab_size)


def _bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _check_room(vocab_size, len(alphabet) + 1, "256 bytes and one special token")
    library = byte_level(models.BPE())
    trainer = _trainer(vocab_size - 1, alphabet)
    broken = (RUN.sub("\\g<0>\n", BLANKS.sub("\\1", text)) for text in _watched(texts))
    _train(library, broken, trainer)
    library.add_special_tokens([EOT])
    return _made(library, vocab_size)


def _trainer(vocab_size: int, alphabet: list[str], **more: Any) -> trainers.BpeTrainer:
    how: dict[str, Any] = {"min_frequency": 2, "initial_alphabet": alphabet, "show_progress": False}
    return trainers.BpeTrainer(vocab_size=vocab_size, **how, **more)


def _train(library: Library, texts: Iterable[str], trainer: trainers.Trainer) -> None:
    """In a thread: the library hears no signal until it is done, and Ctrl-C should end a training of hours."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            library.train_from_iterator(texts, trainer)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]


def _wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    plain = _count_words(texts, lowercase)
    characters = Counter[str]()
    for word, count in plain.items():
        for character in set(word):
            characters[character] += count
    # the commonest characters, alone and continuing, may take up to half of the vocabulary
    room = max((vocab_size - len(BERT_SPECIAL)) // 4, 1)
    kept = sorted(sorted(characters, key=lambda c: (-characters[c], c))[:room])
    _check_room(vocab_size, len(BERT_SPECIAL) + 2 * len(kept), "the special tokens and the characters")
    inside = {character: chr(CONTINUES + place) for place, character in enumerate(kept)}
    known = (word for word in plain if set(word) <= inside.keys())
    words = Counter({word[0] + "".join(inside[c] for c in word[1:]): plain[word] for word in known})
    trained = Library(models.BPE())
    _merge(trained, words, vocab_size - len(BERT_SPECIAL), [*kept, *inside.values()])
    back = {code: character for character, code in inside.items()}

    def name(token: str) -> str:
        return ("##" if token[0] in back else "") + "".join(back.get(c, c) for c in token)

    ranked = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [*BERT_SPECIAL, *(name(token) for token, _ in ranked)]
    return _made(bert_library({token: place for place, token in enumerate(tokens)}, lowercase), vocab_size)


def _count_words(texts: Iterable[str], lowercase: bool) -> Counter[str]:
    """Words as BERT makes them, counted; first those between spaces, each taken apart once, ten times faster."""
    normalizer, splitter = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    spaced: Counter[str] = Counter()

    def take_apart() -> None:
        for run, count in spaced.items():
            for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(RUN.sub("\\g<0>\n", run))):
                words[word] += count
        spaced.clear()

    for text in texts:
        spaced.update(text.split())
        if len(spaced) > MOST_SPACED:
            take_apart()
    take_apart()
    return words


def _watched(texts: Iterable[str]) -> Iterator[str]:
    """The texts; at their end, before the merging, the distinct words say whether it will fit into memory."""
    words: set[int] = set()
    size = 0
    for text in texts:
        if size < WATCH_BYTES:
            words.update(map(hash, text.split()))
        size += len(text)
        yield text
    if not size:
        raise Failed("no text to train on", fix="name inputs that hold text")
    # distinct words grow with a power of the text: 0.5 to 0.7 for prose (Heaps' law)
    check_memory(int(len(words) * max(size / WATCH_BYTES, 1) ** 0.75))


def _merge(library: Library, words: Counter[str], vocab_size: int, alphabet: list[str]) -> None:
    """Train the BPE model of `library` on counted words, alphabet first; each is given as often as it counts."""
    if not words:
        raise Failed("no text to train on", fix="name inputs that hold text")
    check_memory(len(words))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = _trainer(vocab_size, alphabet, limit_alphabet=len(alphabet))
    _train(library, _repeated(words), trainer)


def _repeated(words: Counter[str]) -> Iterator[str]:
    for word in sorted(words):
        left = words[word]
        while left > 0:
            part = min(left, 10_000)
            yield " ".join([word] * part)
            left -= part


def check_memory(words: int) -> None:
    """Say how much memory merging so many distinct words takes; raise Failed when that is not free."""
    needed = words * WORD_BYTES + (128 << 20)
    free = min(psutil.virtual_memory().available, memory_limit_bytes())
    most = f"about {amount(needed, 'B')} of memory at most"
    say(f"merging {words:,} distinct words: {most}, {amount(free, 'B')} are free")
    if needed > 0.9 * free:
        why = f"{words:,} distinct words need about {amount(needed, 'B')}, {amount(free, 'B')} are free"
        fix = "give a smaller --sample-bytes"
        raise Failed("not enough memory to train the tokenizer", why=why, fix=fix)


def _check_room(vocab_size: int, least: int, what: str) -> None:
    if vocab_size < least:
        why, fix = f"{vocab_size}; {what} take {least}", f"give at least {least}"
        raise WrongUse("the vocabulary is too small", where="--vocab-size", why=why, fix=fix)


def _made(library: Library, vocab_size: int) -> Tokenizer:
    made = Tokenizer(library.to_str())
    if made.vocab_size < vocab_size:
        warn(f"the text gave {made.vocab_size:,} tokens, fewer than the {vocab_size:,} asked for")
    return made


def _characters(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Ids in the order of code points, then the special tokens; the rarest beyond the room become unknown."""
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(text)
    if not seen:
        raise Failed("no text to train on", fix="name inputs that hold text")
    _check_room(vocab_size, 3, "one character and two special tokens")
    kept = sorted(sorted(seen, key=lambda c: (-seen[c], c))[: vocab_size - 2])
    vocab = {character: place for place, character in enumerate(kept)}
    library = Library(models.WordLevel({**vocab, UNK: len(vocab), EOT: len(vocab) + 1}, unk_token=UNK))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens([UNK, EOT])
    return Tokenizer(library.to_str())


SAMPLE_BYTES = 1_000_000_000
STRIPE_BYTES = 1 << 20  # a large file is sampled as stripes of this size, evenly spaced
COMPRESSED_RATIO = 3.5  # text bytes per byte of a compressed file, for the shares of the sample only


def sample(
    sources: list[Source],
    options: ReadOptions,
    budget: int,
    counts: Counter[str],
    max_replaced: float = MAX_REPLACED,
) -> Iterator[str]:
    """About `budget` bytes of text, each file in proportion to its size; of files below a stripe, every n-th.

    A file that can be read in ranges gives evenly spaced stripes, any other its beginning; one that is a document whole
    is read by its blocks for that, which changes no word. Raises Failed when more than
    `max_replaced` of the characters are invalid.
    """
    ratios = [COMPRESSED_RATIO if source.compression else 1 for source in sources]
    sizes = [s.bytes * ratio or (budget if s.format == "dataset" else 0) for s, ratio in zip(sources, ratios)]
    share = min(1.0, budget / max(sum(sizes), 1))
    if share < 1 and options.documents == "file":
        options = replace(options, documents="block")
    # bytes: what the stripes passed are to give less what they gave; what is to be taken
    owed, left = 0.0, float(budget)
    with progress("sample", total=min(budget, sum(sizes)), unit="B") as bar:
        for source, size in zip(sources, sizes):
            left = size * share if share < 1 else left
            for start, stop, stripe in _stripes(source, size, share, options):
                owed += stripe * share
                if share < 1 and owed <= 0:
                    continue
                for batch in Reader(options, counts).read(source, start, stop):
                    yield from batch.texts
                    counts["characters"] += sum(map(len, batch.texts))
                    done = utf8_bytes(batch.texts)
                    owed, left = owed - done, left - done
                    bar.advance(done)
                    if left < 0:  # a dataset's size may not be known, a ratio be larger
                        break
    where = f"the sample of {len(sources)} inputs"
    check_replaced(counts["replaced"], counts["characters"], max_replaced, where)


def _stripes(
    source: Source, size: float, share: float, options: ReadOptions
) -> Iterator[tuple[int, int | None, float]]:
    """(start, stop, bytes) of the parts of a source that are taken or left whole."""
    if share >= 1 or not splittable(source, options):
        yield 0, None, size
        return
    for start in range(0, source.bytes, STRIPE_BYTES):
        stop = min(start + STRIPE_BYTES, source.bytes)
        yield start, stop if stop < source.bytes else None, stop - start
