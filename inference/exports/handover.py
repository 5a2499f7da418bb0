"""Directories (kind `model`) as transformers, vLLM and Text Embeddings Inference (TEI) read them; read back
by our own importer and compared with the torch model. What vLLM and TEI need is in `conditions`; neither was run.
"""

from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from ...core.files import read_json
from ...models.bert import BERTWithHead
from ...models.config import GPTConfig
from ...models.huggingface import load_huggingface, to_huggingface
from ...models.sentence import embeds
from ..graphs.graph_options import Pooling
from ..graphs.parity import BOUNDS, reference_of
from ..runtimes.source import find_model
from .export import Export, copy_tokenizer, exports, judge, write_json


@exports("model")
def export_huggingface(export: Export, pooling: Pooling | None = None, precision: str = "") -> None:
    """A Hugging Face directory that transformers loads. Weights are in `precision`, else in the 16 bits of the run's
    recipe or as they were stored.

    Raises Refused for a shape that Hugging Face's classes cannot express and when an output differs by more
    than the bound.
    """
    model: Any = export.opened.model
    config, folder = model.config, export.folder
    tuned = isinstance(model, BERTWithHead)
    fields, state = to_huggingface(model)
    precision = precision or find_model(export.opened.input.path).stored_dtype("cuda")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    state = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in state.items()}
    # in files of at most 5 GB
    huggingface_hub.save_torch_state_dict(state, folder, metadata={"format": "pt"})
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
        wanted = not tuned or model.head.kind == "embedding"
    if wanted:
        export.sentence.pooled(pooling).write(folder, config.width, config.sequence_length)
    write_json(folder / "config.json", fields | ids)
    read_back = load_huggingface(folder).to(export.device)
    backend = reference_of(read_back, export.tokenizer, export.opened.input).backend
    judge(export, export.reference(), backend, BOUNDS[precision], "the Hugging Face directory")
    export.report["conditions"] = conditions(folder, fields | ids)
    export.draft.facts |= {"architecture": fields["architectures"][0], "precision": precision}


def conditions(directory: Path, fields: dict[str, Any]) -> dict[str, list[str]]:
    """What vLLM and TEI would miss in this directory; an empty list: nothing that is known.

    By their documentation and source (vLLM: GPT-2 and Llama model files, supported pooling models; TEI:
    router/src/lib.rs and the BERT back end). *Not run* here.
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
