"""Text to tokens on disk: MB of text per core-second, against tokenizers, datasets.map, tiktoken and tokie.

    python benchmarks/tokenization.py --text corpus/*.txt [--multilingual DIR] [--parts
    bpe,wordpiece,multilingual] [--quick]

Every measurement is a fresh process with fresh tokenizers (cold caches), from text on disk to tokens and
their sha256 on disk. The text is one plain .txt file, a document of about 3,000 characters per line, the same
for all. Time is CPU time of the process and its children, so cores and waiting do not matter. What does not
grow with the text - imports, loading and checking the tokenizer - is taken off and reported: a process
tokenises the first 20 lines (`startup_s` in all), then those again, then the whole text, a small text several
times in turn with them; the rate is of the last less the second. `with_startup_mb_per_core_s` has everything
in it. Each peer writes a flat uint16 file with an end-of-text token per document, at its best settings
here: tokenizers `encode_batch_fast` 1,000 texts at a time, datasets.map batched over 2 processes with the
same, tiktoken `encode_to_numpy`, tokie `encode_batch_flat`. Ours is `throughline data tokenize` with one
worker, where gigatoken encodes GPT-2's BPE and tokie BERT's WordPiece, as in any plain installation.
`--quick` takes one pair over the first 650 documents, read once.
"""

import bz2
import gzip
import hashlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, claim, existing, finish, paired, parser

HERE = Path(__file__).parent
SAMPLES = HERE.parent / "recipes" / "samples"
DOCUMENT = 3000  # characters
BATCH = 1000
QUICK = 650  # documents with --quick
SHORT_LINES = 20
CLOCK = 0.001  # seconds: no time is told to be shorter
SMALL_BYTES = 10_000_000  # a text below this takes no longer than the start-up: it is read SMALL_TIMES
SMALL_TIMES = 15
PARTS = ["bpe", "wordpiece", "multilingual"]


def documents_of(paths: list[Path]) -> Iterator[str]:
    """Lines of text files and paragraphs of SQuAD-style JSON, joined to documents of about DOCUMENT
    characters, one line each.
    """
    for path in paths:
        opened: Any = {".bz2": bz2.open, ".gz": gzip.open}.get(path.suffix, open)
        with opened(path, "rb") as file:
            text = file.read().decode("utf-8-sig", "replace").replace("\r\n", "\n")
        if ".json" in path.name:
            blocks = [
                p["context"] + " " + " ".join(q["question"] for q in p["qas"])
                for article in json.loads(text)["data"]
                for p in article["paragraphs"]
            ]
        else:
            blocks = text.split("\n")
        held: list[str] = []
        for block in blocks:
            held.append(" ".join(block.split()))
            if sum(map(len, held)) >= DOCUMENT:
                yield " ".join(held)
                held = []
        if any(held):
            yield " ".join(held)


def files_in(paths: list[Path]) -> list[Path]:
    found = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [
        file for file in found if file.is_file() and (".txt" in file.suffixes or ".json" in file.suffixes)
    ]


def lines_of(path: str) -> Iterator[list[str]]:
    """Batches of lines."""
    with open(path, encoding="utf-8") as file:
        while batch := [line.rstrip("\n") for line in islice(file, BATCH)]:
            yield batch


class Flat:
    """A flat uint16 file with a hash: what a peer's tokens go to."""

    def __init__(self, path: str):
        self._file, self._digest = open(path, "wb"), hashlib.sha256()  # noqa: SIM115
        self.tokens = 0

    def write(self, ids: np.ndarray) -> None:
        data = ids.astype(np.uint16)
        self._digest.update(data.data)
        self._file.write(data.data)
        self.tokens += len(ids)

    def close(self) -> int:
        os.fsync(self._file.fileno())
        self._file.close()
        return self.tokens


def throughline_with(backend: str, tokenizer: str, text: str, out: str) -> int:
    from throughline.data.ingest.readers import ReadOptions
    from throughline.data.ingest.tokenize import Work, tokenize

    options = ReadOptions(documents="line")
    manifest = tokenize([text], tokenizer, out, options=options, work=Work(backend=backend))
    return manifest.facts["tokens"]


def with_tokenizers(tokenizer: str, text: str, out: str) -> int:
    from throughline.data.tokenizer import Tokenizer

    loaded = Tokenizer.load(tokenizer)
    flat, eos = Flat(out), [] if loaded.eos_id is None else [loaded.eos_id]
    for batch in lines_of(text):
        for encoding in loaded._library.encode_batch_fast(batch, add_special_tokens=False):
            flat.write(np.array(encoding.ids + eos))
    return flat.close()


