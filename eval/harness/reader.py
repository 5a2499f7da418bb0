"""`--harness-task FILE`: lm-evaluation-harness's files become `Task`s; what has no words in one is refused by field."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.errors import WrongUse
from ...core.recipe import build_recipe
from ..task import KINDS, BoundTask
from ..task_file import Matching, Step, Task
from .files import CALL, Fields, HarnessTask, files_by_name, filter_of, function, members, named, read_fields

# Fields that decide nothing here: names, notes, what only the harness's own program reads.
SILENT = (
    "task task_alias tag group group_alias metadata should_decontaminate recipe doc_to_decontamination_query "
    "dataset_kwargs training_split unsafe_code"
)
READ = (
    "dataset_path dataset_name validation_split test_split fewshot_split process_docs doc_to_text doc_to_target "
    "doc_to_choice process_results description target_delimiter fewshot_delimiter fewshot_config num_fewshot "
    "metric_list output_type generation_kwargs repeats filter_list"
)
EXAMPLES = "sampler split samples process_docs doc_to_text doc_to_target doc_to_choice fewshot_delimiter"
DEFAULT_METRICS = {
    "multiple_choice": ["acc", "acc_norm"],
    "loglikelihood": ["perplexity", "acc"],
    "loglikelihood_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "generate_until": ["exact_match"],
}
METRIC_KEYS = {"metric", "aggregation", "higher_is_better", "hf_evaluate", *Matching.model_fields}
SUMS = "bits_per_byte f1 matthews_corrcoef mcc mean nanmean perplexity weighted_perplexity"
LONGEST = 256  # tokens of an answer, where a file does not say (the harness's own default)


def read_harness_task(path: Path, *, code: bool = False) -> list[BoundTask]:
    """The tasks of a file. Raises WrongUse naming the field that cannot be read; `code`: functions may run."""
    tasks: dict[str, HarnessTask] = {}
    for file, fields in members(path):
        one = _Reading(file, fields, code).task()
        tasks.setdefault(one.name, one)
    groups = dict(_groups(path, read_fields(path)))
    return [
        replace(one, of={name: by for name, (own, by) in groups.items() if one.name in own})
        for one in tasks.values()
    ]


def _groups(path: Path, fields: Fields) -> Iterator[tuple[str, tuple[set[str], bool]]]:
    """The file's group and those in it that report a mean: name -> (its tasks, whether by record)."""
    if "group" not in fields:
        return
    if listed := fields.get("aggregate_metric_list"):
        given = [listed] if isinstance(listed, Mapping) else listed
        by_record = all(one.get("weight_by_size", True) for one in given)
        yield str(fields["group"]), ({str(one["task"]) for _, one in named(path, fields["task"])}, by_record)
    for name in [fields["task"]] if isinstance(fields["task"], str) else fields["task"]:
        if not isinstance(name, str):
            yield from _groups(path, name)
            continue
        for file in files_by_name(path.parent.resolve()).get(name, ()):
            yield from _groups(file, read_fields(file))


