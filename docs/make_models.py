"""The page of the model families, docs/models.md: what opens, and what can be done with it, asked of the program."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from throughline.core.errors import Refused
from throughline.inference.exports.gguf_export import KNOWN, architecture_of, uncut
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.onnx_blocks import refuse_unknown
from throughline.models.config import ModelConfig, preset
from throughline.models.families import families
from throughline.models.huggingface_config import family_of_shape
from throughline.planner.cost import step_seconds
from throughline.planner.hardware import find_cluster
from throughline.planner.layout import Layout, layout_problems
from throughline.planner.work import Layouts, Work, find_software

SHOWN = {  # a model of each family, of its own proportions
    "gpt2": "gpt2-124m",
    "llama": "llama3.2-1b",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "mistral": "mistral-7b",
    "olmo2": "olmo2-1b",
    "smollm3": "smollm3-3b",
    "phi3": "phi3-mini-4k",
    "gemma2": "gemma2-2b",
    "gemma3_text": "gemma3-1b",
    "gpt_neox": "pythia-160m",
    "gptj": "gptj-6b",
    "opt": "opt-125m",
    "mixtral": "mixtral-8x7b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gpt_oss": "gpt-oss-20b",
    "olmoe": "olmoe-1b-7b",
    "starcoder2": "starcoder2-3b",
    "bloom": "bloom-176b",
    "bert": "bert-base",
    "modernbert": "modernbert-base",
}
BERT = {"name": "bert-base", "nsp": False}
# and of those without a preset, a near one with what makes it one of theirs
OTHERS: dict[str, dict[str, Any]] = {
    "phi": {"name": "gptj-6b", "linear_bias": "usual"},
    "dots1": {
        "name": "qwen3-30b-a3b",
        "kv_heads": 0,
        "router_scores": "sigmoid",
        "balance_bias": True,
        "shared_experts": 2,
    },
    "deepseek_v3": {
        "name": "olmoe-1b-7b",
        "qk_norm": "none",
        "router_scores": "sigmoid",
        "balance_bias": True,
        "shared_experts": 1,
    }
    | {"kv_latent": 512, "head_width": 192, "rope_width": 64, "value_width": 128},
    "megatron-bert": BERT | {"norm_first": True},
    "roberta": BERT | {"token_types": 1, "position_offset": 2},
    "xlm-roberta": BERT | {"token_types": 1, "position_offset": 2, "huggingface": "xlm-roberta"},
    "distilbert": BERT | {"token_types": 0, "pooler": "relu"},
    "electra": BERT | {"pooler": "gelu"},
}
HEAD = """# Models

Made by `make reference` from the program; a test checks that it is current.

`throughline generate`, `eval`, `serve`, `export`, `finetune` and `train --init-from` open a Hugging Face directory of any family below, and
`throughline export --to huggingface` writes it back as the family that it came from. A family is no class: it is a row of `models/families.toml` that says which
fields of one config (`models/config.py`) make it and what its tensors are called; `models/gpt.py` has one forward for all decoders, `models/bert.py` for encoders. So every field
can be set in a recipe too (`model.overrides`), and a preset is a starting point (`model.preset`).

Logits and the gradient of every parameter equal those of `transformers` in float64 to 1e-10 for a tiny random model of each
row, texts longer than its windows and than what its rope was trained for, read from files that `transformers` wrote and written to files that it reads;
decoding with a cache equals the whole forward (`tests/models/test_models_transformers.py`). The encoders' fine-tuned heads (labels of a text, of
tokens, spans) are read and written too, with the same logits. The presets of released models are checked against copies of their `config.json`, and
the names of the weights against the index files of released checkpoints, or what another public program lists of them: `tests/models/published_configs.json` and `published_names.json` say where
each was read, and `unsourced` where no copy was found (Pythia 160M, whose sizes are those of its training).
"""
TAIL = """
What the columns say: *tensor*, *context*: the layouts with these axes, proven equal to one process by rows of `tests/layouts.toml` and refused by name
where not; data, sharded and pipeline processes go with every family. *ONNX* is also what OpenVINO and Triton get. A `no` is a refusal by name
before anything is computed; torch trains, evaluates, generates and serves every family. Of encoders *serve, eval* is embedding, reranking and masked
words. One of each family goes all of these ways in `tests/inference/test_families.py`, greedy text the same from torch, from the graph and from the directory that is written back.
llama.cpp has no windows of Mistral, Phi-3 and StarCoder 2: their GGUF says that it takes texts of a window's length, which nothing cuts. A decoder whose directory has the `modules.json` of sentence-transformers (Qwen3-Embedding, E5-Mistral) embeds in the place of generating:
`embed` and `serve` put around a text what its tokenizer does, pool by the last token or the mean, and take prompts by name. DeBERTa is refused: its attention adds products of contents and
distances, which no kernel here has. `throughline plan` counts every field: parameters and products exactly, the norms of queries and keys, soft caps, sinks
and ALiBi's dense masks as free.