def with_datasets(tokenizer: str, text: str, out: str) -> int:
    """What nanoGPT's prepare.py does: map with two processes, then one flat file."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        lines = datasets.load_dataset("text", data_files=text, split="train", cache_dir=cache)
        encoded = lines.map(
            Mapper(tokenizer), batched=True, batch_size=BATCH, num_proc=2, remove_columns=["text"]
        )
        flat = Flat(out)
        for batch in encoded.with_format("numpy").iter(BATCH):
            flat.write(np.concatenate(batch["ids"]))
        return flat.close()


class Mapper:
    """The function of datasets.map, loaded once in each of its processes."""

    def __init__(self, tokenizer: str):
        self._path = tokenizer

    def __call__(self, batch: dict) -> dict:
        from throughline.data.tokenizer import Tokenizer

        loaded = self.__dict__.get("_loaded") or self.__dict__.setdefault(
            "_loaded", Tokenizer.load(self._path)
        )
        found = loaded._library.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, loaded.eos_id] for encoding in found]}

    def __getstate__(self) -> dict:
        return {"_path": self._path}


def with_tiktoken(tokenizer: str, text: str, out: str) -> int:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    folder = Path(os.environ["BENCH_GPT2"])
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    flat, end = Flat(out), np.array([50256], np.uint32)
    for batch in lines_of(text):
        ids = (encoding.encode_to_numpy(line, disallowed_special=()) for line in batch)
        flat.write(np.concatenate([part for row in ids for part in (row, end)]))
    return flat.close()


def with_tokie(tokenizer: str, text: str, out: str) -> int:
    import tokie

    loaded: Any = tokie.Tokenizer.from_json(str(Path(tokenizer) / "tokenizer.json"))
    flat = Flat(out)
    for batch in lines_of(text):
        ids = loaded.encode_batch_flat(batch, add_special_tokens=False)
        flat.write(np.asarray(ids[0] if isinstance(ids, tuple) else ids))
    return flat.close()


def measure(who: str, tokenizer: str, text: str, short: str, times: int) -> None:
    """One measurement in this process, of the text so many times: prints CPU seconds and tokens as JSON."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    peers = {
        "tokenizers-peer": with_tokenizers,
        "datasets": with_datasets,
        "tiktoken": with_tiktoken,
        "tokie-peer": with_tokie,
    }
    run = peers.get(who) or partial(throughline_with, who)
    done = []
    with tempfile.TemporaryDirectory() as folder:
        # in turn, so that a slow moment of the machine meets both
        for turn, path in enumerate([short] + [short, text] * times):
            tokens = run(tokenizer, path, str(Path(folder) / str(turn)))
            done.append(spent())
    each = np.diff(done)
    text_s = max(float(each[1::2].sum() - each[::2].sum()) / times, CLOCK)
    print(json.dumps({"startup_s": done[0], "text_s": text_s, "tokens": tokens}))


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


