"""Read a file of text or records whole or in byte ranges, for the tests of readers."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from throughline.data.ingest.inputs import expand_inputs
from throughline.data.ingest.readers import Reader, ReadOptions


def documents(path: Path, cuts: list[int], options: ReadOptions) -> tuple[list[str], Counter[str]]:
    """The documents of a file read as ranges between `cuts`."""
    [source] = expand_inputs([str(path)])
    counts: Counter[str] = Counter()
    found: list[str] = []
    bounds = [0, *sorted(set(cuts)), None]
    for start, stop in pairwise(bounds):
        going = False
        for texts, continues in Reader(options, counts).read(source, start, stop):
            texts = list(texts)
            if going:
                found[-1] += texts.pop(0)
            found += texts
            going = continues
        assert not going, "a document was left open"
    return found, counts


def read_all(path: Path, **options: Any) -> tuple[list[str], Counter[str]]:
    return documents(path, [], ReadOptions(**options))
