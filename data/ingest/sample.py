"""A sample of the text, for training a tokenizer on a part of what is too much: the same for the same files."""

from collections import Counter
from collections.abc import Iterator

from ...core.console import progress
from .inputs import Source
from .readers import ReadOptions, read, splittable
from .text import MAX_REPLACED, check_replaced, utf8_bytes

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

    A file that can be read in ranges gives evenly spaced stripes; a compressed one, a dataset, a document per
    file and what has documents longer than the stripes give their beginning, as much as their share. Raises
    Failed when more than `max_replaced` of the characters are invalid.
    """
    ratios = [COMPRESSED_RATIO if source.compression else 1 for source in sources]
    sizes = [s.bytes * ratio or (budget if s.format == "dataset" else 0) for s, ratio in zip(sources, ratios)]
    share = min(1.0, budget / max(sum(sizes), 1))
    # bytes: what the stripes passed are to give less what they gave; what is to be taken
    owed, left = 0.0, float(budget)
    with progress("sample", total=min(budget, sum(sizes)), unit="B") as bar:
        for source, size in zip(sources, sizes):
            left = size * share if share < 1 else left
            for start, stop, stripe in _stripes(source, size, share, options):
                owed += stripe * share
                if share < 1 and owed <= 0:
                    continue
                for batch in read(source, start, stop, options, counts):
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
