"""Rows of fine-tuning: which records are held out, how pairs are cut, which tokens of an answer are learnt."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from finetune_cases import DRAW, WORDS, task_for
from throughline.data.tokenizer import Tokenizer
from throughline.inference.serving.encoding import Reader
from throughline.train.finetune.records import held_out, pair_row
from tokenizers import processors


def test_the_split_is_decided_by_the_content() -> None:
    """About the share asked for (4 standard deviations of 2,000 draws), and equal texts on one side."""
    records = [{"text": f"number {i}", "label": i % 2} for i in range(2000)]
    share = np.mean([held_out(record, ["text"], 0.2) for record in records])
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    assert len({held_out({"text": "x", "label": label}, ["text"], 0.5) for label in (0, 1)}) == 1


@pytest.mark.parametrize("form", [processors.BertProcessing, processors.RobertaProcessing])
def test_pairs_are_cut_as_the_library_cuts_them(form: type, bases: dict[str, Path]) -> None:
    """`longest_first` of the tokenizers library; RoBERTa's has two separators between. Served pairs are alike."""
    library = tokenizers.Tokenizer.from_file(str(bases["bert"] / "tokenizer.json"))
    library.post_processor = form(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = Tokenizer(library.to_str())
    whole = library.encode("the king", "dog").ids
    assert Reader(tokenizer, 12, 99).frame({"a": "the king", "b": "dog"}).ids.tolist() == whole
    library.enable_truncation(12, strategy="longest_first")
    for first, second in ((9, 3), (3, 9), (10, 10), (6, 4), (2, 2)):
        texts = [" ".join(DRAW.choice(WORDS, size)) for size in (first, second)]
        expected = library.encode(*texts)
        row = pair_row(tokenizer, tokenizer.encode(texts[0]), tokenizer.encode(texts[1]), 12)
        assert row["input_ids"].tolist() == expected.ids
        assert row["token_types"].tolist() == expected.type_ids or form is processors.RobertaProcessing


def test_an_answer_is_learnt_from_its_first_token_to_its_end(bases: dict[str, Path]) -> None:
    """And nothing of the prompt is, of which the end is kept where both are too long."""
    task = task_for("instruction", bases, label_field="answer")
    tokenizer = task.tokenizer
    for prompt_words, answer_words in ((1, 1), (6, 3), (3, 6), (4 * task.length, 2)):
        prompt, answer = (" ".join(DRAW.choice(WORDS, size)) for size in (prompt_words, answer_words))
        (row,) = task.rows([{"text": prompt, "answer": answer}])
        told, said = tokenizer.encode(prompt).tolist(), [*tokenizer.encode(answer).tolist(), tokenizer.eos_id]
        told = told[max(len(told) + len(said) - task.length, 0) :]
        assert row["input_ids"].tolist() == [*told, *said]
        assert row["targets"].tolist() == [-100] * (len(told) - 1) + said + [-100]
