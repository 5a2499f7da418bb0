"""How fast training can be fed: sample ids, rows, masks and the loader. No peer: absolute rates against stated needs.

    python benchmarks/data_order.py [--quick]

Rates are per second of CPU time of one core on generated tokens (the work does not depend on what they say); the loader's
is wall time, beside a training step of 20 ms that it must never keep waiting.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import machine_facts, parser, versions
from throughline.core.console import table
from throughline.data.loader import Loader
from throughline.data.masking import Masker
from throughline.data.options import DatasetOptions
from throughline.data.order import key, permute
from throughline.data.packing import pack
from throughline.data.samples import open_dataset
from throughline.data.store import TokenStore, write_index

STEP_SECONDS = 0.020
SPECIAL = {"cls_id": 101, "sep_id": 102, "mask_id": 103, "vocab_size": 30_522, "special_ids": tuple(range(104))}


def rate(work: Callable[[], int], repeats: int) -> float:
    """The best of `repeats` runs, in units of what `work` returns per second of CPU time."""
    best = 0.0
    for _ in range(repeats):
        start = time.process_time()
        done = work()
        best = max(best, done / (time.process_time() - start))
    return best


def make_store(path: Path, tokens: int) -> TokenStore:
    """Documents of sentences of 5 to 40 tokens, ordinary ids of BERT's vocabulary."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 41, tokens // 22)
    rng.integers(104, 30_522, lengths.sum(), dtype=np.uint16).tofile(path / "00000.bin")
    bounds = np.unique(np.concatenate([[0], rng.integers(0, len(lengths), len(lengths) // 20), [len(lengths)]]))
    write_index(path / "00000.idx", lengths, bounds, "uint16")
    return TokenStore.open(path)


def measure(store: TokenStore, repeats: int) -> list[tuple[str, float, str, float | None]]:
    """(what, rate, unit, goal)."""
    ids = np.arange(1_000_000)
    rows = [
        (f"sample ids, n = {n:,}", rate(lambda n=n: len(permute(ids, n, 1, 2)), repeats) / 1e6, "M ids/s", 10.0)
        for n in (10_000_000, 2**31, 2**31 + 1)
    ]
    tokens = store.read(0, 131_072).astype(np.int64)
    masker = Masker(DatasetOptions("bert", 512, **SPECIAL))
    lengths, keys = np.full(256, 512), key(1, 2, np.arange(256))
    rows.append(("masking", rate(lambda: len(masker(tokens, lengths, keys)[0]), 3 * repeats) / 1e6, "M tokens/s", 30.0))
    sizes = np.random.default_rng(1).integers(1, 513, 2_000_000)
    rows.append(("best-fit packing", rate(lambda: len(pack(sizes, 512)[0]), repeats) / 1e6, "M pieces/s", None))
    kinds = {
        "GPT windows 12 x 64": (DatasetOptions("gpt", 64), 12),
        "GPT windows 64 x 1024": (DatasetOptions("gpt", 1024), 64),
        "GPT windows, documents apart, 64 x 1024": (DatasetOptions("gpt", 1024, separate_documents=True), 64),
        "GPT best_fit 64 x 1024": (DatasetOptions("gpt", 1024, packing="best_fit"), 64),
        "BERT pairs 32 x 128": (DatasetOptions("bert", 128, **SPECIAL), 32),
        "BERT pairs packed 32 x 512": (DatasetOptions("bert", 512, packing="packed", **SPECIAL), 32),
    }
    for name, (options, count) in kinds.items():
        dataset = open_dataset(store, options)

        def batches(dataset=dataset, count=count) -> int:
            return sum(dataset.batch(step * count, count)["input_ids"].size for step in range(20))

        best = rate(batches, repeats)
        goal = 0.3 if name == "GPT windows 12 x 64" else None
        rows.append((name, count * dataset.options.sequence_length / best * 1e3, "ms/batch", goal))
    return rows


def feed(store: TokenStore, steps: int) -> tuple[float, int]:
    """(batches a second that the loader can give, batches not ready for a step of STEP_SECONDS) for packed BERT 32 x 512."""
    dataset = open_dataset(store, DatasetOptions("bert", 512, packing="packed", **SPECIAL))
    with Loader(dataset, 32) as loader:
        next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        speed = steps / (time.perf_counter() - start)
    with Loader(dataset, 32) as loader:
        for _ in range(steps):
            next(loader)
            time.sleep(STEP_SECONDS)
        return speed, loader.waited


def main() -> None:
    options = parser("Rates of sample order, rows, masks and loader.").parse_args()
    repeats, steps = (2, 30) if options.quick else (7, 200)
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), 2_000_000 if options.quick else 20_000_000)
        rows = measure(store, repeats)
        speed, waited = feed(store, steps)
    rows.append(("loader, BERT packed 32 x 512", speed, "batches/s", None))
    rows.append((f"batches late in {steps} steps of {STEP_SECONDS * 1e3:.0f} ms", float(waited), "batches", 0.0))
    lower = ("ms/batch", "batches")
    met = [None if goal is None else (value <= goal if unit in lower else value >= goal) for _, value, unit, goal in rows]
    shown = [(name, f"{value:.2f}", unit, goal, ok) for (name, value, unit, goal), ok in zip(rows, met)]
    print("\n".join(table(("what", "rate", "unit", "goal", "met"), shown)))
    measured = [
        {"name": name, "value": round(value, 3), "unit": unit, "goal": goal, "met": ok}
        for (name, value, unit, goal), ok in zip(rows, met)
    ]
    line = {"benchmark": "data_order", "claims": [], "measured": measured}
    print(json.dumps(line | {"machine": machine_facts(), "versions": versions(())}), flush=True)


if __name__ == "__main__":
    main()
