"""`train --init-from`: the weights of every kind of source arrive whole, in any layout; what is dangerous or does
not fit is refused before anything is written.
"""

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from throughline.core.errors import Refused
from throughline.data.tokenizer import Tokenizer
from throughline.models.bert import Head
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.huggingface import to_huggingface
from throughline.models.init import build, build_with_head
from throughline.planner.layout import Layout
from throughline.prove.forked import run_ranks, warm
from throughline.train.checkpoints.weights_in import adopt, open_weights, start_from
from throughline.train.engine import Engine
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.recipes.resolved import model_config, resolve

GPT_SHAPE = GPTConfig(vocab_size=48, sequence_length=16, layers=2, width=32, heads=4, activation="gelu")
BERT_SHAPE = BERTConfig(vocab_size=48, sequence_length=16, layers=2, width=32, heads=4)
# the same in the words of transformers
SIZES: dict[str, int] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 16}


def scattered(config: Any) -> Any:
    torch.manual_seed(2)
    model = build(config, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def same(path: Path, model: torch.nn.Module) -> None:
    found = dict(open_weights(path)[0].named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


def nanogpt_state(model: Any) -> dict[str, torch.Tensor]:
    """As nanoGPT names and shapes them: Hugging Face's names, matrices as nn.Linear has them."""
    _, state = to_huggingface(model)
    turned = {
        name: value.t() if ".attn." in name or ".mlp." in name else value for name, value in state.items()
    }
    turned["lm_head.weight"] = turned["transformer.wte.weight"]
    ours = {name for name, _ in model.named_parameters()}
    return {
        f"_orig_mod.{name}": value
        for name, value in turned.items()
        if not name.endswith("bias") or "norm.bias" in ours
    }


@pytest.mark.parametrize("bias", [True, False])
def test_a_nanogpt_checkpoint(bias: bool, tmp_path: Path) -> None:
    model = scattered(GPTConfig(**{**GPT_SHAPE.to_dict(), "bias": bias, "attention_random_blocks": 0}))
    arguments = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 16,
        "bias": bias,
        "vocab_size": 48,
        "dropout": 0.0,
    }
    file = {
        "model": nanogpt_state(model),
        "model_args": arguments,
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.0),
    }
    torch.save(
        file | {"optimizer": {"state": {}, "param_groups": []}, "config": {"dataset": "x"}},
        tmp_path / "ckpt.pt",
    )
    same(tmp_path / "ckpt.pt", model)
    same(tmp_path, model)


