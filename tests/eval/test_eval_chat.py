"""Questions in a model's chat template equal lm-evaluation-harness's: what is asked, scored and written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import small
from throughline.core.errors import WrongUse
from throughline.data.records import Record
from throughline.eval.asked import Asked, Settings
from throughline.eval.items import Chat, Draw, Item, chat_text, with_examples
from throughline.eval.opening import ScorerOptions, open_scorer
from throughline.eval.runner import evaluate
from throughline.eval.task import BoundTask, find_tasks

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")

TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
WRITES_BOS = "{{ bos_token }}" + TURNS
ROWS: dict[str, list[dict[str, Any]]] = {
    "boolq": [
        {"passage": f"Water {word} it is wet.", "question": f"is water {word}", "label": number % 2}
        for number, word in enumerate(("--", "cold", "deep", "old"))
    ],
    "winogrande": [
        {"sentence": f"The cup {word} as the _ was big.", "option1": "cup", "option2": "case", "answer": "2"}
        for word in ("fell", "broke", "stood", "hid")
    ],
    "lambada_openai": [{"text": f"He said {word} and left the house"} for word in ("no", "yes", "it", "so")],
    "blimp_wh_island": [
        {"sentence_good": f"Who {word}s here?", "sentence_bad": f"Who {word} here?"}
        for word in ("sleep", "eat", "sing", "run")
    ],
    "nq_open": [
        {"question": f"who wrote {word}", "answer": [word, "nobody"]}
        for word in ("it", "this", "that", "all")
    ],
}


class Held(BoundTask):
    """A task over the records above."""

    def records(self, data_dir: Any, limit: int | None, *, fewshot: bool = False) -> list[Record]:
        return [Record(f"{self.name}:{number}", row) for number, row in enumerate(ROWS[self.name], 1)]


@pytest.fixture(scope="module")
def chat_model(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer

    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:20_000]
    path = small.small_model(tmp_path_factory.mktemp("chat") / "model", text, steps=0)
    made = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert made.get_vocab_size() < 1990
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("template", "multiturn", "shots", "bos"),
    [
        (TURNS, True, 2, None),
        (TURNS, False, 2, None),
        (REFUSES + TURNS, True, 0, None),
        (WRITES_BOS, True, 1, True),
    ],
    ids=["turns", "one text", "no system", "bos"],
)
def test_chats_equal_the_harness(
    chat_model: Path, tmp_path: Path, template: str, multiturn: bool, shots: int, bos: bool | None
) -> None:
    """Log-probabilities of every choice and every written answer, by its own model and by ours in its place."""
    from throughline.eval.adapter import ThroughlineLM

    (chat_model / "chat_template.jinja").write_text(template)
    scorer = open_scorer(chat_model, ScorerOptions(apply_chat_template=True, bos=bos)).scorer
    assert "chat template" in scorer.recipe
    tasks = []
    rows = {name: own for name, own in ROWS.items() if not shots or not name.startswith("blimp")}
    for bound in find_tasks(list(rows)):  # of BLiMP the harness leaves examples out, whatever is asked for
        task = bound.task.model_copy(update={"headroom": True, "max_tokens": 8})
        source = bound.source.model_copy(update={"fewshot_files": ["held"]})
        tasks.append(Held(bound.name, bound.group, task, source))
    settings = Settings(shots=shots, draw="harness", fewshot_as_multiturn=multiturn)
    ours = {scores.summary["task"]: scores.samples for scores in evaluate(scorer, tasks, settings)}
    how = {"num_fewshot": shots, "apply_chat_template": True, "fewshot_as_multiturn": multiturn}
    how["gen_kwargs"] = {"max_gen_toks": 8}
    adapted = ThroughlineLM(str(chat_model), **({} if bos is None else {"bos": bos}))
    for number, model in enumerate((chat_model, adapted)):
        theirs = harness.scores(tmp_path / str(number), rows, model, **how)
        for name, samples in ours.items():
            for sample, wanted in zip(samples, theirs[name]["answers"], strict=True):
                if isinstance(sample["answers"][0], str):
                    assert sample["answers"] == wanted[0], name
                    continue
                found = [packed[0] for packed in sample["answers"][0]]
                assert found == pytest.approx([one[0][0] for one in wanted], abs=1e-3), name


def test_an_answer_ends_where_the_turn_does(chat_model: Path) -> None:
    """As in a chat of the server: some families end a turn with a token that is not the tokenizer's end of text."""
    (chat_model / "chat_template.jinja").write_text(TURNS)
    scorer = open_scorer(chat_model, ScorerOptions(apply_chat_template=True)).scorer
    assert scorer.tokenizer.vocab["<|im_end|>"] in scorer.end_ids
    prompt = chat_text(scorer.chat, [("user", "Who goes there?")])
    scorer.end_ids = frozenset()
    ((_, whole),) = next(scorer.generate([prompt], (), 12))
    written = scorer.tokenizer.encode(whole).tolist()
    scorer.end_ids = frozenset(written[3:4])
    ((_, cut),) = next(scorer.generate([prompt], (), 12))
    assert cut == scorer.tokenizer.decode(written[: written.index(written[3])]) != whole


