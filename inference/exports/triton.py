"""A Triton model repository: a BERT's graph or plan (`bert`), its tokenizer as a step before it (`tokenizer`), and the
two as one model (`text`: an ensemble).

Only a BERT is handed over: Triton batches requests that have no state, and the cache of a GPT is state; a GPT
goes to vLLM as a Hugging Face directory. The server was not run: tests read the configurations by Triton's own schema
and run the tokenizer's step.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import onnx
import tokenizers

from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT
from ...models.config import GPTConfig
from ..graphs.graph_options import GraphOptions
from .export import Export, exports, write_json, write_judged
from .export_engine import BATCHES, compiled

MODEL, TOKENIZER, ENSEMBLE = "bert", "tokenizer", "text"
OPTIMUM = GraphOptions(names="optimum")  # no input whose length is not the text's
TYPES = {1: "TYPE_FP32", 7: "TYPE_INT64", 10: "TYPE_FP16"}  # by ONNX's numbers
TEXT = [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}]
MAX_BATCH, QUEUE, DELAY_US = 32, 256, 2000
STEP = 16  # the tokenizer fills its rows up to a multiple, so that requests of like length make one batch
README = f"""# Triton model repository

    tritonserver --model-repository .

`{ENSEMBLE}` takes texts (`TEXT`, of one string each) and gives every output of `{MODEL}`, which takes int64 ids.
Between them `{TOKENIZER}` makes the ids; its back end is Python and needs the `tokenizers` library in the container:

    pip install tokenizers=={{library}}

A text that is empty or longer than the model's context is an error of its request. Requests that wait beyond {QUEUE}
are refused; a batch waits at most {DELAY_US} us to fill. {{made}}
"""


@exports("onnx")
def export_triton(export: Export, options: GraphOptions = OPTIMUM, **plan: Any) -> None:
    """A Triton model repository of a BERT. For the variant `tensorrt` it holds a plan for the GPU of this machine;
    `plan`: what `compiled` takes of one.

    Raises as `export_onnx` or `export_engine`, and WrongUse for a GPT or a model without a tokenizer.
    """
    opened, graph = export.opened, export.folder / "model.onnx"
    if isinstance(opened.model.config, GPTConfig):
        why = "Triton batches requests without state, and the cache of a GPT is state"
        fix = "--to huggingface, and serve it with vLLM"
        raise WrongUse("a GPT has no Triton repository", why=why, fix=fix)
    if opened.tokenizer is None:
        fix = "put the model's tokenizer.json into its directory"
        raise WrongUse("a Triton repository takes text", where=opened.input.path, fix=fix)
    if options.outputs is None and isinstance(opened.model, BERT):  # ids of 30,522 words to each vector
        options = dataclasses.replace(options, outputs="embedding")
    place = export.folder / MODEL / "1"
    place.mkdir(parents=True)
    sizes, profiles = [8, MAX_BATCH], 0
    made = f"The graph is opset {options.opset}: the container's ONNX Runtime must know it."
    if options.variant == "tensorrt":
        engine, facts = compiled(export, "tensorrt", options, **plan)
        (place / "model.plan").write_bytes(engine)
        export.draft.facts |= facts
        sizes, profiles = list(plan.get("batches", BATCHES)), len(facts["profiles"])
        made = "The plan is for {library} {library_version} and compute capability {compute_capability}."
        made = made.format(**facts)
    else:
        write_judged(export, options)
        if graph.with_name("model.onnx.data").exists():
            place = place / "model.onnx"
            place.mkdir()
    written = onnx.load(str(graph), load_external_data=False).graph
    for file in export.folder.glob("model.onnx*"):
        file.unlink() if profiles else file.rename(place / file.name)
    inputs, outputs = _tensors(written.input), _tensors(written.output)
    _write_tokenizer(export, [one["name"] for one in inputs])
    _write_configs(export.folder, inputs, outputs, sizes, profiles)
    (export.folder / "README.md").write_text(README.format(library=tokenizers.__version__, made=made))
    export.draft.facts |= {"precision": options.precision, "layout": "triton"}


def _tensors(values: Any) -> list[dict[str, Any]]:
    """Inputs or outputs of a graph whose first dim is the batch everywhere; there it is left out."""
    return [
        {
            "name": value.name,
            "data_type": TYPES[value.type.tensor_type.elem_type],
            "dims": [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim][1:],
        }
        for value in values
    ]


def _write_tokenizer(export: Export, inputs: list[str]) -> None:
    """The step that makes the model's inputs of texts: how its directory treats them, and the tokenizer."""
    tokenizer, sentence = Tokenizer.load(str(export.opened.tokenizer)), export.sentence
    folder = export.folder / TOKENIZER / "1"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (folder / "model.py").write_bytes(Path(__file__).with_name("triton_step.py").read_bytes())
    settings = {
        "before": [i for i in [tokenizer.cls_id] if i is not None],
        "behind": [i for i in [tokenizer.sep_id] if i is not None],
        "context": sentence.context(export.opened.model.config.sequence_length),
        "step": STEP,
        "prompt": sentence.prompt,
        "lowercase": sentence.lowercase,
        "outputs": inputs,
    }
    write_json(folder / "settings.json", settings)


