"""The fine-tuning recipe: a trained model, labelled records, and a few epochs over them. No torch here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...core.recipe import Problem, Section
from ..sections import Fraction

TASKS = ("classification", "token-classification", "question-answering", "retrieval", "instruction")


class RecordsSection(Section):
    """What is learnt from."""

    train: str = ""
    """Records: a .jsonl, .tsv, .csv or .parquet file; for question-answering a .json file in SQuAD's format."""
    validation: str = ""
    """Records to measure on; "" holds out a part of `train` by the hash of each record (of each paragraph)."""
    validation_fraction: Fraction = 0.2
    """Share of the records held out when `validation` is not given."""
    text_field: str = "text"
    """Field of the text; a list of words for token-classification, the query for retrieval, the prompt for
    instruction.
    """
    pair_field: str = ""
    """Field of a second text: of a sentence pair, or the passage that answers a query in retrieval."""
    label_field: str = "label"
    """Field of the label; a list, one for each word, for token-classification; the response for instruction."""


class FinetuneTrainSection(Section):
    """How the weights move: AdamW, linear warm-up, linear decay to 0."""

    epochs: int = Field(default=3, gt=0)
    """Passes over the records."""
    batch_rows: int = Field(default=32, gt=0)
    """Records in one step."""
    sequence_length: int = Field(default=128, gt=2)
    """Most tokens of a record; longer ones are cut, contexts of questions become several windows."""
    learning_rate: float = Field(default=3e-5, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices."""
    warmup_fraction: Fraction = 0.1
    """Share of the steps in which the learning rate rises."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0 = not clipped."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the model, as of a training run: with bf16 and fp16 its weights have 16 bits, and what is moved,
    measured and saved are their fp32 masters.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained."""
    seed: int = Field(default=0, ge=0)
    """Order of the records, dropout, and the new head's first values."""


class FinetuneRecipe(Section):
    """Everything that decides a fine-tuning."""

    version: Literal[1] = 1
    """Version of the recipe format."""
    task: Literal["classification", "token-classification", "question-answering", "retrieval", "instruction"]
    """What is learnt: labels of texts, labels of words, spans that answer questions, embeddings of queries and
    passages, or (GPT) responses to prompts.
    """
    model: str = ""
    """Trained model to start from: a run, a checkpoint, a model artifact or a Hugging Face directory."""
    data: RecordsSection = RecordsSection()
    train: FinetuneTrainSection = FinetuneTrainSection()
    window_stride: int = Field(default=64, gt=0)
    """question-answering: tokens that consecutive windows of a context share."""
    max_answer_tokens: int = Field(default=30, gt=0)
    """question-answering: longest answer."""
    temperature: float = Field(default=0.05, gt=0)
    """retrieval: divides the cosines before the softmax over the batch."""


def inputs_rule(recipe: FinetuneRecipe) -> Iterable[Problem]:
    """There is a model and there are records."""
    if not recipe.model:
        yield Problem("model", "no model to start from", "--set model=runs/my-bert")
    if not recipe.data.train:
        yield Problem("data.train", "no records", "--set data.train=my/records.jsonl")
    if not recipe.data.validation and not recipe.data.validation_fraction:
        yield Problem("data.validation_fraction", "nothing is held out to measure on", "for example 0.2")
    if recipe.task == "retrieval" and not recipe.data.pair_field:
        yield Problem(
            "data.pair_field", "retrieval needs the passage of each query", 'for example "positive"'
        )


RULES = (inputs_rule,)


def resolve(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """The recipe with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).resolve()) if path else ""

    data = recipe.data.model_copy(
        update={"train": absolute(recipe.data.train), "validation": absolute(recipe.data.validation)}
    )
    return recipe.model_copy(update={"model": absolute(recipe.model), "data": data})
