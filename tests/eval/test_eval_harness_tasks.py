"""Task files of lm-evaluation-harness, read unchanged, ask what the harness asks, and score as it scores."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness_records import CODE, FILES
from small import small_model
from throughline.core.errors import WrongUse
from throughline.data.answers import answer_f1, answer_words
from throughline.eval.asked import Asked, Settings
from throughline.eval.harness.reader import read_harness_task
from throughline.eval.opening import open_scorer
from throughline.eval.runner import evaluate
from throughline.eval.task import find_tasks

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")
TASKS = Path(lm_eval.__file__).parent / "tasks"


# our task -> the harness's file that it says in other words
SHIPPED = {
    "commonsense_qa": "commonsense_qa/default.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "truthfulqa_mc1": "truthfulqa/truthfulqa_mc1.yaml",
    "truthfulqa_mc2": "truthfulqa/truthfulqa_mc2.yaml",
    "mmlu_anatomy": "mmlu/default/mmlu_anatomy.yaml",
    "mmlu_high_school_world_history": "mmlu/default/mmlu_high_school_world_history.yaml",
    "mmlu_pro_law": "mmlu_pro/mmlu_pro_law.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "nq_open": "nq_open/nq_open.yaml",
    "logiqa": "logiqa/logiqa.yaml",
    "cola": "glue/cola/default.yaml",
    "qnli": "glue/qnli/default.yaml",
    "qqp": "glue/qqp/default.yaml",
    "wnli": "glue/wnli/default.yaml",
    "mnli_matched": "glue/mnli/default.yaml",
    "multirc": "super_glue/multirc/default.yaml",
    "record": "super_glue/record/default.yaml",
    "xnli_en": "xnli/xnli_en.yaml",
    "xnli_de": "xnli/xnli_de.yaml",
    "xcopa_it": "xcopa/default_it.yaml",
    "xstorycloze_en": "xstorycloze/default_en.yaml",
    "xstorycloze_es": "xstorycloze/default_es.yaml",
}
SPLITS = ("train", "validation", "test", "dev", "eval", "validation_matched")


@pytest.fixture(autouse=True)
def squad_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ReCoRD's file imports, which transformers no longer has from 5 on."""
    found = ModuleType("transformers.data.metrics.squad_metrics")
    found.compute_f1 = lambda right, said: answer_f1(said, right)
    found.compute_exact = lambda right, said: int(answer_words(said) == answer_words(right))
    package = ModuleType("transformers.data.metrics")
    package.squad_metrics = found
    for module in (package, found):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Six records of a file in every split, below a directory for us and as a data set for the harness."""
    import datasets

    def store(name: str) -> Path:
        rows = [FILES[name](n) for n in range(6)]
        fields = _fields(TASKS / name)
        folder = (
            tmp_path / "data" / fields["dataset_path"].rpartition("/")[2] / (fields.get("dataset_name") or "")
        )
        folder.mkdir(parents=True)
        for split in SPLITS:
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in SPLITS})
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
        return tmp_path / "data"

    return store


def _fields(path: Path) -> dict[str, Any]:
    from throughline.eval.harness.files import read_fields

    return read_fields(path)


def _theirs(name: str) -> Any:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    return ConfigurableTask(config=load_yaml(TASKS / name))


@pytest.fixture(scope="module")
def model(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:100_000]
    return small_model(tmp_path_factory.mktemp("model") / "small", text, steps=0, n_positions=1024)


@pytest.fixture(scope="module")
def scorer(model: Path) -> Any:
    return open_scorer(model).scorer


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_harness_asks_what_it_asks_there(
    name: str, shots: int, stored: Any, scorer: Any
) -> None:
    """Every text, character by character, with the harness's own draw of the examples; and the right answers."""
    data, theirs = stored(name), _theirs(name)
    if shots and theirs.OUTPUT_TYPE == "loglikelihood_rolling":
        pytest.skip("documents have no examples")
    if shots and name == "agieval/aqua-rat.yaml":
        pytest.skip("the harness itself fails: several right choices are no text of an example")
    (bound,) = read_harness_task(TASKS / name, code=name in CODE)
    settings = Settings(data_dir=data, shots=shots, draw="harness")
    longest = 4 * scorer.window  # no answer is computed here
    scorer.window, kept = longest, scorer.window
    try:
        items = Asked(scorer, bound, settings).items
    finally:
        scorer.window = kept
    if shots:
        theirs.set_fewshot_seed(seed=1234)
    docs = list(theirs.eval_docs)
    assert len(items) == len(docs) > 0
    for item, doc in zip(items, docs, strict=True):
        context = theirs.fewshot_context(doc, shots) if theirs.OUTPUT_TYPE != "loglikelihood_rolling" else ""
        made = theirs.construct_requests(doc, context)
        asked = [one.args for one in (made if isinstance(made, list) else [made])]
        if theirs.OUTPUT_TYPE == "loglikelihood_rolling":
            assert asked == [(item.text,)]
        elif theirs.OUTPUT_TYPE == "generate_until":
            assert asked[0][0] == item.context
            assert [one for one in asked[0][1]["until"] if one] == bound.task.until
            assert asked[0][1].get("max_gen_toks", 256) == bound.task.max_tokens
        else:
            assert list(item.pairs) == asked


