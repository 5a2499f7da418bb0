"""How fast training can be fed: sample ids, rows, masks and the loader. No peer: absolute rates against
stated needs.

    python benchmarks/data_order.py [--quick]

Rates are per second of CPU time of one core on generated tokens (the work does not depend on what they say);
the loader's is wall time, beside a training step of 20 ms that it must never keep waiting.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import claim, finish, index_file, parser
from throughline.core.console import table
from throughline.data.bert import Masker
from throughline.data.dataset import DatasetOptions, Loader
from throughline.data.order import key, permute
from throughline.data.packing import pack
from throughline.data.samples import open_dataset
from throughline.data.store import TokenStore

STEP_SECONDS = 0.020
SPECIAL = {
    "cls_id": 101,
    "sep_id": 102,
    "mask_id": 103,
    "vocab_size": 30_522,
    "special_ids": tuple(range(104)),
}
# BERT has 5,828 pieces that continue a word
WHOLE_WORDS = {"whole_word": True, "continuation_ids": tuple(range(104, 6000))}


class Measured(NamedTuple):
    """Rates found, and the rate that is needed where one is stated."""

    name: str
    found: list[float]
    unit: str
    need: float | None = None


def rates(work: Callable[[], int], repeats: int) -> list[float]:
    """What `work` returns per second of CPU time, in each of `repeats` runs."""
    found = []
    for _ in range(repeats):
        start = time.process_time()
        done = work()
        found.append(done / (time.process_time() - start))
    return found


def make_store(path: Path, tokens: int) -> TokenStore:
    """Documents of sentences of 5 to 40 tokens, ordinary ids of BERT's vocabulary."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 41, tokens // 22)
    rng.integers(104, 30_522, lengths.sum(), dtype=np.uint16).tofile(path / "00000.bin")
    bounds = np.unique(
        np.concatenate([[0], rng.integers(0, len(lengths), len(lengths) // 20), [len(lengths)]])
    )
    index_file(path / "00000.idx", lengths, bounds, "uint16")
    return TokenStore.open(path)


def measure(store: TokenStore, repeats: int) -> Iterator[Measured]:
    """Order, masks, packing and batches."""
    ids = np.arange(1_000_000)
    for name, n in (
        ("sample-ids", 2**31 + 1),
        ("sample ids, n = 10 million", 10_000_000),
    ):  # just above a power of two is worst
        found = rates(lambda n=n: len(permute(ids, n, 1, 2)), repeats)
        yield Measured(name, [rate / 1e6 for rate in found], "M ids/s", 10.0 if n > 2**31 else None)
    tokens = store.read(0, 131_072).astype(np.int64)
    lengths, keys = np.full(256, 512), key(1, 2, np.arange(256))
    for name, options, need in (("masking", {}, 30.0), ("masking-whole-word", WHOLE_WORDS, 10.0)):
        masker = Masker(DatasetOptions("bert", 512, **SPECIAL, **options))
        found = rates(lambda masker=masker: len(masker(tokens, lengths, keys)[0]), 3 * repeats)
        yield Measured(name, [rate / 1e6 for rate in found], "M tokens/s", need)
    sizes = np.random.default_rng(1).integers(1, 513, 2_000_000)
    found = rates(lambda: len(pack(sizes, 512)[0]), repeats)
    yield Measured("best-fit packing", [rate / 1e6 for rate in found], "M pieces/s")
    kinds = {
        "GPT windows 12 x 64": (DatasetOptions("gpt", 64), 12),
        "GPT windows 64 x 1024": (DatasetOptions("gpt", 1024), 64),
        "GPT windows, documents apart, 64 x 1024": (DatasetOptions("gpt", 1024, separate_documents=True), 64),
        "GPT best_fit 64 x 1024": (DatasetOptions("gpt", 1024, packing="best_fit"), 64),
        "BERT pairs 32 x 128": (DatasetOptions("bert", 128, **SPECIAL), 32),
        "BERT pairs packed 32 x 512": (DatasetOptions("bert", 512, packing="packed", **SPECIAL), 32),
        "the same, whole words": (
            DatasetOptions("bert", 512, packing="packed", **SPECIAL, **WHOLE_WORDS),
            32,
        ),
    }
    for name, (options, count) in kinds.items():
        dataset = open_dataset(store, options)

        def batches(dataset=dataset, count=count) -> int:
            return sum(len(dataset.batch(step * count, count)["input_ids"]) for step in range(20)) // count

        yield Measured(name, rates(batches, repeats), "batches/s")


def feed(store: TokenStore, steps: int, repeats: int) -> tuple[list[float], int]:
    """(batches a second that the loader can give, batches not ready for steps of STEP_SECONDS) for packed
    BERT 32 x 512.
    """
    dataset = open_dataset(store, DatasetOptions("bert", 512, packing="packed", **SPECIAL, **WHOLE_WORDS))
    speeds = []
    for _ in range(repeats):
        with Loader(dataset, 32) as loader:
            next(loader)
            start = time.perf_counter()
            for _ in range(steps):
                next(loader)
            speeds.append(steps / (time.perf_counter() - start))
    with Loader(dataset, 32) as loader:
        for _ in range(steps):
            next(loader)
            time.sleep(STEP_SECONDS)
        return speeds, loader.waited


def main() -> None:
    options = parser("Rates of sample order, rows, masks and loader.").parse_args()
    repeats, steps = (2, 30) if options.quick else (7, 200)
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), 2_000_000 if options.quick else 20_000_000)
        rows = list(measure(store, repeats))
        speeds, late = feed(store, steps, repeats)
    rows.append(Measured("loader", speeds, "batches/s", 1 / STEP_SECONDS))
    claims = [
        claim(
            row.name,
            row.found,
            [row.need] * len(row.found),
            peer="stated need",
            unit=row.unit,
            better="higher",
            goal=1.0,
        )
        for row in rows
        if row.need
    ]
    measured = {row.name: {"value": round(statistics.median(row.found), 3), "unit": row.unit} for row in rows}
    measured[f"batches late in {steps} steps of {STEP_SECONDS * 1e3:.0f} ms"] = {
        "value": late,
        "unit": "batches",
    }
    print(
        "\n".join(
            table(
                ("what", "rate", "unit"),
                [(name, row["value"], row["unit"]) for name, row in measured.items()],
            )
        )
    )
    finish("data_order", claims, details=measured)


if __name__ == "__main__":
    main()
