"""Programs that a model writes: run in a process with limits, scored as by lm-evaluation-harness, never unasked."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from throughline.core.errors import WrongUse
from throughline.data.records import Record
from throughline.eval.asked import Asked, Settings
from throughline.eval.kinds.program import SECONDS, passes
from throughline.eval.opening import open_scorer
from throughline.eval.session import Request, evaluate_one
from throughline.eval.task import find_tasks

ADD = 'def add(a, b):\n    """The sum."""\n'
TEST = "def check(candidate):\n    assert candidate(2, 3) == 5"
HEAD = {"task_id": "HumanEval/0", "prompt": ADD, "test": TEST, "entry_point": "add"}
SUMS = [f"assert add({n}, 1) == {n + 1}" for n in range(3)]
# our task -> the harness's file, a record in the hub's form, and answers that are right and wrong
PROGRAMS: dict[str, Any] = {
    "humaneval": (
        "humaneval/humaneval.yaml",
        HEAD,
        ("    return a + b\n", "    return a - b\n", "    return ("),
    ),
    "mbpp": (
        "mbpp/mbpp.yaml",
        {"task_id": 11, "text": "Write a function that adds.", "test_list": SUMS, "code": "add = sum"},
        (f"{ADD}    return a + b", "add = print", "exit(0)", f"{ADD}    return a + b\r\n"),
    ),
}


class CodeEval:
    """The reference: what the metric code_eval of the hub says of programs, by running them here."""

    @staticmethod
    def compute(references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        right = []
        for test, (program,) in zip(references, predictions, strict=True):
            try:
                exec(f"{program}\n{test}", {})
                right.append(1.0)
            except BaseException:  # a program may leave
                right.append(0.0)
        return {"pass@1": sum(right) / len(right)}, {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_prompts_and_scores_are_the_harness_s(
    name: str, small_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every character of a prompt, with the fixed examples, the stops, and the judgement of made-up answers."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")
    import datasets
    import evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    file, row, answers = PROGRAMS[name]
    made = datasets.DatasetDict({"test": datasets.Dataset.from_list([row])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    monkeypatch.setattr(evaluate, "load", lambda *_: CodeEval)
    theirs = ConfigurableTask(config=load_yaml(Path(lm_eval.__file__).parent / "tasks" / file))
    (doc,) = theirs.eval_docs
    (bound,) = find_tasks([name])
    monkeypatch.setattr(type(bound), "records", lambda *_, **__: [Record("x:1", row)])
    scorer = open_scorer(small_directory).scorer
    scorer.window = 4096  # no answer is computed here
    (item,) = Asked(scorer, bound, Settings(run_programs=True)).items
    theirs.set_fewshot_seed(seed=1234)
    (asked,) = [theirs.construct_requests(doc, theirs.fewshot_context(doc, bound.task.shots))]
    assert item.context == asked.args[0]
    assert (asked.args[1]["until"], asked.args[1].get("max_gen_toks", 256)) == (
        bound.task.until,
        bound.task.max_tokens,
    )
    for answer in answers:
        one = Instance("generate_until", doc, ("", {}), 0)
        one.resps = [answer]
        for chain in theirs._filters:
            chain.apply([one])
        (response,) = one.filtered_resps.values()
        (wanted,) = theirs.process_results(doc, [response]).values()
        wanted = wanted["pass@1"] if isinstance(wanted, dict) else wanted
        assert bound.kind.outcome(item, [answer]) == {"pass@1": [wanted]}, answer


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("x = 1", True),
        ("raise SystemExit(0)", False),
        ("import os; os._exit(0)", False),
        ("while True: pass", False),
        ("x = bytearray(4 << 30)", False),
        ("open('large', 'wb').write(bytes(8 << 20))", False),
        ("import os; assert not os.listdir() and 'HOME' not in os.environ", True),
        ("import time; time.sleep(60)", False),
    ],
)
def test_a_program_has_limits(program: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("throughline.eval.kinds.program.LONGEST", SECONDS + 3)
    monkeypatch.setenv("HOME", "/root")
    assert passes(program) == right


def test_a_program_reaches_no_network_and_leaves_no_process(tmp_path: Path) -> None:
    """Where the kernel lets a user have namespaces."""
    if subprocess.run(["unshare", "--map-root-user", "--net", "true"], check=False).returncode:
        pytest.skip("no namespaces for users here")
    away = "import errno, socket\ntry:\n    socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError as error:\n"
    assert passes(f"{away}    assert error.errno == errno.ENETUNREACH")
    file = tmp_path / "late"
    assert passes(f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 1; touch {file}'])")
    subprocess.run(["sleep", "2"], check=True)
    assert not file.exists()


def test_programs_run_only_when_asked(small_directory: Path, tmp_path: Path) -> None:
    """Refused before anything is computed; asked for, a model that knows nothing passes nothing."""
    folder = tmp_path / "data" / "openai_humaneval"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps(HEAD) + "\n")
    task = tmp_path / "mine.toml"
    shipped = Path(__file__).parents[2] / "eval" / "tasks" / "humaneval.toml"
    task.write_text(shipped.read_text().replace("max_tokens = 1024", "max_tokens = 16"))
    asked = Request(small_directory, str(task), data_dir=tmp_path / "data", out=tmp_path / "scores")
    with pytest.raises(WrongUse, match="runs programs"):
        evaluate_one(asked)
    found, lines = evaluate_one(replace(asked, run_programs=True))
    assert found["tasks"][0]["metrics"]["pass@1"]["value"] == 0 and "pass@1" in "\n".join(lines)