@pytest.mark.parametrize("name", FILES)
def test_answers_to_a_file_of_the_harness_score_as_there(name: str, stored: Any, scorer: Any) -> None:
    """Made-up answers to every question, through the harness's filters and metrics and through ours."""
    data, theirs = stored(name), _theirs(name)
    (bound,) = read_harness_task(TASKS / name, code=name in CODE)
    kind = bound.kind
    items = kind.items(bound.records(data, None))
    found: dict[str, list[Any]] = {}
    ours: dict[str, list[Any]] = {}
    from lm_eval.api.instance import Instance

    for number, (item, doc) in enumerate(zip(items, theirs.eval_docs, strict=True)):
        if theirs.OUTPUT_TYPE == "generate_until":
            answer = _written(item, number)
            for chain in theirs._filters:
                one = Instance("generate_until", doc, ("", {}), 0)
                one.resps = [answer]
                chain.apply([one])
                label = chain.name
                for metric, value in theirs.process_results(doc, [one.filtered_resps[label]]).items():
                    key = f"{metric},{label}" if bound.task.filters else metric
                    found.setdefault(key, []).append(value)
            packed = [answer]
        elif theirs.OUTPUT_TYPE == "loglikelihood_rolling":
            packed = [[[-3.0 - number, 0, 4, 0]]]
            for metric, value in theirs.process_results(doc, [-3.0 - number]).items():
                found.setdefault(metric, []).append(value)
        else:
            sums = [-(1.0 + (7 * number + 5 * place) % 11) for place in range(len(item.pairs))]
            packed = [[[value, place % 2, 1, 0] for place, value in enumerate(sums)]]
            for metric, value in theirs.process_results(
                doc, [(v, bool(i % 2)) for i, v in enumerate(sums)]
            ).items():
                found.setdefault(metric, []).append(value)
        for metric, value in kind.outcome(item, packed).items():
            ours.setdefault(metric, []).append(value)
    from throughline.eval.metrics import aggregate

    assert kind.reported
    for metric in kind.reported:
        way = theirs.aggregation()[metric.partition(",")[0]]
        assert aggregate(kind.metric(metric), ours[metric])[0] == pytest.approx(way(found[metric])), metric


