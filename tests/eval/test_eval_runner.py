"""Evaluations survive crashes and any number of processes without a trace in the scores; means and
contamination are right.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from throughline.core.errors import Failed, WrongUse
from throughline.eval.asked import Settings
from throughline.eval.causal import CausalScorer
from throughline.eval.contamination import shared_runs
from throughline.eval.items import Draw, with_examples
from throughline.eval.metrics import aggregate
from throughline.eval.report import curves, rows_of
from throughline.eval.runner import Ranks, evaluate, group_means, present
from throughline.eval.task import find_tasks

TASKS = ["lambada_openai", "blimp_wh_island", "blimp_transitive"]
LIMIT = 12


@pytest.fixture(scope="module")
def scorer(small_gpt, gpt2_tokenizer) -> CausalScorer:
    return CausalScorer(small_gpt, gpt2_tokenizer, identity="weights", batch_tokens=64)


@pytest.fixture(scope="module")
def wanted(scorer) -> list:
    return evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT))


def test_a_killed_evaluation_goes_on_where_it_was(
    scorer, wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any number of batches, the last line cut: the same scores, and no question is asked twice."""
    real, asked = scorer.score, []

    def killed_after(batches: int):
        def score(questions):
            for number, batch in enumerate(real(questions)):
                asked.extend(index for index, _ in batch)
                yield batch
                if number + 1 == batches:
                    raise KeyboardInterrupt

        return score

    for stop in (1, 2, 1):
        monkeypatch.setattr(scorer, "score", killed_after(stop))
        with pytest.raises(KeyboardInterrupt):
            evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path)
        file = tmp_path / "answers-0.jsonl"
        file.write_bytes(file.read_bytes() + b'{"key": "cut in the mi')
    monkeypatch.setattr(scorer, "score", killed_after(10_000))
    assert evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path) == wanted
    assert len(asked) == LIMIT * len(TASKS)
    monkeypatch.setattr(scorer, "score", lambda questions: pytest.fail("a finished evaluation asks nothing"))
    assert evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path) == wanted


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 333), (1, 4096), (2, 4096), (3, 1)])
def test_any_number_of_ranks_and_any_batch_give_the_same_scores(
    small_gpt, gpt2_tokenizer, wanted, tmp_path: Path, world: int, batch: int
) -> None:
    """Ranks in turn, the first one last; of three one dies without having answered anything. Equal to the
    last bit.
    """
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, identity="weights", batch_tokens=batch)
    for rank in reversed(range(world)):
        if rank == world - 1 and world == 3:
            continue
        found = evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path, Ranks(rank, world))
        assert found == (wanted if rank == 0 else [])
    assert len(list(tmp_path.glob("answers-*.jsonl"))) >= min(world, 2)


def test_other_weights_share_no_answers(scorer, small_gpt, gpt2_tokenizer, tmp_path: Path) -> None:
    evaluate(scorer, find_tasks(TASKS[:1]), Settings(limit=2), tmp_path)
    other = CausalScorer(small_gpt, gpt2_tokenizer, identity="others")
    asked = []
    real = other.score
    other.score = lambda questions: (asked.extend(questions), real(questions))[1]  # type: ignore[method-assign]
    evaluate(other, find_tasks(TASKS[:1]), Settings(limit=2), tmp_path)
    assert len(asked) == 2


def test_examples_depend_on_the_record_alone(scorer) -> None:
    few = Settings(limit=3, shots=2, seed=1)
    more = Settings(limit=6, shots=2, seed=1)
    first = evaluate(scorer, find_tasks(["blimp_wh_island"]), few)[0].samples
    assert evaluate(scorer, find_tasks(["blimp_wh_island"]), more)[0].samples[:3] == first
    assert (
        evaluate(scorer, find_tasks(["blimp_wh_island"]), Settings(limit=3, shots=2, seed=2))[0].samples
        != first
    )


def test_a_group_is_the_mean_of_its_members(wanted) -> None:
    (group,) = group_means(wanted)
    values = [score.summary["metrics"]["acc"]["value"] for score in wanted[1:]]
    errors = [score.summary["metrics"]["acc"]["stderr"] for score in wanted[1:]]
    assert group["metrics"]["acc"]["value"] == pytest.approx(np.mean(values)) and group["n"] == 2 * LIMIT
    assert group["metrics"]["acc"]["stderr"] == pytest.approx(np.hypot(*errors) / 2)
    lines = rows_of({"tasks": [], "groups": [group]})
    assert lines[0][0] == "blimp (2 tasks)", "a mean of some members must not pass for the whole group's"


