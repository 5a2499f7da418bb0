"""Exports a model as an artifact of kind `gguf`: model.gguf, the format of llama.cpp and of the tools built on it (the
families of `gguf.toml`, with tokenizer and metadata), tokenizer.json and model.json, compared with the torch model
through llama.cpp where llama-cpp-python is installed.

Layouts, as llama.cpp's loaders expect them:

- matrices are (out, in); GPT-2's query, key and value are one matrix, one after another;
- Llama's and SmolLM 3's query and key rows are reordered, because ggml rotates neighbours where Hugging Face rotates
  halves; in the other families it rotates as they do. Llama 3's scaled rope is a tensor of divisors;
- GPT-J, which it has no loader of, is a Phi 2 whose attention has biases of zeros;
- what makes keys and values of DeepSeek's latent is two tensors, head by head: llama.cpp's cache holds the latent;
- NeoX's and BLOOM's query, key and value stand behind one another whole, not head by head;
- the experts of a layer are one tensor (experts, out, in), their router is f32;
- norms that scale by 1 + weight are stored with the 1;
- BERT's first row of token types is all that is ever used; of its heads the one that labels a text is stored;
- vectors and positions are f32. Of the matrices in q4_0 the output is q8_0, as llama.cpp keeps it finer.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...core.backend import BackendOptions
from ...core.console import warn
from ...core.errors import Refused, extra
from ...core.files import shipped_table
from ...data.chat import ChatTemplate
from ...data.gguf import to_gguf
from ...data.model_settings import chat_template, end_ids
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT, BERTWithHead
from ...models.config import BERTConfig, GPTConfig, ModelConfig
from ...models.gpt import GPT
from ...models.huggingface import to_huggingface
from ...models.huggingface_config import family_of_shape
from ...models.rotary import frequencies
from ...models.sentence import MEAN, Sentence
from ..graphs import parity
from ..runtimes.backends import classes_of, run_gguf
from ..runtimes.llama_backend import EXTRA
from .export import Export, copy_tokenizer, description, exports, judge, write_json

# llama.cpp computes GELU from a table of f16 values, so f32 is no closer than f16; its blocks of 32 weights are those
# of our int8 and int4, of random weights too: mean KL divergence in nats on random ids as well.
BOUNDS = dict.fromkeys(("f32", "f16"), replace(parity.BOUNDS["fp16"], sweep_kl=1e-3))
BOUNDS |= {"q8_0": replace(parity.BOUNDS["int8"], sweep_kl=1e-2)}
BOUNDS |= {"q4_0": replace(parity.BOUNDS["int4"], sweep_kl=0.3)}
TEXTS, LENGTH = 4, 64
GGUFPrecision = Literal["f32", "f16", "q8_0", "q4_0"]
HEADS = ("cls.", "bert.pooler")  # of pretraining, which llama.cpp has no place for
LABELS = {"bert.pooler.dense": "cls", "classifier": "cls.output"}  # of a model that labels texts
# what it computes: by family, by its own name of an architecture, and its names of our sizes
KNOWN: dict[str, dict[str, Any]] = shipped_table(__file__, "gguf.toml")


@exports("gguf")
def export_gguf(export: Export, precision: GGUFPrecision = "f16") -> None:
    """A GGUF file. Raises Refused for a shape that llama.cpp does not compute and for what is beyond its bound."""
    opened, file = export.opened, export.folder / "model.gguf"
    if (config := uncut(opened.model.config)) != opened.model.config:
        said = f"llama.cpp has no windows of this family: the file takes texts of {config.sequence_length:,} tokens"
        warn(f"{said}, of which a window of as many cuts none")
        opened.model.config = config
    described = description(opened.model)
    write_gguf(opened.model, opened.tokenizer, file, precision, export.sentence)
    write_json(export.folder / "model.json", described)
    copy_tokenizer(opened, export.folder)
    export.keep_sentence()
    export.draft.facts |= {"precision": precision, "pooling": export.sentence.pooling}
    if importlib.util.find_spec("llama_cpp") is None:
        warn("not compared with torch: llama-cpp-python is not installed (the extra llamacpp)")
        return
    reference = export.reference()
    if reference.encoder is not None:
        kept = ("last_hidden_state", "sentence_embedding", "logits")  # what a file has of a BERT
        headless = parity.Adapted(
            reference.encoder, lambda out, _: {name: out[name] for name in kept if name in out}, one_type=True
        )
        reference = replace(reference, backend=headless)
    backend = run_gguf(file, config, BackendOptions("cpu"), precision, len(classes_of(described)))
    length = min(LENGTH, config.sequence_length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (TEXTS, length))
    cases = [parity.Case(f"{TEXTS} x {length}", ids, np.full(TEXTS, length))]
    judge(export, reference, backend, parity.with_experts(BOUNDS[precision], config), "llama.cpp", cases)


def uncut(config: ModelConfig) -> ModelConfig:
    """For texts that are not longer than windows, where llama.cpp has none of the family."""
    kind, pattern = family_of_shape(config), config.attention_pattern
    told = KNOWN["architectures"].get(KNOWN["families"].get(kind, ""), {}).get("told", ())
    if pattern is None or not pattern.is_band or "attention_window" in told or config.positions != "rotary":
        return config
    letters = config.layer_pattern.replace("l", "g")
    changed: dict[str, Any] = {"attention_window": 0, "layer_pattern": letters if "n" in letters else ""}
    changed["huggingface"] = kind
    if config.rope_scaling in ("yarn", "llama3"):
        changed["rope_original_length"] = config.rope_original_length or config.sequence_length
    return replace(config, sequence_length=min(pattern.window, config.sequence_length), **changed)


def architecture_of(config: ModelConfig) -> str:
    """The name that llama.cpp has for this shape. Raises Refused for one that it computes differently."""
    kind = family_of_shape(config)
    written = KNOWN["families"]
    if kind not in written:
        why, fix = KNOWN["lacking"].get(kind, f"this one is {kind}"), "docs/models.md says what each can do"
        raise Refused(f"GGUF is written of {', '.join(written)}", where="model", why=why, fix=fix)
    name = written[kind]
    if isinstance(config, BERTConfig):
        return name
    own = KNOWN["architectures"].get(name, {})
    granted, told = KNOWN["granted"] | own.get("granted", {}), own.get("told", ())
    differing = [k for k, value in granted.items() if k not in told and getattr(config, k) != value]
    unlike = ("dynamic", "yarn") if name == "deepseek2" else ("dynamic",)
    differing += ["rope_scaling"] if config.rope_scaling in unlike else []
    differing += ["kv_heads"] if name in ("olmoe", "dots1") and config.key_value_heads < config.heads else []
    differing += ["shared_experts"] if config.balance_bias and not config.shared_experts else []
    if differing:
        why = ", ".join(f"{field} is {getattr(config, field)!r}" for field in differing)
        fix = "export to ONNX or Hugging Face"
        raise Refused(f"llama.cpp computes {name} otherwise", where=f"model.{differing[0]}", why=why, fix=fix)
    return name


def write_gguf(
    model: GPT | BERT | BERTWithHead,
    tokenizer: Path | None,
    path: Path,
    precision: GGUFPrecision = "f16",
    sentence: Sentence = MEAN,
) -> None:
    """Write the model to `path`; `sentence` says how a BERT embeds. Raises WrongUse without the gguf library, Refused
    for a model that llama.cpp does not compute.
    """
    gguf = extra("gguf", "writing a GGUF file", EXTRA)
    config = model.config
    architecture = architecture_of(config)
    head: Any = getattr(model, "head", None) if isinstance(config, BERTConfig) else None
    kind = head.kind if head is not None else "embedding"
    if kind not in ("embedding", "sequence-classification"):
        fix = "export to ONNX or Hugging Face; the model that was fine-tuned can be a GGUF file"
        raise Refused(f"a head for {kind} has no place in a GGUF file", where="--to gguf", fix=fix)
    _, state = to_huggingface(model, "phi" if architecture == "phi2" else "")
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, architecture, config, precision)
    if isinstance(config, BERTConfig):
        labelled = kind == "sequence-classification"
        writer.add_pooling_type(gguf.PoolingType["RANK" if labelled else sentence.pooling.upper()])
        if labelled:
            writer.add_classifier_output_labels(list(head.labels))
    _write_tokenizer(writer, tokenizer, config)
    for name, values in _tensors(architecture, config, state):
        stored = _kind(name, values, precision)
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, architecture: str, config: Any, precision: GGUFPrecision) -> None:
    import gguf

    kind = "ALL_F32" if precision == "f32" else f"MOSTLY_{precision.upper()}"
    writer.add_name(f"{config.layers} layers of {config.width}")
    writer.add_file_type(gguf.LlamaFileType[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if isinstance(config, GPTConfig):
        writer.add_head_count_kv(1 if config.kv_latent else config.key_value_heads)
    told = KNOWN["names"] | (KNOWN["experts"] if getattr(config, "experts", 0) else {})
    if getattr(config, "router_scores", "") == "sigmoid":
        chosen = config.router_groups_per_token < config.router_groups
        told = told | KNOWN["sigmoid"] | (KNOWN["groups"] if chosen else {})
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for ours, theirs in told.items():
        if (value := getattr(config, ours, 0)) or ours in KNOWN["sigmoid"]:
            getattr(writer, f"add_{theirs}")(value)
    if isinstance(config, GPTConfig) and config.positions == "rotary":
        writer.add_rope_dimension_count(config.rotary_size)
        if latent := config.kv_latent:
            writer.add_kv_lora_rank(latent)
            writer.add_q_lora_rank(config.q_latent)
            writer.add_key_length_mla(config.head_size)
            writer.add_value_length_mla(config.value_size)
        writer.add_key_length(latent + config.rope_width if latent else config.head_size)
        writer.add_value_length(latent or config.value_size)
        writer.add_rope_freq_base(config.rope_theta)
        if config.rope_scaling in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_scaling))
            writer.add_rope_scaling_factor(config.rope_factor)
        if config.rope_scaling == "yarn":
            writer.add_rope_scaling_orig_ctx_len(config.rope_original_length or config.sequence_length)
            writer.add_rope_scaling_yarn_beta_slow(config.rope_low)
            writer.add_rope_scaling_yarn_beta_fast(config.rope_high)
        if config.rope_scaling == "llama3":  # a tensor of what each frequency is divided by
            none = torch.zeros(1)
            plain = frequencies(replace(config, rope_scaling="none", rope_factor=1.0), none)
            writer.add_tensor("rope_freqs.weight", (plain / frequencies(config, none)).numpy())
        if config.attention_pattern is not None:
            writer.add_sliding_window(config.attention_window)
    norm = "layer_norm_rms" if config.norm == "rmsnorm" else "layer_norm"
    getattr(writer, f"add_{norm}_eps")(config.norm_epsilon)
    if architecture == "gptneox":
        writer.add_parallel_residual(config.residual == "parallel")
    if isinstance(config, BERTConfig):
        writer.add_causal_attention(False)
        writer.add_token_type_count(config.token_types)


def _tensors(
    architecture: str, config: ModelConfig, state: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its GGUF name, float32 and contiguous, in the layout of llama.cpp."""
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.layers)
    joined: dict[str, list[Any]] = {}
    for name, tensor in state.items():
        name = re.sub(r"\.experts\.\d+", ".experts", name).replace("correction_bias", "correction.bias")
        joined.setdefault(name, []).append(tensor)
    for name, tensors in joined.items():
        stem, _, part = name.rpartition(".")
        labelling = LABELS.get(stem) if "classifier.weight" in state else None
        if name.startswith(HEADS) and not labelling:
            continue
        found = torch.stack(tensors) if ".experts." in name else tensors[0]
        values = found.detach().float().cpu().numpy()
        prefix = "transformer." if architecture == "bloom" else "bert."  # left out of the library's names
        mine = names.get_name(name.removeprefix(prefix), (".weight", ".bias"))
        mine = f"{labelling}.{part}" if labelling else mine
        assert mine is not None, name
        if ".attn_kv_b." in mine and isinstance(config, GPTConfig):
            apart = values.reshape(config.heads, -1, config.kv_latent)
            plain = config.head_size - config.rope_width
            yield mine.replace("kv_b", "v_b"), np.ascontiguousarray(apart[:, plain:])
            mine, values = mine.replace("kv_b", "k_b"), apart[:, :plain].swapaxes(1, 2)
        if architecture == "gpt2" and ".h." in name and values.ndim == 2:
            values = values.T  # Hugging Face stores GPT-2's matrices (in, out)
        for part, heads in ((".attn_q.", config.heads), (".attn_k.", config.key_value_heads)):
            if architecture in ("llama", "smollm3") and part in mine:  # halves of each head become neighbours
                split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
                values = split.swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gptneox", "bloom") and "attn_qkv." in mine:  # query, key and value head by head
            apart = values.reshape(config.heads, 3, -1, *values.shape[1:])
            values = apart.swapaxes(0, 1).reshape(values.shape)
        if isinstance(config, GPTConfig) and config.norm_from_one and mine.endswith("norm.weight"):
            values = values + 1
        yield mine, np.ascontiguousarray(values, np.float32)