## Experts

`model.overrides.experts = 8` makes every feed-forward one of eight, of which a token goes through `experts_per_token`; the fields below it in
`models/config.py` are their width, a shared one, dense layers, the router's scores and groups. Three things keep a router even:
`balance_loss` (row by row, so that it depends on no layout), `router_z_loss`, and `balance_bias`, which is moved by the load of each step instead of a gradient.

No token is dropped, unless `expert_capacity_factor` (0 by default; 1.25 in Switch Transformer) says how many rows an expert takes in training: so many times its even share,
`tokens x experts_per_token / experts` rounded up, of the tokens of one process in one micro-batch (a tensor or context process: of its part of the rows), those whose
answers weigh most (Megatron-LM's `moe_expert_capacity_factor` with its policy `probs`). A token that is dropped by all of its experts goes on by the residual and a shared expert. So the
numbers of a run depend on `micro_batch_rows`; data, sharded, expert and pipeline processes equal one process with the same micro-batches, tensor and
context ones do not. Evaluation and generation drop none, and a plan prices all rows.

gpt-oss has `attention_sinks` (a learnt score of each head beside every softmax, merged by the log-sum-exp), experts with biases and a clamped gate
(`gate_limit`). Its published weights are mxfp4: they are refused with the line of transformers that writes them in bf16.

Sigmoid scores, groups, shared experts and that bias are those of DeepSeek V3 and dots.llm1. DeepSeek's latent attention is `kv_latent`, `q_latent`,
`rope_width` and `value_width`; a cache keeps the keys and values that the latent makes, not the latent, and the weights of a checkpoint must be in bf16 or
wider (its own are fp8 with scales, refused by name).

A step's record has `balance_loss` (1 is even), `router_z_loss`, `router_entropy`, `dropped_tokens` (their share) and `expert_imbalance` (the largest load over the mean one, of the
layer where it is largest). Experts train by AdamW with data, sharded, tensor, context and pipeline processes, equal to one
process (`tests/layouts.toml`, `experts-`): each tensor process holds them whole and routes its part of a row. With `parallel.expert` data processes
share them and send each other rows ([Layouts](layouts.md)). Other optimizers, fp8, offload and compression are refused by name.
In a graph for ONNX Runtime on a CPU its `MoE` operator computes the experts of a token alone. A graph of standard operators (portable, CUDA)
computes all of them for every token, and those that were not chosen have no share: their products cost experts / experts_per_token times as much
(4 times in Mixtral, 16 times in Qwen 3 30B-A3B), in memory as well. int8 and int4 of experts and experts for TensorRT are refused, as is
a GGUF of DeepSeek V3 with YaRN, which its published sizes have: decoding in llama.cpp differed.
`olmoe-1b-7b` is the published recipe, `olmoe-toy` its twin for a laptop.

## Further tokens

`model.overrides.predict_ahead = 1` lets a decoder of any shape predict the token after the next one too, 2 the one after that (DeepSeek-AI 2024, V3,
section 2.2): a block after the layers reads what the token before was predicted of and that token's embedding, each through a norm and both through a
product, and gives what the one output matrix predicts of. The token table is shared too. The mean of their losses is added
times `predict_ahead_loss` (0.3, as DeepSeek-V3 began) and divided by the count of all next tokens, as the paper has it; a target beyond the end of a document
counts for nothing, and `train.z_loss` is taken of these logits as well. A step's record has it as `ahead`; validations and scores are of the next token alone. Data, sharded, tensor,
context and pipeline processes, experts, recomputation and documents kept apart train it as one process does (rows `ahead-` of `tests/layouts.toml`): the last stage of a
pipeline has the blocks, and for them the token table. `throughline plan` counts parameters, products and memory of it.

It belongs to training: what opens a run to use it (evaluation, export, generation, a server, fine-tuning) leaves the blocks out, and the logits are the main model's. Checkpoints
keep them, and so does a run that begins with them (`model.init_from`); one whose weights have none begins with new blocks. A directory of DeepSeek-V3 that has
the layer after the last is read with it, of every other family none is written.