def test_truncation_is_counted(small_gpt, gpt2_tokenizer) -> None:
    narrow = CausalScorer(small_gpt, gpt2_tokenizer, window=32)
    summary = evaluate(narrow, find_tasks(TASKS[:1]), Settings(limit=LIMIT))[0].summary
    assert summary["truncated_records"] > 0 and summary["truncated_tokens"] > summary["truncated_records"]
    assert summary["scorer"]["window"] == 32


def test_records_that_are_too_long_are_cut_refused_or_left_out(small_gpt, gpt2_tokenizer, wanted) -> None:
    """Left out: the others keep their number and their answer; refused: by name of file and line."""
    tasks = find_tasks(TASKS[:1])
    narrow = CausalScorer(small_gpt, gpt2_tokenizer, window=80)
    cut = evaluate(narrow, tasks, Settings(limit=LIMIT))[0]
    left = evaluate(narrow, tasks, Settings(limit=LIMIT, overlong="skip"))[0]
    long = {place for place, sample in enumerate(cut.samples) if sample["lost"]}
    assert 0 < len(long) == cut.summary["truncated_records"] == left.summary["skipped_records"] < LIMIT
    assert left.samples == [sample for sample in cut.samples if sample["record"] not in long]
    assert (left.summary["truncated_records"], left.summary["n"]) == (0, LIMIT - len(long))
    with pytest.raises(Failed, match="too long for the model") as caught:
        evaluate(narrow, tasks, Settings(limit=LIMIT, overlong="error"))
    assert caught.value.where.startswith(cut.samples[min(long)]["where"])
    with pytest.raises(Failed, match="no record of task"):
        evaluate(
            CausalScorer(small_gpt, gpt2_tokenizer, window=4), tasks, Settings(limit=LIMIT, overlong="skip")
        )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"query": "Q", "choices": ["a", "b"], "gold": 2}', "gold"),
        ('{"query": "Q", "choices": ["a", "b"], "gold": -1}', "gold"),
        ('{"query": "Q", "choices": ["a", ""], "gold": 0}', r"choices\[1\]"),
        ('{"query": "Q", "choices": [], "gold": 0}', "choices"),
        ('{"query": "Q", "gold": 0}', "lacks the field"),
        (
            '{"query": "Q", "choices": ["a", "' + "word " * 300 + '"], "gold": 0}',
            r"choices\[1\] is longer than the model's window",
        ),
        ('{"query": "Q \\ud800", "choices": ["a", "b"], "gold": 0}', "the context of a question"),
        ('{"query": "Q", "choices": ["a", "b \\udfff"], "gold": 0}', "the choices of a question"),
        ('{"query": NaN, "choices": ["a", "b"], "gold": 0}', "a field is null"),
        ("{broken", "this line is no JSON"),
        ("[" * 100_000, "this line is no JSON"),
    ],
)
def test_a_bad_record_is_named(scorer, tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "piqa" / "piqa.jsonl"
    file.parent.mkdir()
    file.write_text('{"query": "Q", "choices": ["a", "b"], "gold": 0}\n' + line + "\n")
    with pytest.raises(Failed, match=complaint) as caught:
        evaluate(scorer, find_tasks(["piqa"]), Settings(data_dir=tmp_path))
    assert f"{file}:2" in caught.value.where


@pytest.mark.parametrize("kind", ["rolling", "stream", "last_token"])
def test_a_document_of_no_tokens_is_named(scorer, tmp_path: Path, kind: str) -> None:
    """Nothing over nothing is no perplexity, and in some resamples of the standard error there would be no
    other document.
    """
    metric = "acc" if kind == "last_token" else "token_perplexity"
    (tmp_path / "own.toml").write_text(
        f'about = "own"\nkind = "{kind}"\nmetrics = ["{metric}"]\n[source]\nfiles = ["own.jsonl"]\n'
        '[[prompt]]\nfields = ["text"]\ntext = "{{ text.strip() }}"\n'
    )
    (tmp_path / "own.jsonl").write_text('{"text": "Some words to predict."}\n{"text": ""}\n')
    tasks = find_tasks([str(tmp_path / "own.toml")])
    if kind == "stream":
        (found,) = evaluate(scorer, tasks, Settings(data_dir=tmp_path))
        assert found.summary["n"] == 1, "lines of one stream may be blank"
        (tmp_path / "own.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(Failed, match="text has no tokens") as caught:
        evaluate(scorer, tasks, Settings(data_dir=tmp_path))
    assert f"own.jsonl:{1 if kind == 'stream' else 2}" in caught.value.where


def test_a_record_is_no_example_of_itself(tmp_path: Path) -> None:
    """A task whose examples come from the file that is evaluated would show every answer to some of its
    questions.
    """
    (tmp_path / "own.toml").write_text(
        'about = "own"\nkind = "multiple_choice"\nmetrics = ["acc"]\n[source]\nfiles = ["own.jsonl"]\n'
        'fewshot_files = ["o*.jsonl"]\n'
        '[[prompt]]\nfields = ["q"]\ncontext = "{{ q }}"\nchoices = ["no", "yes"]\ngold = "1"\n'
    )
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"q": f"Q{number}"}) + "\n" for number in range(4))
    )
    (task,) = find_tasks([str(tmp_path / "own.toml")])
    items = task.kind.items(task.records(tmp_path, None))
    pool = task.kind.items(task.records(tmp_path, None, fewshot=True))
    for number, item in enumerate(with_examples(items, pool, Draw("own", 3))):
        shown = [example.split()[0] for example in item.context.split("\n\n")]
        assert shown[-1] == f"Q{number}" and sorted(shown) == ["Q0", "Q1", "Q2", "Q3"]
    with pytest.raises(WrongUse, match="4 examples asked for, 3 to choose from"):
        with_examples(items, pool, Draw("own", 4))


