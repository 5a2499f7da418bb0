"""GGUF files: llama.cpp computes from them what torch computes, reads the same tokens, and generates, embeds
and batches behind the same protocols. Skipped where llama-cpp-python (a build of minutes) is not installed.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import save_file
from small_models import opinionated_model
from throughline.cli.main import main
from throughline.core.backend import BackendOptions, Span
from throughline.core.errors import Refused, WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.inference.exports.export import Judging
from throughline.inference.exports.gguf_export import architecture_of, export_gguf, uncut
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.serving.slots import SlotBatch, answer
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.huggingface import to_huggingface

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf")

QUIET = Judging(bench=False)
SHAPES = {
    "gpt2": GPTConfig(vocab_size=97, sequence_length=64, layers=2, width=64, heads=4),
    "llama": GPTConfig(
        vocab_size=97,
        sequence_length=64,
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        positions="rotary",
        norm="rmsnorm",
        gated=True,
        activation="silu",
        bias=False,
        tied=False,
        mlp_width=96,
    ),
    "bert": BERTConfig(vocab_size=97, sequence_length=64, layers=2, width=64, heads=4),
}
GEMMA = {"activation": "gelu_tanh", "norm_from_one": True, "norm_place": "around", "scaled_embeddings": True}
GEMMA |= {"tied": True, "head_width": 32, "attention_window": 16}
NEOX = {"norm": "layernorm", "bias": True, "gated": False, "activation": "gelu", "kv_heads": 0}
FAMILIES = {  # on a Llama
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 16, "rope_theta": 200.0},
    "qwen2": {"linear_bias": "qkv"},
    "qwen2-yarn": {
        "linear_bias": "qkv",
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_length": 16,
    }
    | {"rope_high": 32.0},
    "qwen3": {"qk_norm": "head", "head_width": 32, "tied": True},
    "olmo2": {"qk_norm": "whole", "norm_place": "after"},
    "smollm3": {"layers": 4, "layer_pattern": "gggn", "tied": True},
    "phi3": {"huggingface": "phi3"},
    "gptneox": NEOX | {"rope_width": 8, "residual": "parallel"},
    "phi2": NEOX | {"activation": "gelu_tanh", "rope_width": 8, "residual": "shared", "output_bias": True},
    "gptj": NEOX
    | {"activation": "gelu_tanh", "rope_width": 8, "residual": "shared", "output_bias": True}
    | {"linear_bias": "mlp"},
    "starcoder2": NEOX | {"activation": "gelu_tanh", "tied": True, "huggingface": "starcoder2"},
    "bloom": NEOX
    | {"positions": "alibi", "embedding_norm": True, "activation": "gelu_tanh"}
    | {"tied": True, "mlp_width": 0},
    "mixtral": {"experts": 4, "experts_per_token": 2},
    "qwen3moe": {"qk_norm": "head", "experts": 8, "experts_per_token": 3, "expert_width": 32},
    "olmoe": {"qk_norm": "whole", "kv_heads": 0, "experts": 8, "router_normalised": False},
    "gemma2": GEMMA | {"layer_pattern": "lg", "attention_softcap": 5.0, "logit_softcap": 4.0},
    "gemma3": GEMMA
    | {"layers": 7, "layer_pattern": "lllllg", "qk_norm": "head", "rope_local_theta": 10000.0}
    | {"rope_theta": 500.0, "rope_scaling": "linear", "rope_factor": 4.0},
}
OPT = {"positions": "learned", "position_offset": 2, "activation": "relu", "tied": True}
SIGMOID = {"experts": 8, "experts_per_token": 3, "router_scores": "sigmoid", "balance_bias": True}
SIGMOID |= {"expert_width": 32, "shared_experts": 2, "dense_layers": 1, "router_scale": 2.5, "layers": 3}
DOTS = SIGMOID | {"qk_norm": "head", "head_width": 32, "kv_heads": 0}
LATENT = SIGMOID | {"kv_heads": 0, "kv_latent": 32, "head_width": 48, "rope_width": 16, "value_width": 32}
FAMILIES |= {
    "dots1": DOTS,
    "deepseek2": LATENT | {"q_latent": 32},
    "deepseek2-groups": LATENT | {"router_groups": 4, "router_groups_per_token": 2},
}
WINDOW = {"attention_window": 24}
FAMILIES |= {
    "llama-window": WINDOW,
    "phi3-window": WINDOW | {"huggingface": "phi3"},
    "starcoder2-window": FAMILIES["starcoder2"] | WINDOW,
    "qwen2-window": WINDOW
    | {"linear_bias": "qkv", "layer_pattern": "gl", "rope_scaling": "yarn", "rope_factor": 4.0}
    | {"rope_high": 32.0},
}
SHAPES |= {name: dataclasses.replace(SHAPES["llama"], **fields) for name, fields in FAMILIES.items()}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, precision) for name in ("gpt2", "llama", "bert") for precision in ("f32", "q8_0", "q4_0")),
        *((name, "f32") for name in FAMILIES),
    ],
)
def test_llama_cpp_computes_what_torch_computes(name: str, precision: str, tmp_path: Path) -> None:
    model = opinionated_model(SHAPES[name])
    named = {"llama3": "llama", "mixtral": "llama", "gptj": "phi2"}.get(name, name.partition("-")[0])
    assert architecture_of(uncut(model.config)) == named
    fields, state = to_huggingface(model)
    (tmp_path / "model").mkdir()
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "model/model.safetensors")
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    report = export_gguf(
        tmp_path / "model", tmp_path / "gguf", precision, judging=QUIET
    )  # raises above its bound
    described = json.loads((tmp_path / "gguf" / "model.json").read_text())["config"]
    assert described["sequence_length"] == (24 if name.endswith("window") else 64)
    if name == "bert":
        assert report["outputs"].keys() == {"last_hidden_state", "sentence_embedding"}
    else:  # a wrong order of rows or positions costs whole nats
        kl = {"f32": 1e-3, "q8_0": 1e-2, "q4_0": 0.3}[precision]
        assert max(summary["kl"] for summary in report["outputs"].values()) <= kl


@pytest.mark.parametrize("kind", ["sequence-classification", "embedding", "token-classification"])
def test_fine_tuned_heads(kind: str, bert_dir: Path, tmp_path: Path) -> None:
    """Labels of texts are llama.cpp's within the bound; an encoder alone is written; other heads are refused."""
    from throughline.inference.runtimes.source import open_model
    from throughline.models.bert import Head
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build_with_head

    labels = () if kind == "embedding" else ("no", "perhaps", "yes")
    model = build_with_head(open_model(bert_dir).model, Head(kind, labels))
    if labels:
        model.output.weight.data.mul_(20)  # logits of some units
    fields, state = to_huggingface(model)
    (tmp_path / "tuned").mkdir()
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "tuned/model.safetensors")
    (tmp_path / "tuned" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tuned" / "tokenizer.json").write_bytes((bert_dir / "tokenizer.json").read_bytes())
    if kind == "token-classification":
        with pytest.raises(Refused, match="a head for token-classification"):
            export_gguf(tmp_path / "tuned", tmp_path / "gguf", "f32", judging=QUIET)
        return
    report = export_gguf(tmp_path / "tuned", tmp_path / "gguf", "f32", judging=QUIET)
    assert ("logits" in report["outputs"]) == bool(labels)
    ours, theirs = (open_backend(tmp_path / name, BackendOptions("cpu")) for name in ("tuned", "gguf"))
    assert ours.classes == theirs.classes == labels
    ids = np.array([[2, 9, 8, 7, 3]])
    asked = (ids, np.zeros_like(ids), np.ones_like(ids), ids[:, :0])
    if labels:
        found, expected = theirs.encoder.forward(*asked)["logits"], ours.encoder.forward(*asked)["logits"]
        np.testing.assert_allclose(found, expected, atol=5e-3 * float(abs(expected).max()))


def test_what_llama_cpp_computes_otherwise_is_refused() -> None:
    with pytest.raises(Refused, match="computes gpt2 otherwise"):
        architecture_of(dataclasses.replace(SHAPES["gpt2"], activation="gelu"))
    for fields, said in (
        ({"rope_scaling": "dynamic", "rope_factor": 2.0}, "otherwise"),
        ({"attention_window": 8, "attention_kind": "fixed"}, "no Hugging Face layout"),
        ({"layer_pattern": "gn"}, "smollm3 otherwise"),
        (GEMMA | {"layers": 3, "layer_pattern": "llg", "attention_softcap": 5.0}, "gemma2 otherwise"),
        ({"logit_softcap": 3.0, "qk_norm": "head"}, "no Hugging Face layout"),
        ({"experts": 4, "qk_norm": "whole", "router_normalised": False}, "olmoe otherwise"),
        (DOTS | {"router_groups": 2}, "dots1 otherwise"),
        (LATENT | {"rope_scaling": "yarn", "rope_factor": 4.0}, "deepseek2 otherwise"),
        (NEOX | OPT, "no loader of OPT"),
    ):
        with pytest.raises(Refused, match=said):
            architecture_of(dataclasses.replace(SHAPES["llama"], **fields))


def test_an_artifact_tokenises_generates_and_shares_prompts(gpt_dir: Path, tmp_path: Path) -> None:
    """The tokens of llama.cpp's own tokenizer are ours, greedy text is torch's, alone and in a batch."""
    from throughline.inference.serving.generation import Job

    report = export_gguf(gpt_dir, tmp_path / "gguf", "f32", judging=QUIET)
    assert report["outputs"]["logits at once"]["kl"] <= 1e-3
    options = BackendOptions(device="cpu", threads=1)
    torch_one, llama_one = (open_backend(path, options).causal for path in (gpt_dir, tmp_path / "gguf"))
    assert torch_one is not None and llama_one is not None and llama_one.name == "llamacpp"
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 40)
    requests = [Job(prompt, 12), Job(prompt, 12), Job(rng.integers(0, 300, 5), 12)]
    answers = []
    for backend, slots in ((torch_one, 1), (llama_one, 1), (llama_one, 3)):
        ids: list[list[int]] = [[] for _ in requests]
        for number, _, delta in answer(SlotBatch(backend, lambda ids: "", slots, prefix_bytes=0), requests):
            assert delta.token is not None
            ids[number].append(delta.token.id)
        answers.append(ids)
    assert answers[0] == answers[1] == answers[2]
    cache = llama_one.new_cache(2)  # a span written again over what was behind
    once = llama_one.step([Span(0, 0, prompt[:9], 1), Span(1, 0, prompt[:3], 0)], cache).copy()
    again = llama_one.step([Span(0, 5, prompt[5:9], 1)], cache)
    np.testing.assert_allclose(once, again, atol=1e-3 * float(abs(once).max()))

    text = "The quick brown fox; naïve café 東京 🙂 again\n\n  and 12 again."
    expected = Tokenizer.load(gpt_dir).encode(text).tolist()
    model = llama_one.model
    vocab, buffer = llama_cpp.llama_model_get_vocab(model), (llama_cpp.llama_token * 200)()
    raw = text.encode()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), buffer, 200, False, False)
    assert list(buffer)[:count] == expected


