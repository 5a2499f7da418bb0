"""A small corpus, two tokenizers trained on it and its store, for the tests of the way from text to a store."""

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.tokenize import Work, tokenize
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.store import TokenStore

# The modules beside the tests. Last: other folders on the path have a conftest that tests import from.
sys.path.append(str(Path(__file__).parent))

WORDS = "the cat sat on a mat and saw the other dog which ran away from it very fast indeed".split()  # noqa: SIM905


def make_corpus(folder: Path, size: int = 400_000) -> None:
    """Three files of pseudo-random sentences, one compressed, one .jsonl, with blank lines and one long line."""
    rng = np.random.default_rng(5)

    def block() -> str:
        drawn = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) for _ in range(rng.integers(1, 6))]
        return "\n".join(sentence.capitalize() + "." for sentence in drawn)

    blocks = [block() for _ in range(size // 150)]
    third = len(blocks) // 3
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(blocks[:third]) + "\n\n" + "long " * 9000)
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(blocks[third : 2 * third]).encode(), mtime=0))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": b}) + "\n" for b in blocks[2 * third :]))


class Stage:
    """A place with `corpus`, `bpe` and `wp`, what tokenises it, and hashes of what comes out."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def run(self, out: Path, tokenizer: str = "bpe", **settings: Any) -> Path:
        settings = {"options": ReadOptions("block")} | settings
        tokenize([str(self.place / "corpus")], self.place / tokenizer, out, **settings)
        return out

    def command(self, out: Path, *more: str) -> list[str]:
        main = "import sys; from throughline.cli.main import main; sys.exit(main())"
        words = f"data tokenize {self.place}/corpus --tokenizer {self.place}/bpe --out {out}"
        fixed = "--documents block --shard-bytes 20000 --workers 1 --backend tokenizers"
        return [sys.executable, "-c", main, *words.split(), *fixed.split(), *more]

    @staticmethod
    def tokens_hash(store: Path) -> str:
        """The whole stream, the sequences and the documents of a store, whatever its shards."""
        opened = TokenStore.open(store)
        digest = hashlib.sha256(opened.read(0, opened.tokens).tobytes())
        digest.update(np.diff(opened.sequence_starts).tobytes())
        digest.update(opened.document_bounds.astype(np.int64).tobytes())
        return digest.hexdigest()

    @staticmethod
    def files_hash(store: Path) -> dict[str, str]:
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in store.iterdir()
            if file.name != "manifest.json"
        }


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("stage")
    make_corpus(folder / "corpus")
    texts = [(folder / "corpus" / "a.txt").read_text()]
    train_tokenizer(texts, "bpe", 400).save(folder / "bpe")
    train_tokenizer(texts, "wordpiece", 200).save(folder / "wp")
    return Stage(folder)


@pytest.fixture(scope="session")
def plain(stage: Stage) -> Path:
    """The store that one worker writes, by the library itself."""
    return stage.run(stage.place / "plain", shard_bytes=20_000, work=Work(backend="tokenizers"))
