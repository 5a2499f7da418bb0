"""CORE's answers are those of nanochat's evaluator, question by question, where a checkout of it is given."""

import importlib.util
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from throughline.core.errors import WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.eval.asked import Settings
from throughline.eval.causal import CausalScorer
from throughline.eval.runner import evaluate, group_means
from throughline.eval.task import find_tasks
from throughline.models.gpt import GPT

LETTERS = ("red", "red fox", "blue", "grey wolf", "wolf")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Fourteen records of each form: choices that begin alike, contexts that end alike, texts."""
    draw = random.Random(0)
    words = "the/a/fox/wolf/runs/sleeps/over/under/hill/river/quick/lazy".replace("/", " ").split()

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    forms = {
        "world_knowledge/arc_easy": lambda: {
            "query": f"Question: {text(5)}?",
            "choices": [f"{LETTERS[i]} {text(i + 1)}" for i in range(4)],
            "gold": draw.randrange(4),
        },
        "language_understanding/winograd_wsc": lambda: {
            "context_options": [f"{text(4)} because the {one}" for one in ("fox", "grey wolf")],
            "continuation": text(3) + ".",
            "gold": draw.randrange(2),
        },
        "reading_comprehension/squad": lambda: {"context": text(9) + " ", "continuation": text(1)},
    }
    for file, make in forms.items():
        path = tmp_path / f"{file}.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(make()) + "\n" for _ in range(14)))
    return tmp_path


def test_core_is_the_mean_of_what_exceeds_guessing(
    small_gpt: GPT, gpt2_tokenizer: Tokenizer, data_dir: Path
) -> None:
    """Of the members whose data are there; 10 examples before each question where DCLM has 10."""
    scores = evaluate(
        CausalScorer(small_gpt, gpt2_tokenizer), find_tasks(["core"]), Settings(data_dir=data_dir)
    )
    shots = {one.summary["task"]: one.summary["shots"] for one in scores}
    assert shots == {"core_arc_easy": 10, "core_winograd": 0, "core_squad": 10}
    centred = []
    for one, guessed in zip(scores, (0.25, 0.5, 0.0)):
        values = {name: metric["value"] for name, metric in one.summary["metrics"].items()}
        assert values["centred"] == pytest.approx((values["acc"] - guessed) / (1 - guessed))
        centred.append(values["centred"])
    (mean,) = group_means(scores)
    assert mean["task"] == "core" and mean["metrics"]["centred"]["value"] == pytest.approx(sum(centred) / 3)
    with pytest.raises(WrongUse, match="no data"):
        evaluate(
            CausalScorer(small_gpt, gpt2_tokenizer), find_tasks(["core_copa"]), Settings(data_dir=data_dir)
        )


def test_every_answer_is_nanochats(
    small_gpt: GPT, gpt2_tokenizer: Tokenizer, data_dir: Path, pytestconfig: pytest.Config
) -> None:
    """Its own prompts, draws, parting and judgement, of `nanochat/core_eval.py`."""
    checkout = pytestconfig.getoption("--nanochat")
    if checkout is None:
        pytest.skip("needs a nanochat checkout (--nanochat PATH)")
    spec = importlib.util.spec_from_file_location("core_eval", checkout / "nanochat" / "core_eval.py")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    bos = gpt2_tokenizer.eos_id

    class Encoder:
        def get_bos_token_id(self) -> int:
            return bos

        def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
            return [[prepend, *gpt2_tokenizer.encode(text).tolist()] for text in texts]

    class Model:
        max_seq_len = small_gpt.config.sequence_length + 1  # the last token is not read

        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            return small_gpt(ids[:, :-1]).new_zeros(0) if ids.shape[1] < 2 else padded(small_gpt(ids[:, :-1]))

    def padded(logits: torch.Tensor) -> torch.Tensor:
        return torch.cat((logits, logits[:, -1:]), 1)

    tasks = find_tasks(["core"])
    scores = evaluate(CausalScorer(small_gpt, gpt2_tokenizer), tasks, Settings(data_dir=data_dir))
    kinds = {"arc_easy": "multiple_choice", "winograd": "schema", "squad": "language_modeling"}
    found = SimpleNamespace(right=0)
    for one in scores:
        member = next(task for task in tasks if task.name == one.summary["task"]).member
        data = [json.loads(line) for line in next(data_dir.rglob(f"{member['file']}.jsonl")).open()]
        order = list(range(len(data)))
        random.Random(1337).shuffle(order)
        shuffled = [data[place] for place in order]
        meta = {"task_type": kinds[member["name"]], "num_fewshot": int(member["shots"])}
        meta["continuation_delimiter"] = member.get("delimiter", " ")
        for place, record in enumerate(order):
            right = theirs.evaluate_example(place, Model(), Encoder(), shuffled, "cpu", meta)
            assert one.samples[record]["metrics"]["acc"] == [float(right)], (one.summary["task"], record)
            found.right += right
    assert found.right