def test_a_dtype_or_runtime_of_its_own(gpt_dir: Path, tmp_path: Path) -> None:
    export_gguf(gpt_dir, tmp_path / "gguf", "f16", judging=QUIET)
    with pytest.raises(WrongUse, match="has its own precision"):
        open_backend(tmp_path / "gguf", BackendOptions(dtype="fp16"))
    with pytest.raises(WrongUse, match="does not run a GGUF"):
        open_backend(tmp_path / "gguf", BackendOptions(runtime="torch"))


def test_a_bare_file_is_opened(gpt_dir: Path, tmp_path: Path) -> None:
    """Anybody's .gguf: shape and tokenizer are those of the metadata, and the answers those of the artifact."""
    export_gguf(gpt_dir, tmp_path / "gguf", "q8_0", judging=QUIET)
    (tmp_path / "alone.gguf").write_bytes((tmp_path / "gguf" / "model.gguf").read_bytes())
    options = BackendOptions(device="cpu", threads=1)
    ours, bare = (open_backend(path, options) for path in (tmp_path / "gguf", tmp_path / "alone.gguf"))
    config = bare.config
    spelt_out = {"kv_heads": config.kv_heads, "head_width": config.head_width, "mlp_width": config.mlp_width}
    assert config == dataclasses.replace(ours.config, **spelt_out)  # where ours has 0 for the usual
    for size in ("key_value_heads", "head_size", "feed_forward_size"):
        assert getattr(config, size) == getattr(ours.config, size)
    assert bare.causal.dtype == "q8_0" and bare.input.kind == "foreign"
    one, other = Tokenizer.load(ours.tokenizer), Tokenizer.load(bare.tokenizer)
    text = "The quick brown fox; naïve café 東京 🙂 again\n\n  and 12 again."
    assert one.encode(text).tolist() == other.encode(text).tolist()
    assert (one.eos_id, one.vocab_size) == (other.eos_id, other.vocab_size) and other.decode(
        one.encode(text)
    ) == text
    done = CliRunner().invoke(
        main, ["generate", str(tmp_path / "alone.gguf"), "--prompt", "A", "--max-tokens", "3"]
    )
    assert done.exit_code == 0 and done.stdout.startswith("A"), done.output
    done = CliRunner().invoke(main, ["bench", "latency", str(tmp_path / "alone.gguf"), "--seconds", "0.05"])
    assert done.exit_code == 0 and "llamacpp" in done.stdout, done.output


