"""Instruction tuning with a SentencePiece-style tokenizer: rows are what the model is asked with later."""

from pathlib import Path

import pytest
from throughline.data.tokenizer import Tokenizer
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.finetune.tasks import Instruction


def instruction(directory: Path) -> Instruction:
    recipe = FinetuneRecipe(task="instruction", data={"text_field": "prompt", "label_field": "response"})
    return Instruction(recipe, Tokenizer.load(directory))


@pytest.mark.parametrize(
    "prompt", ["hello", "<|user|>\nhello<|end|>\n<|assistant|>", "<s>the 日本", "a\n\nb"]
)
def test_a_row_is_the_prompt_of_transformers_and_the_response(sentencepiece_dir: Path, prompt: str) -> None:
    """BOS once, special tokens as such, the response with EOS once; the loss is on the response alone."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(sentencepiece_dir))
    asked = theirs(prompt).input_ids
    asked = asked[1:] if asked[:2] == [1, 1] else asked
    for response in ("low \U0001f600", "low</s>", "the answer<|end|>"):
        said = theirs(response, add_special_tokens=False).input_ids
        said = said if said[-1] == 2 else [*said, 2]
        (row,) = instruction(sentencepiece_dir).rows([{"prompt": prompt, "response": response}])
        assert row["input_ids"].tolist() == asked + said
        assert row["targets"].tolist() == [-100] * (len(asked) - 1) + said + [-100]


def test_a_row_that_is_cut_keeps_its_bos(sentencepiece_dir: Path) -> None:
    task = instruction(sentencepiece_dir)
    length = task.length
    (row,) = task.rows([{"prompt": "the " * 2 * length, "response": "and"}])
    ids = row["input_ids"].tolist()
    said = [*task.tokenizer.encode("and").tolist(), 2]
    assert len(ids) == length and ids[0] == 1 and ids[-len(said) :] == said and task.cut_rows == 1