def _written(item: Any, number: int) -> str:
    """An answer that is right, or wrong, or nearly."""
    right = item.answers[0]
    made = [right, f" The answer is {right}.", f"#### {number + number}"]
    return [*made, "", f"so $5 {right.upper()} 7.", "the answer is False."][number]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_task_says_what_the_harness_s_file_says(name: str, stored: Any, scorer: Any) -> None:
    """The same questions, examples included, the same right answers, filters and limits of an answer."""
    data = stored(SHIPPED[name])
    (bound,) = find_tasks([name])
    (theirs,) = read_harness_task(TASKS / SHIPPED[name], code=True)
    assert bound.task.shots == theirs.task.shots
    longest, kept = 4 * scorer.window, scorer.window
    scorer.window = longest
    try:
        for shots in (0, 2):
            settings = Settings(data_dir=data, shots=shots, draw="harness")
            both = [Asked(scorer, one, settings).items for one in (bound, theirs)]
            for ours, wanted in zip(*both, strict=True):
                assert ours.pairs == wanted.pairs and ours.answers == wanted.answers
                own = name in ("truthfulqa_mc2", "record")  # scored by a function there
                assert ours.right == wanted.right or own
    finally:
        scorer.window = kept
    if bound.task.kind == "generate_until":
        for key in ("until", "max_tokens", "exact_match"):
            assert getattr(bound.task, key) == getattr(theirs.task, key), key
        answers = [_written(ours, number) for number, ours in enumerate(both[0])]
        found = [
            [one.kind.outcome(item, [answer]) for item, answer in zip(both[0], answers)]
            for one in (bound, theirs)
        ]
        assert found[0] == found[1]


def test_scores_of_a_file_are_the_harness_s(stored: Any, model: Path, tmp_path: Path) -> None:
    """The whole way, two shots drawn as the harness draws: accuracy of `simple_evaluate` with its own model class."""
    from lm_eval import simple_evaluate

    for name in ("arc/arc_easy.yaml",):
        data, theirs = stored(name), _theirs(name)
        theirs._config.num_fewshot = 2
        wanted = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32"},
            tasks=[theirs],
            device="cpu",
            batch_size=2,
            bootstrap_iters=0,
            log_samples=True,
        )
        (scores,) = evaluate(
            open_scorer(model).scorer,
            read_harness_task(TASKS / name),
            Settings(data_dir=data, shots=2, draw="harness"),
        )
        (found,) = wanted["results"].values()
        for metric in ("acc", "acc_norm"):
            assert scores.summary["metrics"][metric]["value"] == found[f"{metric},none"]
        samples = sorted(next(iter(wanted["samples"].values())), key=lambda one: one["doc_id"])
        for sample, theirs_ in zip(scores.samples, samples, strict=True):
            sums = [packed[0] for packed in sample["answers"][0]]
            assert sums == pytest.approx([one[0][0] for one in theirs_["resps"]], abs=1e-3)


def test_a_group_is_read_with_its_tags_and_means() -> None:
    """MMLU's 57 subjects in four groups, by name, each record weighing the same."""
    found = read_harness_task(TASKS / "mmlu/default/_mmlu.yaml")
    assert len(found) == 57
    anatomy = next(bound for bound in found if bound.name == "mmlu_anatomy")
    assert anatomy.groups == {"mmlu": True, "mmlu_stem": True}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "task: x\noutput_type: multiple_choice\ntest_split: t\nprocess_docs: !function u.f\n",
            "process_docs: !function u.f",
        ),
        ("task: x\nclass: !function task.X\n", "'class'"),
        ("task: x\ntest_split: t\nrepeats: 4\n", "repeats: 4"),
        ("task: x\ntest_split: t\ngeneration_kwargs: {do_sample: true}\n", "do_sample"),
        ("task: x\ntest_split: t\ngeneration_kwargs: {num_beams: 4}\n", "num_beams"),
        ("task: x\ntest_split: t\nmetric_list: [{metric: bleu}]\n", "metric_list: bleu"),
        ("task: x\ntest_split: t\nfilter_list: [{name: a, filter: [{function: ner}]}]\n", "filter_list: ner"),
        ("task: x\ndoc_to_text: a\n", "test_split"),
        ("group: x\ntask: [nowhere]\n", "nowhere"),
        ("task: [\n", "no YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_by_field(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(text)
    with pytest.raises(WrongUse) as caught:
        read_harness_task(file)
    assert complaint in str(caught.value)