def test_a_bare_bert_embeds_the_same_words(bert_dir: Path, tmp_path: Path) -> None:
    export_gguf(bert_dir, tmp_path / "gguf", "f32", judging=QUIET)
    (tmp_path / "alone.gguf").write_bytes((tmp_path / "gguf" / "model.gguf").read_bytes())
    loaded = open_backend(tmp_path / "alone.gguf", BackendOptions(device="cpu", threads=1))
    text = "a model reads text, again."  # in lower case, as llama.cpp reads it
    assert loaded.family == "bert"
    ours, theirs = (Tokenizer.load(file) for file in (bert_dir / "tokenizer.json", loaded.tokenizer))
    assert ours.encode(text).tolist() == theirs.encode(text).tolist()
    assert (ours.cls_id, ours.sep_id, ours.mask_id) == (theirs.cls_id, theirs.sep_id, theirs.mask_id)


def test_bare_files_that_cannot_be_read(gpt_dir: Path, tmp_path: Path) -> None:
    export_gguf(gpt_dir, tmp_path / "gguf", "f16", judging=QUIET)
    whole = (tmp_path / "gguf" / "model.gguf").read_bytes()
    for name, data in (("cut", whole[:3000]), ("short", whole[: len(whole) // 2]), ("other", b"not a model")):
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(Refused, match=r"no whole GGUF model|cannot load this file"):
            open_backend(tmp_path / f"{name}.gguf", BackendOptions(device="cpu"))
    with pytest.raises(WrongUse, match="no such model"):
        open_backend(tmp_path / "absent.gguf")
    other = whole.replace(b"gpt-2", b"dbrx2")  # the name of a pre-tokenizer that is not rebuilt here
    (tmp_path / "dbrx.gguf").write_bytes(other)
    with pytest.raises(Refused, match="not rebuilt from GGUF"):
        open_backend(tmp_path / "dbrx.gguf")
    (tmp_path / "tokenizer.json").write_bytes((gpt_dir / "tokenizer.json").read_bytes())
    (tmp_path / "dbrx.gguf").write_bytes(whole)
    assert open_backend(tmp_path / "dbrx.gguf").tokenizer == tmp_path / "tokenizer.json"


def test_a_gguf_file_is_served_by_its_path(
    chat_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`throughline serve` of the artifact and of a file alone: the same answers, of conversations too."""
    described = json.loads((chat_dir / "tokenizer.json").read_text())
    known = described["added_tokens"][-1] | {"id": 302, "content": "</think>", "special": False}
    described["added_tokens"].append(known)
    (chat_dir / "tokenizer.json").write_text(json.dumps(described))
    export_gguf(chat_dir, tmp_path / "ours", "f32", judging=QUIET)
    (tmp_path / "alone.gguf").write_bytes((tmp_path / "ours" / "model.gguf").read_bytes())

    async def body(found) -> None:
        one, other = [
            await found.complete(model=name, prompt="The quick", max_tokens=12) for name in ("ours", "alone")
        ]
        assert one["choices"] == other["choices"]
        messages = [
            {"role": "assistant", "content": "so</think>a"},
            {"role": "user", "content": "The <|im_end|>"},
        ]
        asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
        one, other = [
            (await found.client.post("/v1/chat/completions", json=asked | {"model": name})).json()
            for name in ("ours", "alone")
        ]
        assert one["choices"] == other["choices"] and one["usage"] == other["usage"]
        listed = (await found.client.get("/v1/models")).json()["data"]
        shown = {(model["backend"], model["dtype"], model["context"]) for model in listed}
        assert shown == {("llamacpp", "f32", 160)}

    specs = [f"{name}={tmp_path / place}" for name, place in (("ours", "ours"), ("alone", "alone.gguf"))]
    in_thread.run_with(monkeypatch, specs, body)


def test_a_file_has_the_bos_and_the_ends_of_its_model(chat_dir: Path, tmp_path: Path) -> None:
    """llama.cpp adds the BOS that the tokenizer adds; the end of a turn and a further end have their places."""
    gguf = pytest.importorskip("gguf")
    described = json.loads((chat_dir / "tokenizer.json").read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (chat_dir / "tokenizer.json").write_text(json.dumps(described))
    settings = json.loads((chat_dir / "tokenizer_config.json").read_text())
    (chat_dir / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|endoftext|>"}))
    (chat_dir / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    export_gguf(chat_dir, tmp_path / "out", "f32", judging=QUIET)
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    names = ("eos_token_id", "eot_token_id", "eom_token_id", "add_bos_token", "add_eos_token")
    found = [fields[f"tokenizer.ggml.{name}"].contents() for name in names]
    assert found == [0, 301, 9, True, False]
    theirs = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), vocab_only=True, verbose=False)
    ours = Tokenizer.load(chat_dir)
    for text in ("The quick", "<|im_start|>user\nfox<|im_end|>"):
        assert theirs.tokenize(text.encode(), add_bos=True, special=True) == ours.encode_prompt(text).tolist()


def test_what_llama_cpp_would_tokenise_otherwise_is_refused(gpt_dir: Path) -> None:
    """It normalises nothing, puts no blank before a text and always merges where a file says GPT-2."""
    from throughline.data.gguf import to_gguf

    config = Tokenizer.load(gpt_dir).config
    to_gguf(Tokenizer(json.dumps(config)), gpt_dir)
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": config["pre_tokenizer"] | {"add_prefix_space": True}},
        {"model": config["model"] | {"ignore_merges": True}},
    ):
        with pytest.raises(Refused, match="does not read"):
            to_gguf(Tokenizer(json.dumps(config | change)), gpt_dir)