def test_why_examples_come_from_the_evaluated_records_is_said(
    scorer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern that is none is not taken for a file that is not there."""
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"q": f"Q{number}"}) + "\n" for number in range(3))
    )
    for name, pattern, why in (
        ("one", "/train.jsonl", "Non-relative patterns"),
        ("two", "train.jsonl", "none of these is there"),
    ):
        (tmp_path / f"{name}.toml").write_text(
            f'about = "own"\nkind = "multiple_choice"\nmetrics = ["acc"]\n[source]\nfiles = ["own.jsonl"]\n'
            f'fewshot_files = ["{pattern}"]\n'
            '[[prompt]]\nfields = ["q"]\ncontext = "{{ q }}"\nchoices = ["no", "yes"]\ngold = "1"\n'
        )
        evaluate(scorer, find_tasks([str(tmp_path / f"{name}.toml")]), Settings(data_dir=tmp_path, shots=1))
        assert why in capsys.readouterr().err


def test_missing_data_and_wrong_names_are_named(scorer, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no data for task piqa") as caught:
        evaluate(scorer, find_tasks(["piqa"]), Settings(data_dir=tmp_path))
    assert "piqa/piqa.jsonl" in caught.value.why
    with pytest.raises(WrongUse, match="unknown task") as unknown:
        find_tasks(["helaswag"])
    assert "hellaswag" in unknown.value.fix


def test_nothing_is_fetched_for_a_group_that_is_partly_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped paradigms of BLiMP are scored without a network; the other members are left out, not waited
    for.
    """
    monkeypatch.setattr("throughline.eval.task.hub_records", lambda *_: pytest.fail("asked the network"))
    found = present(find_tasks(["blimp"]), Settings(limit=1))
    assert len(found) == 16
    monkeypatch.setattr("throughline.eval.task.hub_records", lambda *_: _no_network())
    for names in (
        ["anli"],
        ["blimp", "blimp_wh_vs_that_no_gap"],
        ["blimp_wh_island", "blimp_wh_vs_that_no_gap"],
    ):
        with pytest.raises(
            WrongUse, match="no network"
        ):  # the last one is not shipped and was asked for by its name
            present(find_tasks(names), Settings(limit=1))


def _no_network() -> None:
    raise WrongUse("no network")


def test_a_model_of_nans_has_no_score(gpt_directory: Path, gpt2_tokenizer) -> None:
    """Every comparison with a NaN is false, so the first choice would win, which in BLiMP is the right one:
    100 percent.
    """
    from throughline.inference.runtimes.source import open_model

    model = open_model(gpt_directory).model
    with torch.no_grad():
        model.output_weight().fill_(math.nan)
    with pytest.raises(Failed, match="the model predicts nothing") as caught:
        evaluate(CausalScorer(model, gpt2_tokenizer), find_tasks(["blimp_wh_island"]), Settings(limit=2))
    assert "wh_island" in caught.value.where


def test_a_page_of_one_word_has_a_perplexity_that_json_can_hold() -> None:
    """Chinese has no blanks: thousands of nats a word. Value and standard error stay finite numbers."""
    for number in aggregate("word_perplexity", [[-9000.0, 1.0], [-8000.0, 1.0], [-3.0, 1.0]]):
        json.dumps(number, allow_nan=False)


class _Store:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.tokens = ids, len(ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def test_contamination_finds_runs_of_thirteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 13 are found wherever the pieces are cut, runs of 12 never, and equal hashes alone are no hit."""
    monkeypatch.setattr("throughline.eval.contamination.PIECE", 50)
    generator = np.random.default_rng(1)
    store = _Store(generator.integers(0, 1000, 333).astype(np.uint16))
    fresh = generator.integers(1000, 2000, 40)
    for start in range(0, 320, 7):
        found, nearly = fresh.copy(), fresh.copy()
        found[5:18] = store.ids[start : start + 13]
        nearly[5:17] = store.ids[start : start + 12]
        assert shared_runs([found, nearly, fresh[:5]], store) == [True, False, False]
    alike = lambda ids: np.zeros(max(0, len(ids) - 12), np.uint64)  # noqa: E731
    monkeypatch.setattr("throughline.eval.contamination.window_hashes", alike)
    assert shared_runs([fresh[:20]], _Store(store.ids[:60])) == [False]


def test_contamination_of_repeated_tokens_ends() -> None:
    """Rows of dashes in store and records alike: compared pair by pair they would be 10^11 comparisons."""
    dashes = np.full(1000, 7)
    store = _Store(np.concatenate([np.full(100_000, 7), np.arange(100)]).astype(np.uint16))
    assert shared_runs([dashes] * 1000 + [np.arange(200, 230)], store) == [True] * 1000 + [False]


def test_curves_follow_the_steps() -> None:
    history = []
    for step in (100, 0, 50):
        accuracy = {"value": step / 200, "stderr": 0.1 if step else None}
        tasks = [{"task": "t", "metrics": {"acc": accuracy}}]
        validation = {"loss": 5.0 - step / 100}
        history.append({"step": step, "groups": [], "validation": validation, "tasks": tasks})
    plots = {chart.title: chart for chart in curves(history)}
    assert plots["t acc"].series == [("", [(0, 0.0), (50, 0.25), (100, 0.5)])]
    assert plots["t acc"].errors == {"": [(50, 0.196), (100, 0.196)]}
    assert plots["validation loss"].series == [("", [(0, 5.0), (50, 4.5), (100, 4.0)])]


def test_kept_answers_are_said_and_belong_to_one_program(
    small_gpt, gpt2_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The same weights under another version of the program or of torch, or on another device, are asked anew."""
    from importlib import metadata

    from throughline.eval.module_reader import ModuleReader

    tasks, settings = find_tasks(["lambada_openai"]), Settings(limit=4)
    days = iter(["2024-02-28", "2024-02-29"])
    monkeypatch.setattr("time.strftime", lambda form: next(days))

    def run() -> str:
        evaluate(CausalScorer(small_gpt, gpt2_tokenizer, identity="weights"), tasks, settings, tmp_path)
        return capsys.readouterr().err

    assert "kept" not in run()
    assert "4 of 4 answers are kept from 2024-02-28; --fresh asks all of them again" in run()
    real = metadata.version
    for package in ("throughline", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "version", lambda name, p=package: "99" if name == p else real(name))
            patch.setattr("time.strftime", lambda form: "2024-03-01")
            assert "kept" not in run()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    weight = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    there = SimpleNamespace(token_table=SimpleNamespace(weight=weight), config=small_gpt.config)
    there.eval = lambda: there
    assert ModuleReader(there).by == [*ModuleReader(small_gpt).by[:-1], "A card"]


def test_a_model_of_nans_writes_no_answer(gpt_directory: Path, gpt2_tokenizer, tmp_path: Path) -> None:
    """Its first token would be id 0, an answer like any other."""
    from throughline.inference.runtimes.source import open_model

    model = open_model(gpt_directory).model
    with torch.no_grad():
        model.output_weight()[3] = math.nan
    (tmp_path / "triviaqa").mkdir()
    record = {"question": "Who?", "answer": {"aliases": ["me"], "value": "me"}}
    (tmp_path / "triviaqa" / "validation.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(Failed, match="the model predicts nothing"):
        evaluate(CausalScorer(model, gpt2_tokenizer), find_tasks(["triviaqa"]), Settings(data_dir=tmp_path))


def test_the_samples_fill_in_for_nothing(scorer, tmp_path: Path) -> None:
    """LAMBADA and 16 of BLiMP's paradigms ship: where --data-dir lacks their files, that is said."""
    for name in ("lambada_openai", "blimp_wh_island"):
        assert present(find_tasks([name]), Settings())
        with pytest.raises(WrongUse, match=f"no data for task {name}"):
            present(find_tasks([name]), Settings(data_dir=tmp_path))