class _Reading:
    """One task's fields on their way to a `Task`."""

    def __init__(self, path: Path, fields: Fields, code: bool) -> None:
        self.path, self.code = path, code
        self.fields = {key: value for key, value in fields.items() if value is not None}
        self.name = str(fields.get("task", path.stem))
        self.calls: dict[str, str] = {}

    def refuse(self, what: str, why: str = "", fix: str = "") -> WrongUse:
        fix = fix or "lm-evaluation-harness's own program reads it: python -m throughline.eval.adapter run"
        return WrongUse(f"{what} cannot be read", where=f"{self.path}, task {self.name}", why=why, fix=fix)

    def task(self) -> HarnessTask:
        unknown = self.fields.keys() - set(f"{SILENT} {READ}".split())
        if unknown:
            raise self.refuse(f"the field {min(unknown)!r}", "it means nothing to these kinds of task")
        output = self.fields.get("output_type", "generate_until")
        if output not in DEFAULT_METRICS:
            raise self.refuse(f"output_type {output!r}", f"known: {', '.join(DEFAULT_METRICS)}")
        if (repeats := self.fields.get("repeats", 1)) != 1:
            raise self.refuse(f"repeats: {repeats}", "one greedy answer is written a question")
        for key in ("process_docs", "process_results"):
            if key in self.fields:
                self.call(key, self.fields[key])
        given = self.fields.get("fewshot_config") or {}
        for key in given.keys() - set(EXAMPLES.split()):
            raise self.refuse(f"fewshot_config.{key}")
        sampler, samples = given.get("sampler", "default"), given.get("samples")
        if sampler not in ("default", "first_n"):
            raise self.refuse(f"fewshot_config.sampler: {sampler}", "known: default, first_n")
        if isinstance(samples, str):
            samples = function(self.call("fewshot_config.samples", samples))()
        tree = {
            "about": f"{self.name} of lm-evaluation-harness, {self.path.name}",
            "kind": "rolling" if output == "loglikelihood_rolling" else output,
            "metrics": self.metrics(output),
            "source": self.source(given),
            "prompt": [self.prompt("", self.fields)],
            "delimiter": self.fields.get("target_delimiter", " "),
            "description": self.fields.get("description", ""),
            "separator": given.get("fewshot_delimiter", self.fields.get("fewshot_delimiter", "\n\n")),
            "shots": self.fields.get("num_fewshot", 0),
            "first": sampler == "first_n",
            "headroom": self.example_split(given) == self.fields.get("test_split"),
            "checked": "nothing",
        }
        if overrides := {key: value for key, value in given.items() if key.startswith("doc_to_")}:
            tree["example_prompt"] = [self.prompt("fewshot_config.", self.fields | overrides)]
        if samples:
            tree["examples"] = list(samples)
        if output == "generate_until":
            tree |= self.written()
        text = self.path.read_text(encoding="utf-8")
        task = build_recipe(tree, Task, where=self.path, text=text, what="the task file", fix="mend the file")
        return HarnessTask(self.name, "", task, task.source, named=True, calls=self.calls)

    def call(self, key: str, value: Any) -> str:
        """The name of a function that the user lets run. Raises WrongUse naming the field otherwise."""
        shown = str(value).removeprefix(CALL).rpartition("/")[2]
        if not isinstance(value, str) or not value.startswith(CALL):
            raise self.refuse(f"{key}: {shown}")
        if not self.code:
            why = "it is a function of a Python file beside the task"
            fix = "--task-code runs it, with all that you may do; read that file first"
            raise self.refuse(f"{key}: !function {shown}", why, fix)
        self.calls[key] = value
        return value

    def text(self, key: str, value: Any) -> str:
        if isinstance(value, str) and value.startswith(CALL):
            return self.call(key, value)
        return value if isinstance(value, str) else repr(value)

    def prompt(self, before: str, fields: Fields) -> Fields:
        choices = fields.get("doc_to_choice", "")
        if isinstance(choices, Mapping):
            choices = list(choices.values())
        if not isinstance(choices, list):
            choices = self.text(before + "doc_to_choice", choices)
        target = self.text(before + "doc_to_target", fields.get("doc_to_target", ""))
        context = self.text(before + "doc_to_text", fields.get("doc_to_text", ""))
        return {"fields": [], "context": context, "choices": choices, "gold": target}

    def example_split(self, given: Fields) -> str | None:
        """The split that the harness draws from as its file says; None where it looks for one."""
        return given.get("split", self.fields.get("fewshot_split"))

    def source(self, given: Fields) -> Fields:
        fields = self.fields
        split = fields.get("test_split", fields.get("validation_split"))
        if split is None:
            raise self.refuse("a task without test_split and validation_split", "no split is evaluated")
        others = (fields.get(key) for key in ("training_split", "validation_split"))
        shots = self.example_split(given) or next(filter(None, others), split)
        if "process_docs" in given:
            self.call("fewshot_config.process_docs", given["process_docs"])
        local = (fields.get("dataset_kwargs") or {}).get("data_files")
        if fields.get("dataset_path") in ("json", "csv", "parquet", "text") and local:
            by_split = local if isinstance(local, Mapping) else {split: local}
            files = {key: [value] if isinstance(value, str) else value for key, value in by_split.items()}
            return {"files": files.get(split, []), "fewshot_files": files.get(shots, []), "anywhere": True}
        path, name = str(fields.get("dataset_path", "")), fields.get("dataset_name")
        places = [path.rpartition("/")[2], self.name]
        return {
            "files": _patterns(places, name, split),
            "fewshot_files": _patterns(places, name, str(shots)),
            "dataset": path,
            "config": name,
            "split": split,
            "fewshot_split": shots,
        }

    def metrics(self, output: str) -> list[str]:
        listed = self.fields.get("metric_list")
        if listed is None:
            return DEFAULT_METRICS[output]
        names = []
        own = "process_results" in self.fields
        for entry in listed:
            name = entry.get("metric")
            if not isinstance(name, str) or name.startswith(CALL):
                why = "such a metric has its own library"
                raise self.refuse("metric_list: a metric that is a function", why)
            kind = KINDS["rolling" if output == "loglikelihood_rolling" else output]
            if not own and name not in kind.metrics:
                raise self.refuse(f"metric_list: {name}", f"known: {', '.join(kind.metrics)}")
            if not own and (unknown := entry.keys() - METRIC_KEYS):
                raise self.refuse(f"metric_list: {name}.{min(unknown)}")
            way = entry.get("aggregation", "mean")
            if isinstance(way, str) and way.startswith(CALL):
                if not own:
                    raise self.refuse(f"metric_list: {name}.aggregation", "it is a function")
                self.call(f"aggregation:{name}", way)
            elif own and entry.get("aggregation") == "mean":
                self.calls[f"aggregation:{name}"] = way
            elif way not in SUMS.split():
                known = f"known: {SUMS.replace(' ', ', ')}"
                raise self.refuse(f"metric_list: {name}.aggregation {way!r}", known)
            names.append(name)
        return names

    def written(self) -> Fields:
        given = dict(self.fields.get("generation_kwargs") or {})
        separator = self.fields.get("fewshot_delimiter", "\n\n")
        until = given.pop("until", [separator])
        most = given.pop("max_gen_toks", given.pop("max_new_tokens", LONGEST))
        if given.get("do_sample") and float(given.get("temperature", 1)) > 0:
            raise self.refuse("generation_kwargs.do_sample", "answers are greedy here")
        if int(given.get("num_beams", 1)) > 1:
            raise self.refuse("generation_kwargs.num_beams", "answers are greedy here")
        made: Fields = {
            "until": [one for one in ([until] if isinstance(until, str) else until) if one],
            "max_tokens": int(most),
        }
        for entry in self.fields.get("metric_list") or []:
            if entry["metric"] == "exact_match":
                keep = Matching.model_fields.keys() & entry.keys()
                made["exact_match"] = {key: entry[key] for key in keep if entry[key] is not None}
        chains = {str(one["name"]): one["filter"] for one in self.fields.get("filter_list") or []}
        if "process_results" not in self.fields:
            made["filters"] = {name: list(map(self.step, chain)) for name, chain in chains.items()}
        elif any(step["function"] != "take_first" for chain in chains.values() for step in chain):
            why = "that function scores answers as they are"
            raise self.refuse("filter_list beside process_results", why)
        return made

    def step(self, given: Fields) -> Fields:
        name = str(given.get("function"))
        given = {key: value for key, value in given.items() if value is not None}
        known = Step.model_fields["function"].annotation.__args__  # type: ignore[union-attr]
        if name in known:
            return given
        if name.startswith(CALL):
            self.call("filter_list", name)
        elif filter_of(name) is None:
            raise self.refuse(f"filter_list: {name}", "the harness has no filter of that name")
        return {"function": "take_first", "mapping_dict": given}


def _patterns(places: Sequence[str], name: str | None, split: str) -> list[str]:
    """Where the files of a split may lie below --data-dir: of the data set (and its configuration) or of the task."""
    below = [f"{place}/{name}" for place in places] if name else []
    return [
        *(f"{folder}/{deep}{split}[.-]*" for folder in below for deep in ("", "**/")),
        *(f"{place}/{split}[.-]*" for place in (places if not name else places[1:])),
        f"{places[1]}*.jsonl*",
    ]