## What config.json may say

Every field is read, ignored knowingly (the lists `everywhere` and `ignored` in `families.toml`: ids of special tokens, generation, dropout, which is a
run's own decision), or refused by its name: an unknown field may change the numbers. Scaled rope is linear, dynamic, YaRN or Llama 3's; LongRoPE
(Phi-3's 128k models) is refused. Keys of dynamic scaling are not turned again when a cached text outgrows the trained length.

## A family that is not here

`phi` was added like this, in 17 lines of a row, one of proof, one of names and one of this page.

1. Its fields: read the forward in transformers beside `GPTConfig` or `BERTConfig` (`models/config.py`, with a comment for each field). What is new becomes a field with its count of
   parameters (`models/config.py`, `planner/tables.py`) and a line in `models/layers.py` or `models/gpt.py`; most families need none.
2. Its row: a section of `models/families.toml`, `like` the nearest one; of families with one shape the first is written. The head of that file says what each line is, and `""`
   takes a line away. A field of its config class that changes numbers is in `fields`, or in `must` with the values that ours can be.
3. Its proof: a line of `DECODERS` or `ENCODERS` in `tests/models/test_models_transformers.py`, with other values than the usual ones; `python -m pytest tests/models/test_models_transformers.py -k NAME`
   compares logits, gradients, cached decoding and files, both ways. Until it is there, nothing says that the row is right.
4. Its names: a line of `tests/models/published_names.json`, from the config.json (or a preset) and the index of weights of a released checkpoint, and where both were read.
5. Its layouts, graphs and GGUF: new fields are refused by name until `KNOWN` in `inference/graphs/onnx_blocks.py` lists them, and the family until
   `inference/exports/gguf.toml` does (with a line of `FAMILIES` in `tests/inference/test_gguf.py`); a row of `tests/layouts.toml` proves a layout.
6. This page: a model of it in `SHOWN` or `OTHERS` of `docs/make_models.py`, and `make reference`.
"""


def models_page() -> str:
    """The page as text."""
    lines = [
        HEAD,
        "| `model_type` | models | read and written | train, serve, eval | tensor | context | ONNX | TensorRT | GGUF | planned |",
    ]
    lines += ["|---" * 10 + "|"]
    for kind, family in families().items():
        config = preset(SHOWN[kind]) if kind in SHOWN else preset(**OTHERS[kind])
        cells = [
            _known(lambda config=config: family_of_shape(config)),
            "yes",
            _layout(config, Layout(tensor=_parts(config))),
            _layout(config, Layout(context=2)),
            _known(lambda config=config: refuse_unknown(config)),
            _known(lambda config=config: refuse_unknown(config, GraphOptions("tensorrt", "fp16"))),
            _gguf(kind, config),
            _planned(config),
        ]
        lines.append(f"| `{kind}` | {family.models} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + TAIL


def _parts(config: ModelConfig) -> int:
    """A tensor degree that divides its heads, so that only what the family is can be in the way."""
    return next(
        parts
        for parts in (2, 7, 1)
        if parts == 1 or not (config.heads % parts or config.key_value_heads % parts)
    )


def _layout(config: ModelConfig, layout: Layout) -> str:
    problems = layout_problems(layout, dataclasses.replace(config, dropout=0.0), 64, 4, 4)
    return "no: " + problems[0].text if problems else "yes"


def _gguf(kind: str, config: ModelConfig) -> str:
    short = uncut(config)
    if kind in KNOWN["lacking"]:
        return f"no: {KNOWN['lacking'][kind]}"
    found = _known(lambda: architecture_of(short))
    return found if short == config or found != "yes" else "of texts within the window"


def _planned(config: ModelConfig) -> str:
    """A step of 64 rows on eight H100, sharded."""
    layouts, cluster = Layouts(data=8, sharding=3), find_cluster("h100-80gb")
    length = min(config.sequence_length, 4096)
    seconds = step_seconds(Work(config, 64, length), layouts, cluster, find_software("throughline", "bf16"))
    return "yes" if 0 < seconds < math.inf else "no"


def _known(ask: Callable[[], object]) -> str:
    try:
        ask()
    except Refused as refused:
        field = refused.where.removeprefix("model").removeprefix(".")
        return f"no (`{field}`)" if field else "no"
    return "yes"
