"""Directories that others serve, compared with the torch model by what runs them here; none of these servers was run.

- `export_huggingface` (kind `model`): as transformers, vLLM and Text Embeddings Inference (TEI) read them.
- `export_triton`: a Triton model repository of a BERT's graph or plan (`bert`), its tokenizer as a step before it
  (`tokenizer`), and the two as one model (`text`: an ensemble), whose configurations are written from `triton/`.
  Tests read them by Triton's own schema and run the tokenizer's step.
"""

import dataclasses
from pathlib import Path
from typing import Any

import huggingface_hub
import onnx
import tokenizers
import torch

from ...core.errors import WrongUse
from ...core.files import from_template, read_json
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT, BERTWithHead
from ...models.config import GPTConfig
from ...models.huggingface import load_huggingface, to_huggingface
from ...models.sentence import embeds
from ..graphs.graph_options import GraphOptions, Pooling
from ..graphs.parity import BOUNDS, reference_of, with_experts
from ..runtimes.source import find_model
from .export import Export, copy_tokenizer, exports, judge, write_json, write_judged
from .export_engine import BATCHES, compiled


@exports("model")
def export_huggingface(export: Export, pooling: Pooling | None = None, precision: str = "") -> None:
    """A Hugging Face directory. Weights are in `precision`, else in the 16 bits of the run's recipe or as they were
    stored. Raises Refused for a shape that Hugging Face's classes cannot express and for an output beyond its bound.
    """
    model, folder = export.opened.model, export.folder
    config, (fields, state) = model.config, to_huggingface(model)
    precision = precision or find_model(export.opened.input.path).stored_dtype("cuda")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    state = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in state.items()}
    huggingface_hub.save_torch_state_dict(state, folder, metadata={"format": "pt"})  # files of at most 5 GB
    fields["dtype"] = fields["torch_dtype"] = str(dtype).removeprefix("torch.")  # new name and old
    special = copy_tokenizer(export.opened, folder)
    ids = {f"{name}_token_id": value for name, value in special.items() if name in ("bos", "eos", "pad")}
    if isinstance(config, GPTConfig):
        if "eos_token_id" in ids:  # GPT-2 begins with the token that it ends with; vLLM wants it written
            ids.setdefault("bos_token_id", ids["eos_token_id"])
        defaults = folder / "generation_config.json"
        write_json(defaults, ids | (read_json(defaults) if defaults.is_file() else {}))
        wanted = embeds(Path(export.opened.input.path))
    else:
        wanted = not isinstance(model, BERTWithHead) or model.head.kind == "embedding"
    if pooling and not wanted:
        raise WrongUse("this model has no embedding", where="--pooling", fix="leave it out")
    if wanted:
        export.sentence.pooled(pooling).write(folder, config.width, config.sequence_length)
    write_json(folder / "config.json", fields | ids)
    read_back = load_huggingface(folder).to(export.device)
    backend = reference_of(read_back, export.tokenizer, export.opened.input).backend
    bounds = with_experts(BOUNDS[precision], config)
    judge(export, export.reference(), backend, bounds, "the Hugging Face directory")
    export.report["conditions"] = conditions(folder, fields | ids)
    export.draft.facts |= {"architecture": fields["architectures"][0], "precision": precision}


def conditions(directory: Path, fields: dict[str, Any]) -> dict[str, list[str]]:
    """What vLLM and TEI, *not run* here, would miss in this directory, by their documentation and source (vLLM: GPT-2
    and Llama model files, supported pooling models; TEI: router/src/lib.rs and the BERT back end).
    """
    vllm = [] if (directory / "tokenizer.json").is_file() else ["tokenizer.json is missing"]
    tei, kind = [*vllm], fields["model_type"]
    if fields.get("position_embedding_type", "absolute") != "absolute":
        tei.append("positions are not absolute")
    if kind != "bert":
        tei = [f"{kind} is no text embedding model that TEI serves"]
        ids = [name for name in ("bos_token_id", "eos_token_id") if name not in fields]
        vllm += [f"config.json has no {name}" for name in ids]
    if kind == "gpt2" and not fields["tie_word_embeddings"]:
        vllm.append("the output matrix is not tied to the token table")
    return {"vllm": vllm, "tei": tei}


TEMPLATES = Path(__file__).with_name("triton")
OPTIMUM = GraphOptions(names="optimum")  # no input whose length is not the text's
TYPES = {1: "TYPE_FP32", 7: "TYPE_INT64", 10: "TYPE_FP16"}  # by ONNX's numbers
MAX_BATCH, QUEUE, DELAY_US = 32, 256, 2000
STEP = 16  # the tokenizer fills its rows up to a multiple, so that requests of like length make one batch


@exports("onnx")
def export_triton(export: Export, options: GraphOptions = OPTIMUM, **plan: Any) -> None:
    """For the variant `tensorrt` it holds a plan for the GPU of this machine; `plan`: what `compiled` takes of one.
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
    place = export.folder / "bert" / "1"
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
    said: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "sizes": sizes, "profiles": profiles}
    said |= {"queue": QUEUE, "delay_us": DELAY_US, "step": STEP}
    said |= {"library": tokenizers.__version__, "made": made}
    for name in ("bert", "tokenizer", "text"):
        config = export.folder / name / "config.pbtxt"
        config.parent.mkdir(exist_ok=True)
        config.write_text(from_template(TEMPLATES / f"{name}.pbtxt", said))
    (export.folder / "text" / "1").mkdir()
    (export.folder / "text" / "1" / ".keep").touch()  # Triton wants a version's folder of an ensemble too
    (export.folder / "README.md").write_text(from_template(TEMPLATES / "README.md", said))
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
    folder = export.folder / "tokenizer" / "1"
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