def test_a_megatron_core_checkpoint(tmp_path: Path) -> None:
    """With the norms inside the linear layers, as transformer engine has them, and Megatron's own extra states."""
    model = scattered(GPT_SHAPE)
    names = {
        "token_table.": "embedding.word_embeddings.",
        "position_table.": "embedding.position_embeddings.",
        "blocks.": "decoder.layers.",
        ".attention_norm.": ".self_attention.linear_qkv.layer_norm_",
        ".attention.qkv.": ".self_attention.linear_qkv.",
        ".attention.out.": ".self_attention.linear_proj.",
        ".mlp_norm.": ".mlp.linear_fc1.layer_norm_",
        ".mlp.up.": ".mlp.linear_fc1.",
        ".mlp.down.": ".mlp.linear_fc2.",
    }
    state: dict[str, Any] = {}
    for name, value in model.named_parameters():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        name = f"decoder.final_layernorm.{name[5:]}" if name.startswith("norm.") else name
        state[name] = value.detach()
    state["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    arguments = argparse.Namespace(num_attention_heads=4, norm_epsilon=1e-5, hidden_dropout=0.1)
    folder = tmp_path / "iter_0000012" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": state, "args": arguments, "iteration": 12}, folder / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    same(tmp_path, model)


def old_layout(model: Any, version: int, inner: str = "encoder") -> dict[str, Any]:
    """A model of ours as Megatron-LM saved it before Megatron core: nested tables, query, key and value in the
    order of that version of its checkpoints.
    """
    names = {
        "token_table.": "language_model.embedding.word_embeddings.",
        "position_table.": "language_model.embedding.position_embeddings.",
        "type_table.": "language_model.embedding.tokentype_embeddings.",
        "blocks.": f"language_model.{inner}.layers.",
        ".attention_norm.": ".input_layernorm.",
        ".attention.qkv.": ".self_attention.query_key_value.",
        ".attention.out.": ".self_attention.dense.",
        ".mlp_norm.": ".post_attention_layernorm.",
        ".mlp.up.": ".mlp.dense_h_to_4h.",
        ".mlp.down.": ".mlp.dense_4h_to_h.",
        "mlm_transform.": "lm_head.dense.",
        "mlm_norm.": "lm_head.layernorm.",
        "mlm_bias": "lm_head.bias",
        "pooler.": "language_model.pooler.dense.",
        "nsp.": "binary_head.",
    }
    tree: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if ".qkv." in name and version < 2:  # ours are heads, three, size
            parts = value.unflatten(0, (4, 3, -1))
            value = (parts.transpose(0, 1) if version == 0 else parts.transpose(1, 2)).reshape(value.shape)
        name = f"language_model.{inner}.final_layernorm.{name[5:]}" if name.startswith("norm.") else name
        for ours, theirs in names.items():
            name = name.replace(ours, theirs, 1) if name.startswith(ours) or ours[0] == "." else name
        *folders, last = name.split(".")
        place = tree
        if "layers" in folders:  # these stood flat in one table
            folders, last = folders[:2], ".".join([*folders[2:], last])
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def save_megatron(state: dict[str, Any], folder: Path, **more: Any) -> Path:
    arguments = argparse.Namespace(num_attention_heads=4, layernorm_epsilon=1e-5, hidden_dropout=0.0)
    (folder / "release" / "mp_rank_00").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    torch.save(
        {"model": state, "args": arguments} | more, folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    )
    return folder


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a_megatron_checkpoint_of_the_old_layout(version: int, tmp_path: Path) -> None:
    """Version 0 has no number in the file."""
    model = scattered(GPT_SHAPE)
    state = old_layout(model, version, "transformer" if version == 0 else "encoder")
    more = {"checkpoint_version": float(version)} if version else {}
    same(save_megatron(state, tmp_path, **more), model)


@pytest.mark.parametrize("nsp", [True, False])
def test_a_megatron_bert(nsp: bool, tmp_path: Path) -> None:
    """Its logits are those of transformers' MegatronBert with the same numbers; 1e-4 is the bound of exports,
    rounding alone is 1e-6.
    """
    shape = dataclasses.replace(
        BERT_SHAPE, norm_first=True, norm_epsilon=1e-5, nsp=nsp, dropout=0.0, mlp_width=128
    )
    model = scattered(shape)
    path = save_megatron(old_layout(model, 3), tmp_path, checkpoint_version=3.0)
    same(path, model)
    assert open_weights(path)[0].config == shape
    theirs = transformers.MegatronBertForPreTraining(
        transformers.MegatronBertConfig(**SIZES, layer_norm_eps=1e-5)
    ).eval()
    state = megatron_bert_state(model)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("decoder" in name or (not nsp and ("pooler" in name or "seq" in name)) for name in missing)
    theirs.tie_weights()
    ids, types = torch.randint(0, 48, (2, 16)), (torch.arange(16) > 8).long().expand(2, 16)
    with torch.no_grad():
        mine = open_weights(path)[0](ids, token_types=types)
        expected = theirs(input_ids=ids, token_type_ids=types).prediction_logits
    assert (mine - expected).abs().max() < 1e-4
    assert mine.abs().max() > 0.1, "logits near zero would agree by themselves"


def megatron_bert_state(model: Any) -> dict[str, torch.Tensor]:
    """Under the names of transformers' MegatronBertForPreTraining."""
    names = {
        "token_table.": "bert.embeddings.word_embeddings.",
        "position_table.": "bert.embeddings.position_embeddings.",
        "type_table.": "bert.embeddings.token_type_embeddings.",
        "norm.": "bert.encoder.ln.",
        "blocks.": "bert.encoder.layer.",
        ".attention_norm.": ".attention.ln.",
        ".attention.out.": ".attention.output.dense.",
        ".mlp_norm.": ".ln.",
        ".mlp.up.": ".intermediate.dense.",
        ".mlp.down.": ".output.dense.",
        "mlm_transform.": "cls.predictions.transform.dense.",
        "mlm_norm.": "cls.predictions.transform.LayerNorm.",
        "mlm_bias": "cls.predictions.bias",
        "pooler.": "bert.pooler.dense.",
        "nsp.": "cls.seq_relationship.",
    }
    state = {}
    for name, parameter in model.named_parameters():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs, 1) if name.startswith(ours) or ours[0] == "." else name
        if ".attention.qkv." not in name:
            state[name] = parameter.detach()
            continue
        for part, role in zip(
            parameter.detach().unflatten(0, (4, 3, -1)).unbind(1), ("query", "key", "value")
        ):
            state[name.replace("attention.qkv", f"attention.self.{role}")] = part.flatten(0, 1)
    return state