def test_a_description_is_the_system_s_turn(chat_model: Path) -> None:
    (chat_model / "chat_template.jinja").write_text(TURNS)
    scorer = open_scorer(chat_model, ScorerOptions(apply_chat_template=True)).scorer
    item, chat = Item("x:1", (("Who?", " me"),), data={"how": "brief"}), Chat(scorer.chat, " ", True)
    (asked,) = with_examples([item], None, Draw("own", 0), "Be {{how}}.", chat=chat)
    turns = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.pairs == ((turns, "me"),)


@pytest.mark.parametrize("multiturn", [True, False])
def test_fixed_examples_of_a_chat_are_shared(
    chat_model: Path, multiturn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions begin with the same tokens, which are computed once; the answers are those of each alone."""

    class WithExamples(Held):
        def records(self, data_dir: Any, limit: int | None, *, fewshot: bool = False) -> list[Record]:
            found = super().records(data_dir, limit)
            return [replace(one, where=f"examples {one.where}") for one in found] if fewshot else found

    (chat_model / "chat_template.jinja").write_text(TURNS)
    scorer = open_scorer(chat_model, ScorerOptions(apply_chat_template=True)).scorer
    (bound,) = find_tasks([next(iter(ROWS))])
    task = bound.task.model_copy(update={"first": True})
    source = bound.source.model_copy(update={"fewshot_files": ["held"]})
    settings = Settings(shots=2, fewshot_as_multiturn=multiturn)
    held = WithExamples(bound.name, bound.group, task, source)
    questions = Asked(scorer, held, settings).asks
    (trunk,) = {question.trunk for question in questions}
    assert 2 * len(trunk) > len(questions[0].pairs[0][0])
    (shared,) = evaluate(scorer, [held], settings)
    monkeypatch.setattr(scorer.reader, "shares", False)
    assert not any(question.shared for question in Asked(scorer, held, settings).asks)
    (alone,) = evaluate(scorer, [held], settings)
    for one, other in zip(shared.samples, alone.samples, strict=True):
        both = [[packed[0] for packed in sample["answers"][0]] for sample in (one, other)]
        assert both[0] == pytest.approx(both[1], abs=1e-4)


def test_a_chat_that_cannot_be_is_refused(chat_model: Path, small_directory: Path) -> None:
    """A model without a template; CORE, whose prompts are defined as one text."""
    with pytest.raises(WrongUse, match="no chat template"):
        open_scorer(small_directory, ScorerOptions(apply_chat_template=True))
    (chat_model / "chat_template.jinja").write_text(TURNS)
    scorer = open_scorer(chat_model, ScorerOptions(apply_chat_template=True)).scorer
    (bound,) = find_tasks(["core_copa"])
    rows = [{"query": "A", "choices": ["b", "c"], "gold": 0}]
    ROWS["core_copa"] = rows
    with pytest.raises(WrongUse, match="is no chat"):
        Asked(
            scorer, Held(bound.name, bound.group, bound.task, bound.source, member=bound.member), Settings()
        )
