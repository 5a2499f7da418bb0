"""lm-evaluation-harness on local records, offline: its own task files with another source, its own requests
and scores.

Records are in the hub's schema. Its task file is included by a generated one that only replaces the data set
by a JSON file.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

# our task -> the harness's task file
FILES = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "wsc273": "wsc273/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "copa": "super_glue/copa/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "rte": "super_glue/rte/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "wic": "super_glue/wic/default.yaml",
    "race": "race/race.yaml",
    "anli_r1": "anli/anli_r1.yaml",
    "anli_r2": "anli/anli_r2.yaml",
    "anli_r3": "anli/anli_r3.yaml",
    "mrpc": "glue/mrpc/default.yaml",
    "sst2": "glue/sst2/default.yaml",
    "triviaqa": "triviaqa/default.yaml",
    "nq_open": "nq_open/nq_open.yaml",
    "mmlu_astronomy": "mmlu/default/mmlu_astronomy.yaml",
    "wikitext_2": "wikitext/wikitext.yaml",
}


def task_file(name: str) -> Path:
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    if name.endswith(".yaml"):
        return folder / name
    assert name in FILES or name.startswith("blimp_"), (
        f"FILES in {Path(__file__).name} names no file for {name}"
    )
    return folder / (FILES[name] if name in FILES else f"blimp/{name.removeprefix('blimp_')}.yaml")


def load(
    folder: Path, records: dict[str, list[dict[str, Any]]], examples: int = 0
) -> tuple[Any, dict[str, str]]:
    """(task manager, our name -> its name) for tasks over these records, one JSON file each, written into
    `folder`. The first `examples` of them are those that are drawn from, and no questions.
    """
    import yaml
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for name, rows in records.items():
        plain = name.removesuffix(".yaml").replace("/", "_")
        files = {"test": folder / f"{plain}.json"} | (
            {"dev": folder / f"{plain}.dev.json"} if examples else {}
        )
        for file, own in zip(files.values(), (rows[examples:], rows[:examples])):
            file.write_text("".join(json.dumps(row) + "\n" for row in own))
        made = {
            "include": str(task_file(name)),
            "task": f"local_{plain}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": "dev" if examples else "test",
        }
        if "samples:" in task_file(name).read_text():  # its own examples, which a split would stand before
            made["fewshot_split"] = None
        names[name] = made["task"]
        (folder / f"{plain}.yaml").write_text(yaml.safe_dump(made))
    return TaskManager(include_path=str(folder), include_defaults=False), names


def requests(
    folder: Path, records: dict[str, list[dict[str, Any]]], shots: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """What the harness asks for each record: its requests' arguments, its choices and its idea of the right
    answer. Examples (`shots`) are drawn from the other records.
    """
    manager, names = load(folder, records)
    loaded = manager.load(list(names.values()))["tasks"]
    asked: dict[str, list[dict[str, Any]]] = {}
    for name, theirs in names.items():
        task = loaded[theirs]
        asked[name] = []
        for doc in task.eval_docs:
            made = task.construct_requests(doc, task.fewshot_context(doc, shots))
            asked[name].append(
                {
                    "arguments": [one.args for one in (made if isinstance(made, list) else [made])],
                    "gold": task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc),
                    "choices": task.doc_to_choice(doc) if task.config.doc_to_choice else None,
                }
            )
    return asked


def scores(
    folder: Path, records: dict[str, list[dict[str, Any]]], model: Any, batch: int = 8, **how: Any
) -> dict[str, dict[str, Any]]:
    """The harness's scores of a Hugging Face directory, or of a model of its own form: {our task: {"metrics": {name:
    value}, "answers": [...]}}; `how` goes to its `simple_evaluate`.
    """
    import lm_eval
    import lm_eval.models  # which names its own, also where a model of another package was named first

    manager, names = load(folder, records)
    found = lm_eval.simple_evaluate(
        model="hf" if isinstance(model, Path) else model,
        model_args={"pretrained": str(model), "dtype": "float32"} if isinstance(model, Path) else None,
        tasks=list(names.values()),
        batch_size=batch,
        device="cpu",
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        **how,
    )
    made = {}
    for name, theirs in names.items():
        metrics = {
            key.removesuffix(",none"): value
            for key, value in found["results"][theirs].items()
            if key.endswith(",none")
        }
        samples = sorted(found["samples"][theirs], key=lambda sample: sample["doc_id"])
        made[name] = {"metrics": metrics, "answers": [sample["resps"] for sample in samples]}
    return made