class Bench:
    """Rates of measurements over one text."""

    def __init__(self, text: Path, pairs: int, gpt2: Path, quick: bool = False):
        self.text, self.pairs = text, pairs
        self.bytes = text.stat().st_size
        self._times = SMALL_TIMES if self.bytes < SMALL_BYTES and not quick else 1
        self._environment = {**os.environ, "BENCH_GPT2": str(gpt2), "RAYON_NUM_THREADS": "1"}
        self.tokens: dict[str, int] = {}
        self._rates: dict[str, list[float]] = {}
        self._found: dict[str, list[tuple[float, float]]] = {}  # seconds of the start and of the text
        self._short = text.with_name("short.txt")
        with open(text, "rb") as file:
            self._short.write_bytes(b"".join(file.readline() for _ in range(SHORT_LINES)))

    def rate(self, who: str, tokenizer: Path) -> float:
        """MB of text per core-second of one fresh process."""
        command = [
            sys.executable,
            str(HERE / "tokenization.py"),
            "--measure",
            who,
            tokenizer,
            self.text,
            self._short,
            self._times,
        ]
        done = subprocess.run(list(map(str, command)), env=self._environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{who} failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        self.tokens[who] = found["tokens"]
        self._found.setdefault(who, []).append((found["startup_s"], found["text_s"]))
        self._rates.setdefault(who, []).append(
            (self.bytes - self._short.stat().st_size) / 1e6 / found["text_s"]
        )
        return self._rates[who][-1]

    def facts(self) -> dict:
        median = {who: tuple(map(statistics.median, zip(*found))) for who, found in self._found.items()}
        whole = {who: round(self.bytes / 1e6 / (start + text), 2) for who, (start, text) in median.items()}
        startup = {who: round(start, 3) for who, (start, _) in median.items()}
        return {"bytes": self.bytes, "startup_s": startup, "with_startup_mb_per_core_s": whole}

    def claim(
        self,
        name: str,
        ours: str,
        peer: str,
        tokenizer: Path,
        goal: float,
        pairs: int | None = None,
        turns: int = 1,
    ) -> Claim:
        """The median of `turns` of ours against one of the peer: where it is so long that the machine's noise
        evens out in it.
        """

        def rate() -> float:
            return statistics.median(self.rate(ours, tokenizer) for _ in range(turns))

        a, b = paired(rate, lambda: self.rate(peer, tokenizer), pairs or self.pairs)
        if peer != "tokie-peer" and self.tokens[ours] != self.tokens[peer]:
            raise SystemExit(
                f"{name}: {self.tokens[ours]:,} tokens against {self.tokens[peer]:,}: not the same work"
            )
        print(f"{name}: {a} against {b}", file=sys.stderr, flush=True)
        return claim(
            name, a, b, peer=peer.removesuffix("-peer"), unit="MB/core-s", better="higher", goal=goal
        )

    def at_least(self, name: str, who: str, rate: float) -> Claim:
        """The claim of a rate, from every measurement of `who`."""
        rates = self._rates[who]
        peer = f"{rate:.0f} MB/core-s"
        return claim(name, rates, [rate] * len(rates), peer=peer, unit="MB/core-s", better="higher", goal=1.0)


def installed(module: str) -> bool:
    here = importlib.util.find_spec(module) is not None
    if not here:
        print(f"{module} is not installed: its claims are left out", file=sys.stderr)
    return here


def bpe(bench: Bench, gpt2: Path) -> list[Claim]:
    """The claims with GPT-2's tokenizer on the English text."""
    claims = []
    fast = installed("gigatoken")
    if fast and installed("datasets"):
        claims.append(
            bench.claim(
                "bpe-fast-vs-datasets-map",
                "gigatoken",
                "datasets",
                gpt2,
                50,
                min(bench.pairs, 3),
                turns=min(bench.pairs, 5),
            )
        )
    if fast and installed("tiktoken"):
        claims.append(
            bench.claim("bpe-fast-vs-tiktoken", "gigatoken", "tiktoken", gpt2, 8, 2 * bench.pairs - 1)
        )
        claims.append(bench.at_least("bpe-fast-rate", "gigatoken", 100.0))
    if fast:
        claims.append(bench.claim("bpe-plain-vs-tokenizers", "gigatoken", "tokenizers-peer", gpt2, 1))
        claims.append(bench.at_least("bpe-plain-rate", "gigatoken", 40.0))
    return claims


def wordpiece(bench: Bench, bert: Path, suffix: str) -> list[Claim]:
    """The WordPiece claims, on any text."""
    if not installed("tokie"):
        return []
    return [
        bench.claim(f"wordpiece-vs-tokenizers{suffix}", "tokie", "tokenizers-peer", bert, 8),
        bench.claim(f"wordpiece-vs-tokie{suffix}", "tokie", "tokie-peer", bert, 0.95, 2 * bench.pairs - 1),
    ]


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        who, tokenizer, whole, short, times = sys.argv[2:7]
        measure(who, tokenizer, whole, short, int(times))
        return
    options = parser(__doc__ or "")
    options.add_argument(
        "--text",
        type=existing,
        nargs="+",
        default=[SAMPLES / "novels", SAMPLES / "tinyshakespeare"],
        help="English text files (.txt, also .bz2 or .gz) or directories of them",
    )
    options.add_argument(
        "--multilingual",
        type=existing,
        nargs="+",
        default=[],
        help="text in other languages, or SQuAD-style JSON, for the claims named …-multilingual",
    )
    options.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=PARTS,
        help="measure only these, joined by commas",
    )
    options.add_argument("--pairs", type=int, default=5, help="paired measurements")
    chosen = options.parse_args()
    if unknown := set(chosen.parts) - set(PARTS):
        options.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    from throughline.data.new_tokenizer import import_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        gpt2, bert = Path(folder) / "gpt2", Path(folder) / "bert"
        import_tokenizer(SAMPLES / "gpt2-bpe")[0].save(gpt2)
        import_tokenizer(SAMPLES / "bert-base-uncased")[0].save(bert)
        claims: list[Claim] = []
        details = {}
        for part in chosen.parts:
            paths = chosen.multilingual if part == "multilingual" else chosen.text
            if not paths:
                print(f"no --{part} text: its claims are left out", file=sys.stderr)
                continue
            text = Path(folder) / f"{part}.txt"
            words = "\n".join(islice(documents_of(files_in(paths)), QUICK if chosen.quick else None))
            text.write_text(words + "\n", encoding="utf-8")
            pairs = 1 if chosen.quick else chosen.pairs
            bench = Bench(text, pairs, SAMPLES / "gpt2-bpe", chosen.quick)
            suffix = "-multilingual" if part == "multilingual" else ""
            claims += bpe(bench, gpt2) if part == "bpe" else wordpiece(bench, bert, suffix)
            details[part] = bench.facts()
        packages = ("gigatoken", "tokenizers", "tiktoken", "datasets", "tokie", "pyarrow")
        finish("tokenization", claims, packages=packages, details=details)


if __name__ == "__main__":
    main()
