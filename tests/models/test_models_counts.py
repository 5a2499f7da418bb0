"""Every preset has the parameters and costs the FLOPs that its config says, and those that were published."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.models.config import BERTConfig, GPTConfig, family_of, preset, preset_names
from throughline.models.families import families, pairs
from throughline.models.huggingface import IGNORED
from throughline.models.huggingface_config import read_config
from throughline.models.init import empty_model
from torch.utils.flop_counter import FlopCounterMode

PUBLISHED = json.loads(Path(__file__).with_name("published_names.json").read_text())


@pytest.mark.parametrize("name", [*preset_names(), "gpt-toy ahead", "llama-toy ahead"])
def test_count_equals_the_built_model(name):
    name, _, ahead = name.partition(" ")
    config = preset(name, predict_ahead=2) if ahead else preset(name)
    assert (
        sum(parameter.numel() for parameter in empty_model(config).parameters()) == config.parameter_count()
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),  # the released GPT-2 checkpoints
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("bert-base", 110_106_428),  # BertForPreTraining
        ("llama-7b", 6_738_415_616),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("mistral-7b", 7_241_732_096),
        ("olmo2-1b", 1_484_916_736),
        ("smollm3-3b", 3_075_098_624),
        ("phi3-mini-4k", 3_821_079_552),
        ("gemma2-2b", 2_614_341_888),
        ("gemma3-1b", 999_885_952),
        ("pythia-160m", 162_322_944),
        ("gptj-6b", 6_050_882_784),
        ("opt-125m", 125_239_296),
        ("starcoder2-3b", 3_030_371_328),
        ("olmoe-1b-7b", 6_919_161_856),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),  # its shards, read as transformers lays them out
        ("bloom-176b", 176_247_271_424),  # half of the bytes of its index
        ("modernbert-base", 149_655_232),
        ("nanochat-d20", 560_988_160 + 20 * (2 * 1280 + 2 * 128) + 2 * 1280),  # theirs has no scales of norms
        ("gpt-shakespeare", 804_096),  # nanoGPT prints 0.80M, positions left out
    ],
)
def test_released_models(name, count):
    assert preset(name).parameter_count() == count


@pytest.mark.parametrize(
    ("name", "billions"),
    # as the papers and model cards say
    [("olmoe-1b-7b", 1.3), ("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3)],
)
def test_active_parameters_of_experts(name, billions):
    assert preset(name).active_parameter_count() / 1e9 == pytest.approx(billions, abs=0.06)


def test_gpt_oss_has_the_published_parameters():
    """OpenAI 2025 (gpt-oss-120b & gpt-oss-20b model card), table 1: 20.9B, and 3.6B active without the token table."""
    config = preset("gpt-oss-20b")
    assert config.parameter_count() / 1e9 == pytest.approx(20.9, abs=0.05)
    active = config.active_parameter_count() - config.vocab_size * config.width
    assert active / 1e9 == pytest.approx(3.61, abs=0.005)


def test_latent_attention_has_the_published_parameters():
    """DeepSeek-AI 2024 (V3), section 4.2 and abstract: 671B parameters, of which a token goes through 37B."""
    size = {
        "vocab_size": 129280,
        "layers": 61,
        "width": 7168,
        "heads": 128,
        "mlp_width": 18432,
        "gated": True,
    }
    size |= {"norm": "rmsnorm", "bias": False, "positions": "rotary", "tied": False, "balance_bias": True}
    latent = {"kv_latent": 512, "q_latent": 1536, "head_width": 192, "rope_width": 64, "value_width": 128}
    experts = {
        "experts": 256,
        "experts_per_token": 8,
        "expert_width": 2048,
        "shared_experts": 1,
        "dense_layers": 3,
    }
    config = GPTConfig.from_dict(size | latent | experts)
    assert config.parameter_count() / 1e9 == pytest.approx(671, abs=0.5)
    assert config.active_parameter_count() / 1e9 == pytest.approx(37, abs=0.6)
    # deepseek-ai/DeepSeek-V3, README_WEIGHTS.md: 11.5B of the block that predicts a further token
    more = replace(config, predict_ahead=1)
    assert (more.parameter_count() - config.parameter_count()) / 1e9 == pytest.approx(11.5, abs=0.12)
    assert GPTConfig(q_latent=8).validate() == [
        "q_latent and value_width are of latent attention, and kv_latent is 0"
    ]
    assert len(GPTConfig(**size | latent | {"kv_heads": 4, "balance_bias": False}).validate()) == 1


def test_published_config_files_are_these_presets():
    """Every field of the config.json of a released model is known: read, or ignored by a table. `source` says where
    the fields were read; a model whose file was not found says `unsourced` there.
    """
    files = json.loads(Path(__file__).with_name("published_configs.json").read_text())
    for name, file in files.items():
        assert file["source"] and read_config(file["config"], {}, name) == preset(name), name


@pytest.mark.parametrize("kind", PUBLISHED)
def test_weight_names_are_those_of_published_files(kind):
    """The names in a released checkpoint's index or in a published list are those that we read, and an index says two
    bytes for each parameter. `source` says where they were read; sizes are a config.json's, or a preset's.
    """
    file = PUBLISHED[kind]
    said = file.get("config", {"torch_dtype": "bfloat16"})
    config = preset(file["preset"]) if "preset" in file else read_config(said, file["names"], kind)
    ours = {theirs for pair in pairs(config, kind) for theirs in pair.theirs}
    whole = families()[kind].names.whole
    layers, experts, dense = range(config.layers), 1, 0
    if isinstance(config, GPTConfig) and config.experts:
        experts, dense = config.experts, config.dense_layers
    meant = {"N": layers, "D": layers[:dense], "M": layers[dense:], "P": layers[1:], "E": range(experts)}
    theirs = {whole(name) for name in file["names"]}
    for letter, numbers in meant.items():
        at = f".{letter}."
        theirs = {n.replace(at, f".{i}.") for n in theirs for i in (numbers if at in n else [0])}
    assert ours <= theirs and all(IGNORED.search(name) for name in theirs - ours)
    if said.get("torch_dtype") in ("bfloat16", "float16") and file["bytes"] and ours == theirs:
        assert file["bytes"] == 2 * config.parameter_count()


def test_every_family_has_published_names():
    """But for Megatron-BERT and XLM-RoBERTa, whose tensors are called as those of BERT and RoBERTa are."""
    assert families().keys() - PUBLISHED.keys() == {"megatron-bert", "xlm-roberta"}


def test_a_family_is_few_lines():
    """docs/models.md: `phi` was added in 17 lines of a row. Of the 60 for a new family half are left for its proof, its
    names and its line of that page.
    """
    text = files("throughline.models").joinpath("families.toml").read_text()
    rows = {kind: text.split(f"\n[{kind}]\n")[1].split("\n\n")[0].count("\n") + 2 for kind in families()}
    assert rows["phi"] == 17 and max(rows.values()) <= 30


def published(shared, name):
    return json.loads((shared / "published" / f"{name}.json").read_text())["rows"]


def shapes_of(config):
    return config.layers, config.width, config.heads


def test_published_sc21_rows(shared):
    """Table 1 of Narayanan et al. 2021 prints one decimal; their formula gives our count without the final
    norm.
    """
    for row in published(shared, "megatron_sc21_table1"):
        label = {1008.0: "gpt-1t-megatron"}.get(row["params_b"], f"sc21-{row['params_b']}b")
        config = preset(label)
        assert shapes_of(config) == (row["layers"], row["hidden"], row["heads"])
        assert config.parameter_count() / 1e9 == pytest.approx(
            row["params_b"], abs=0.051 if row["params_b"] < 1000 else 0.5
        )
        layers, width = config.layers, config.width
        tables = (config.vocab_size + config.sequence_length) / (12 * layers * width)
        formula = 12 * layers * width**2 * (1 + 13 / (12 * width) + tables)
        assert config.parameter_count() - 2 * width == pytest.approx(formula, rel=1e-12)


def test_published_2019_and_2020_rows(shared):
    for row in published(shared, "megatron2019_table1_weak_scaling"):
        config = preset(f"megatron2019-{row['params_b']}b")
        assert shapes_of(config) == (row["layers"], row["hidden"], row["heads"])
        assert config.parameter_count() / 1e9 == pytest.approx(row["params_b"], abs=0.05)
    for row in published(shared, "megatron_readme_2020_scaling"):
        config = preset(f"megatron2020-{row['params_b_label'].lower()}")
        assert shapes_of(config) == (row["layers"], row["hidden"], row["heads"])
    for label, row in zip(("336m", "1.3b", "3.9b"), published(shared, "megatron2019_bert"), strict=False):
        config = preset(f"megatron-bert-{label}")
        assert shapes_of(config) == (row["layers"], row["hidden"], row["heads"])
        billions = float(label[:-1]) / (1000 if label.endswith("m") else 1)
        assert config.parameter_count() / 1e9 == pytest.approx(billions, rel=0.02)


def test_published_megatron_core_rows(shared):
    for row in published(shared, "megatron_core_h100_weak_scaling"):
        label = row["params_b_label"].split("B")[0]
        config = preset(f"mcore-{label}b")
        assert shapes_of(config) == (row["layers"], row["hidden"], row["heads"])
        # printed without decimals
        assert config.parameter_count() / 1e9 == pytest.approx(float(label), abs=0.55)


def test_published_giants(shared):
    google = published(shared, "mlperf_v11_google_open")[0]
    config = preset("google-481b")
    assert (config.layers, config.width, config.feed_forward_size) == (
        64,
        google["model_dim"],
        google["ffn_dim"],
    )
    assert config.parameter_count() == google["params"] == 481_815_347_200
    deepspeed = published(shared, "deepspeed_3d_2020")[1]
    config = preset("gpt-1t-deepspeed")
    assert (config.layers, config.width) == (deepspeed["layers"], deepspeed["hidden"])
    assert config.parameter_count() > 1.0e12
    assert preset("mt-nlg-530b").parameter_count() / 1e9 == pytest.approx(529.6, abs=0.05)


@pytest.mark.parametrize("name", ["gpt-toy", "llama-toy", "bert-toy", "gpt-shakespeare", "llama-toy ahead"])
def test_flops_equal_what_torch_counts(name):
    """torch's counter sees every matrix product of forward and backward; the plain attention kernel is used,
    because for the fused one it counts the products that the backward computes again.
    """
    name, _, ahead = name.partition(" ")
    config = preset(name, predict_ahead=2) if ahead else preset(name)
    length, batch = config.sequence_length, 2
    model = empty_model(config, "cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        hidden = model.hidden(ids)
        loss = model.head(hidden).sum() if family_of(config) == "gpt" else model.mlm_head(hidden).sum()
        if family_of(config) == "bert":
            loss = loss + model.nsp_head(hidden[:, 0]).sum()
        for depth in range(1, config.blocks_ahead + 1):
            hidden = model.encode(hidden, torch.arange(length), depth=depth, further_ids=ids)
            loss = loss + model.head(hidden).sum()
        loss.backward()
    assert counter.get_total_flops() / (batch * length) == pytest.approx(
        config.flops_per_token(length), rel=1e-12
    )


def test_flops_equal_the_published_formula():
    """96 B S L W^2 (1 + S/(6W) + V/(16 L W)) of Narayanan et al. 2021, with the second forward of the blocks
    taken off.
    """
    for name in preset_names("gpt"):
        config = preset(name)
        usual = not config.gated and not config.kv_heads
        if not usual:
            continue
        layers, width, vocabulary, length = (
            config.layers,
            config.width,
            config.vocab_size,
            config.sequence_length,
        )
        full = 96 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))
        again = 24 * layers * width**2 * (1 + length / (6 * width))
        assert config.flops_per_token(length) == pytest.approx(full - again, rel=1e-12)


def test_masked_share_of_the_head():
    config = BERTConfig()
    everywhere, masked = config.flops_per_token(128), config.flops_per_token(128, predicted=0.15)
    assert everywhere - masked == pytest.approx(0.85 * 6 * 768 * (30522 + 768), rel=1e-6)


def test_overrides_and_dictionaries():
    config = preset("gpt2-124m", layers=2, vocab_size=100)
    assert isinstance(config, GPTConfig)
    assert (config.layers, config.vocab_size, config.width) == (2, 100, 768)
    assert GPTConfig.from_dict(config.to_dict()) == config
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_mistakes_are_named():
    with pytest.raises(WrongUse, match="did you mean gpt2-124m"):
        preset("gpt2-123m")
    with pytest.raises(WrongUse, match="did you mean heads"):
        preset("gpt2-124m", head=2)
    with pytest.raises(WrongUse, match="width 768 is not a multiple of heads 7"):
        preset("gpt2-124m", heads=7)
    assert len(GPTConfig(layers=0, width=0, heads=-1).validate()) == 3
    assert GPTConfig(width=12, heads=4, positions="rotary").validate() == [
        "rotary positions turn pairs of numbers; the head width 3 is odd"
    ]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("layers", "4", "layers is '4'; it must be a whole number"),
        ("layers", 2.5, "a whole number"),
        ("heads", True, "heads is True; it must be a whole number"),
        ("dropout", "x", "dropout is 'x'; it must be a number"),
        ("dropout", float("nan"), "dropout is nan; it must be a number"),
        ("norm_epsilon", float("inf"), "a number"),
        ("bias", "no", "bias is 'no'; it must be true or false"),
        ("gated", 1, "true or false"),
        ("norm", ["layernorm"], "one of layernorm, rmsnorm"),
        ("attention_kind", "slide", "one of sliding, fixed"),
        ("positions", "rope", "one of learned, rotary"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field, value, words):
    """Overrides come from recipes and config.json, which check no kinds: "no" must not count as true, nor 2.5
    layers be built.
    """
    with pytest.raises(WrongUse) as caught:
        GPTConfig.from_dict({field: value})
    assert words in caught.value.why and len(caught.value.why.splitlines()) == 1


def test_relative_distances_reach_beyond_the_exact_buckets():
    (problem,) = BERTConfig(relative_buckets=32, relative_distance=8).validate()
    assert problem == "relative_distance is 8; it must be above relative_buckets / 4"
    assert not BERTConfig(relative_buckets=32, relative_distance=9).validate()
