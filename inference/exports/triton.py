"""A Triton model repository with an ONNX graph in it: config.pbtxt, the graph, the tokenizer.

    <out>/<name>/config.pbtxt        inputs, outputs, dynamic batching with a bounded queue
    <out>/<name>/1/model.onnx        or the folder model.onnx/ when the weights are external
    <out>/tokenizer.json             for the client, or a Python back end before the model (README.md)

Only a BERT is handed over: Triton batches requests that have no state, and the cache of a GPT is state; a GPT
goes to vLLM as a Hugging Face directory. The server was not run; a schema check in the tests reads the file.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ...core.errors import WrongUse
from ...models.bert import BERT
from ...models.config import GPTConfig
from ..graphs.graph_options import GraphOptions
from .export import ALONE, Judging, Report, exporting, write_judged

MODEL = "bert"
OPTIMUM = GraphOptions(names="optimum")  # no input whose length is not the text's
TYPES = {1: "TYPE_FP32", 7: "TYPE_INT64", 10: "TYPE_FP16"}  # by ONNX's numbers
MAX_BATCH, QUEUE, DELAY_US = 32, 256, 2000
WARM = 16  # tokens of the text that a container reads before it says that it is ready
README = """# Triton model repository

    tritonserver --model-repository .

`{name}` takes int64 ids and returns float32. Text becomes ids with `tokenizer.json` (the `tokenizers` library),
which adds the special tokens itself:

    from tokenizers import Tokenizer
    ids = Tokenizer.from_file("tokenizer.json").encode("some text").ids

To let the server take text, put a model of the Python back end before this one that does the same, and an
ensemble over both. The graph is opset {opset}: the container's ONNX Runtime must know it (--opset writes an
older one). Requests that wait beyond {queue} are refused; a batch waits at most {delay} us to fill.
"""


def export_triton(
    path: Path | str,
    out: Path | str,
    options: GraphOptions = OPTIMUM,
    judging: Judging = ALONE,
    overwrite: bool = False,
) -> Report:
    """Write the BERT at `path` as a Triton model repository; returns what parity.json holds.

    Raises as `export_onnx`, and WrongUse for a GPT.
    """
    import onnx

    with exporting(path, out, "onnx", judging, overwrite) as export:
        if isinstance(export.opened.model.config, GPTConfig):
            why = "Triton batches requests without state, and the cache of a GPT is state"
            fix = "--to huggingface, and serve it with vLLM"
            raise WrongUse("a GPT has no Triton repository", why=why, fix=fix)
        if options.outputs is None and isinstance(
            export.opened.model, BERT
        ):  # ids of 30,522 words to each vector
            options = dataclasses.replace(options, outputs="embedding")
        write_judged(export, options)
        folder, graph = export.folder, export.folder / "model.onnx"
        place = folder / MODEL / "1"
        place.mkdir(parents=True)
        (folder / MODEL / "config.pbtxt").write_text(
            config_pbtxt(MODEL, onnx.load(str(graph), load_external_data=False).graph)
        )
        if graph.with_name("model.onnx.data").exists():
            place = place / "model.onnx"
            place.mkdir()
        for file in folder.glob("model.onnx*"):
            file.rename(place / file.name)
        notes = {"name": MODEL, "opset": options.opset, "queue": QUEUE, "delay": DELAY_US}
        (folder / "README.md").write_text(README.format(**notes))
        export.draft.facts |= {"precision": options.precision, "layout": "triton"}
    return export.report


def config_pbtxt(name: str, graph: Any) -> str:
    """The model configuration of a graph whose first dim is the batch everywhere; there it is left out."""
    lines = [f'name: "{name}"', 'platform: "onnxruntime_onnx"', f"max_batch_size: {MAX_BATCH}"]
    for kind, values in (("input", graph.input), ("output", graph.output)):
        blocks = []
        for value in values:
            dims = [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim][1:]
            kind_of = TYPES[value.type.tensor_type.elem_type]
            blocks.append(f'  {{ name: "{value.name}" data_type: {kind_of} dims: {dims} }}')
        lines += [f"{kind} [", ",\n".join(blocks), "]"]
    lines += [
        "dynamic_batching {",
        "  preferred_batch_size: [8, 32]",
        f"  max_queue_delay_microseconds: {DELAY_US}",
        f"  default_queue_policy {{ max_queue_size: {QUEUE} }}",
        "}",
        "instance_group [ { kind: KIND_AUTO count: 1 } ]",
        "model_warmup [ {",
        f'  name: "{WARM} tokens" batch_size: 1',
    ]
    kinds = {value.name: TYPES[value.type.tensor_type.elem_type] for value in graph.input}
    warm = [
        f'  inputs {{ key: "{name}" value: {{ data_type: {kind} dims: [{WARM}] zero_data: true }} }}'
        for name, kind in kinds.items()
    ]
    lines += [*warm, "} ]"]
    return "\n".join(lines) + "\n"