def _write_configs(
    folder: Path, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], sizes: list[int], profiles: int
) -> None:
    """The three configurations; `sizes` of batches, `profiles` of a plan (0: there is none)."""
    queue = {"max_queue_delay_microseconds": DELAY_US, "default_queue_policy": {"max_queue_size": QUEUE}}
    group: dict[str, Any] = {"kind": "KIND_GPU" if profiles else "KIND_AUTO", "count": 1}
    zeros = {"dims": [STEP], "zero_data": True}
    samples = [{"key": one["name"], "value": {"data_type": one["data_type"], **zeros}} for one in inputs]
    steps = [
        {
            "model_name": name,
            "model_version": -1,
            "input_map": [{"key": one["name"], "value": one["name"]} for one in given],
            "output_map": [{"key": one["name"], "value": one["name"]} for one in got],
        }
        for name, given, got in ((TOKENIZER, TEXT, inputs), (MODEL, inputs, outputs))
    ]
    configs: dict[str, dict[str, Any]] = {
        MODEL: {
            "platform": "tensorrt_plan" if profiles else "onnxruntime_onnx",
            "input": inputs,
            "output": outputs,
            "dynamic_batching": {"preferred_batch_size": sizes, **queue},
            "instance_group": [group | ({"profile": [str(i) for i in range(profiles)]} if profiles else {})],
            "model_warmup": [{"name": f"{STEP} tokens", "batch_size": 1, "inputs": samples}],
        },
        TOKENIZER: {
            "backend": "python",
            "input": TEXT,
            "output": inputs,
            "dynamic_batching": queue,
            "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        },
        ENSEMBLE: {
            "platform": "ensemble",
            "input": TEXT,
            "output": outputs,
            "ensemble_scheduling": {"step": steps},
        },
    }
    for name, config in configs.items():
        lines = text_format({"name": name, "max_batch_size": sizes[-1], **config})
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.pbtxt").write_text("\n".join(lines) + "\n")
    (folder / ENSEMBLE / "1").mkdir()
    (folder / ENSEMBLE / "1" / ".keep").touch()  # Triton wants a version's folder of an ensemble too


def text_format(message: dict[str, Any], margin: str = "") -> list[str]:
    """A message in protobuf's text format, a line each field; names of enums are words in capitals."""
    lines = []
    for name, value in message.items():
        for one in value if isinstance(value, list) and name != "dims" else [value]:
            if isinstance(one, dict):
                lines += [f"{margin}{name} {{", *text_format(one, margin + "  "), f"{margin}}}"]
            elif isinstance(one, str) and name not in ("data_type", "kind"):
                lines.append(f"{margin}{name}: {json.dumps(one)}")
            else:
                lines.append(f"{margin}{name}: {str(one).lower() if one is True else one}")
    return lines