THEIRS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES | {"intermediate_size": 64}, num_key_value_heads=2)
    ),
    "bert": lambda: transformers.BertForPreTraining(transformers.BertConfig(**SIZES)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_directory_that_transformers_wrote(name: str, tmp_path: Path) -> None:
    """A run begins with its function: logits within the bound of exports, and no parameter keeps a first value."""
    torch.manual_seed(1)
    theirs = THEIRS[name]().eval()
    with torch.no_grad():  # biases and norms too: with zeros and ones a wrong one could hide
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    model, _ = open_weights(tmp_path)
    values = adopt(model, model.config, str(tmp_path))
    begun = build(model.config, seed=9).eval()
    assert set(values) == {name for name, _ in begun.named_parameters()}
    begun.load_state_dict(values, strict=False)
    ids = torch.randint(0, 48, (2, 16))
    with torch.no_grad():
        out = theirs(input_ids=ids)
        expected = out.prediction_logits if name == "bert" else out.logits
        assert (begun(ids) - expected).abs().max() < 1e-4


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "model_args": Bomb()}, tmp_path / "ckpt.pt")
    with pytest.raises(Refused, match="more than tensors"):
        open_weights(tmp_path / "ckpt.pt")
    assert not (tmp_path / "exploded").exists()


def test_a_fine_tuned_bert_gives_its_encoder(tmp_path: Path) -> None:
    """The pretraining heads that it lacks keep their first values."""
    base = scattered(BERT_SHAPE)
    fields, state = to_huggingface(build_with_head(base, Head("token-classification", ("a", "b"))))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(state, tmp_path / "model.safetensors")
    values = adopt(open_weights(tmp_path)[0], BERT_SHAPE, "here")
    assert torch.equal(values["blocks.1.mlp.up.weight"], base.blocks["1"].mlp.up.weight)
    assert not any(name.startswith(("mlm_", "nsp.", "pooler.")) for name in values)


@pytest.mark.parametrize(
    "wanted",
    [
        GPT_SHAPE,
        BERTConfig(vocab_size=49, sequence_length=16, layers=2, width=32, heads=4),
        BERTConfig(vocab_size=48, sequence_length=16, layers=3, width=32, heads=4),
    ],
    ids=["family", "vocabulary", "layers"],
)
def test_weights_of_another_shape_are_refused(wanted: Any) -> None:
    with pytest.raises(Refused):
        adopt(scattered(BERT_SHAPE), wanted, "here")