def _kind(name: str, values: np.ndarray, precision: GGUFPrecision) -> Any:
    """How a tensor is stored: blocks of 32 along a row, or f16 where rows are no multiple of 32."""
    from gguf import GGMLQuantizationType as Kind

    fine = name.startswith(("position_embd", "token_types", "cls.")) or ".ffn_gate_inp." in name
    if precision == "f32" or values.ndim == 1 or fine:
        return Kind.F32
    if precision == "f16" or values.shape[-1] % 32:
        return Kind.F16
    if precision == "q8_0" or name.startswith(("token_embd", "output.")):
        return Kind.Q8_0
    return Kind.Q4_0


def _write_tokenizer(writer: Any, file: Path | None, config: ModelConfig) -> None:
    """The vocabulary as llama.cpp reads it. Without a tokenizer that it knows the model takes ids alone."""
    from gguf import TokenType

    if file is None:
        writer.add_tokenizer_model("none")
        return
    tokenizer = Tokenizer.load(file)
    model, texts, merges = to_gguf(tokenizer, file)
    kinds = [TokenType.NORMAL] * len(texts)
    for token in tokenizer.config.get("added_tokens") or []:
        kinds[token["id"]] = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
    for i in tokenizer.special.values():
        kinds[i] = TokenType.CONTROL
    padding = config.vocab_size - len(texts)
    texts += [f"[PAD{number}]" for number in range(padding)]
    kinds += [TokenType.UNUSED] * padding
    writer.add_tokenizer_model(model)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if model == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        before, behind = tokenizer.framing
        writer.add_add_bos_token(before == [tokenizer.bos_id])
        writer.add_add_eos_token(behind == [tokenizer.eos_id])
    if merges:
        writer.add_token_merges(merges)
    for role, i in tokenizer.special.items():
        if role != "bos" or "cls" not in tokenizer.special:  # [CLS] is what begins a text there
            getattr(writer, f"add_{role.replace('cls', 'bos')}_token_id")(i)
    if (template := chat_template(file.parent)) is not None:
        writer.add_chat_template(template)
    if isinstance(config, GPTConfig):
        _write_ends(writer, tokenizer, file.parent)


def _write_ends(writer: Any, tokenizer: Tokenizer, directory: Path) -> None:
    """The end tokens besides the tokenizer's: llama.cpp has a place for that of a turn and for one more."""
    chat, _ = ChatTemplate.find_usable(directory, tokenizer)
    turn_ends = chat.turn_ends if chat else frozenset()
    others = [i for i in end_ids(directory, tokenizer) if i not in turn_ends]
    ends = [i for i in (*sorted(turn_ends), *others) if i != tokenizer.eos_id]
    for add, token_id in zip((writer.add_eot_token_id, writer.add_eom_token_id), ends):
        add(token_id)
    if len(ends) > 2:
        names = [tokenizer.token_text(i) for i in ends[2:]]
        warn(f"llama.cpp has no place for more than three end tokens; it does not end at {', '.join(names)}")
