"""A checkpoint saved in any layout is scored as it lies, to the bits that one process's checkpoint of the
same weights gets.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from throughline.data.train_tokenizer import train_tokenizer
from throughline.eval.request import Request
from throughline.eval.session import evaluate_one
from throughline.planner.layout import Layout
from throughline.prove.proof import Case


def test_scores_are_those_of_one_process(
    samples: Path, tmp_path: Path, saved_in_layouts: Callable[..., dict[str, Path]]
) -> None:
    """Every log-probability of LAMBADA and BLiMP records, without an export in between."""
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:50_000]
    tokenizer = train_tokenizer(text.splitlines(), "bpe", 300).to_json().encode()
    shape = {
        "vocab_size": 304,
        "sequence_length": 256,
    }  # room, so that the rows of a shared table come out even
    checkpoints = saved_in_layouts(
        Case("", Layout(), precision="fp32", model=shape), tmp_path, tokenizer=tokenizer
    )

    def scored(checkpoint: Path) -> str:
        evaluate_one(Request(checkpoint, "lambada_openai,blimp_wh_island", limit=8))
        return (checkpoint.parent / f"{checkpoint.name}.scores" / "scores" / "samples.jsonl").read_text()

    expected = scored(checkpoints.pop("alone"))
    assert len(checkpoints) == 4
    for name, checkpoint in checkpoints.items():
        assert scored(checkpoint) == expected, name