def test_every_part_of_a_layout_gets_its_values(tmp_path: Path) -> None:
    model = scattered(BERT_SHAPE)
    fields, state = to_huggingface(model)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(state, tmp_path / "model.safetensors")
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layout = Layout(tensor=2, data=2, sharding="zero1")

    def check() -> int:
        device = torch.device("cpu")
        start_group(device, 60)
        engine = Engine(BERT_SHAPE, make_mesh(layout, device, 60), "fp32")
        start_from(adopt(open_weights(tmp_path)[0], BERT_SHAPE, "here"), engine)
        for local in engine.local_shards:
            assert torch.equal(local.value, whole[local.name][local.spec.box.slices()]), local.name
        return len(engine.local_shards)

    warm()
    assert min(run_ranks(layout.world, check)) > 30


@pytest.fixture(scope="module")
def llama_dir(gpt_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with the tokenizer of the store beside it, as `save_pretrained` writes both."""
    folder = tmp_path_factory.mktemp("llama")
    shutil.copy(gpt_store / "tokenizer.json", folder)
    own = {"vocab_size": Tokenizer.load(gpt_store).vocab_size, "intermediate_size": 64}
    torch.manual_seed(3)
    sizes = SIZES | own | {"max_position_embeddings": 64, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-6)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_recipe_takes_the_shape_of_its_weights(llama_dir: Path, make_plan: Any) -> None:
    """Nothing of it is named by hand; the resolved recipe says all of it, and gives the same model again."""
    plan = make_plan(model={"init_from": str(llama_dir), "overrides": {"dropout": 0.1}})
    config: Any = plan.config
    assert (config.heads, config.key_value_heads) == (4, 2)
    assert (config.positions, config.norm_epsilon) == ("rotary", 1e-6)
    assert config.dropout == 0.1 and config.sequence_length == 64
    assert resolve(plan.recipe) == plan.recipe and model_config(plan.recipe) == config
    assert plan.corpus.beside == llama_dir  # whose chat template its checkpoints get


@pytest.mark.parametrize(
    ("field", "value"),
    [("heads", 8), ("kv_heads", 4), ("rope_theta", 500000.0), ("norm_epsilon", 1e-2), ("activation", "gelu")],
)
def test_a_field_that_no_tensor_shows_is_compared(
    llama_dir: Path, make_plan: Any, field: str, value: Any
) -> None:
    """Each of them trains another model on the same tensors; heads 8 and kv_heads 4 have the same shapes as 4 and 2."""
    overrides = {field: value} | ({"kv_heads": 4} if field == "heads" else {})
    with pytest.raises(Refused, match="of another model") as refused:
        make_plan(model={"init_from": str(llama_dir), "overrides": overrides})
    assert f"{field} is " in refused.value.why


def test_tokens_of_another_tokenizer_are_refused(
    llama_dir: Path, tmp_path: Path, make_plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same size, its letters exchanged; a file with the same tokens in another order is the same tokenizer, and
    weights without one are trained with a warning.
    """
    tokenizer = json.loads((llama_dir / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for name, entries in (
        ("same", dict(reversed(vocab.items()))),
        ("other", dict(zip(vocab, reversed(vocab.values())))),
    ):
        folder = shutil.copytree(llama_dir, tmp_path / name)
        changed = tokenizer | {"model": tokenizer["model"] | {"vocab": entries}}
        (folder / "tokenizer.json").write_text(json.dumps(changed))
    make_plan(model={"init_from": str(tmp_path / "same"), "overrides": {}})
    (tmp_path / "same" / "tokenizer.json").unlink()
    assert "is not known" not in capsys.readouterr().err
    make_plan(model={"init_from": str(tmp_path / "same"), "overrides": {}})
    assert "whether it was trained on such tokens is not known" in capsys.readouterr().err
    with pytest.raises(Refused, match="trained with another tokenizer") as refused:
        make_plan(model={"init_from": str(tmp_path / "other"), "overrides": {}})
    assert "--tokenizer" in refused.value.fix
