"""The models compute what transformers' do: logits and every gradient in float64, and weights through files.

A row of `DECODERS` is a tiny model of a family: texts of 24 tokens are longer than its windows and than the
length that its rope was trained for.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from throughline.core.backend import Span
from throughline.inference.runtimes.source import open_model
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.models.bert import Head
from throughline.models.config import BERTConfig, GPTConfig, preset
from throughline.models.huggingface import (
    load_huggingface,
    to_huggingface,
)
from throughline.models.init import build, build_with_head
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

GPT2 = GPTConfig(vocab_size=96, sequence_length=24, layers=3, width=48, heads=4)
BERT_ = BERTConfig(vocab_size=96, sequence_length=24, layers=3, width=48, heads=4)
TINY = {"vocab_size": 96, "sequence_length": 24, "layers": 3, "width": 48, "heads": 4}
SMALL = {
    "mlp_width": 80,
    "kv_heads": 2,
    "activation": "silu",
    "gated": True,
    "norm": "rmsnorm",
    "bias": False,
}
LIKE_LLAMA = TINY | SMALL | {"positions": "rotary", "tied": False}
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 6, "rope_high": 32.0}
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_length": 12}
WINDOW = {"attention_window": 5}
GEMMA = {"activation": "gelu_tanh", "tied": True, "head_width": 16, "query_scalar": 24, "norm_from_one": True}
GEMMA |= {"norm_place": "around", "scaled_embeddings": True, "logit_softcap": 2.0}
NEOX = TINY | {"positions": "rotary", "activation": "gelu", "tied": False, "rope_width": 4}
EXPERTS = {"bias": False, "experts": 6, "experts_per_token": 2}
LATENT = {"kv_heads": 0, "kv_latent": 16, "head_width": 20, "rope_width": 8, "value_width": 12}
LATENT |= {"expert_width": 24, "dense_layers": 1, "shared_experts": 2, "router_scores": "sigmoid"}
LATENT |= {"router_groups": 2, "balance_bias": True, "router_scale": 2.5}
DECODERS = {  # our fields, and the `model_type` there
    "gpt2": (TINY, "gpt2"),
    "llama": (LIKE_LLAMA, "llama"),
    "llama-mha": (LIKE_LLAMA | {"kv_heads": 0, "head_width": 24, "tied": True}, "llama"),
    "llama-3.1": (LIKE_LLAMA | LLAMA3 | {"rope_theta": 50.0}, "llama"),
    "llama-linear": (LIKE_LLAMA | {"rope_scaling": "linear", "rope_factor": 3.0}, "llama"),
    "llama-dynamic": (
        LIKE_LLAMA | {"sequence_length": 16, "rope_scaling": "dynamic", "rope_factor": 3.0},
        "llama",
    ),
    "llama-biased": (LIKE_LLAMA | {"linear_bias": "attention"}, "llama"),
    "qwen2": (LIKE_LLAMA | {"linear_bias": "qkv"}, "qwen2"),
    "qwen2-window": (LIKE_LLAMA | WINDOW | YARN | {"linear_bias": "qkv", "layer_pattern": "gll"}, "qwen2"),
    "qwen3": (LIKE_LLAMA | YARN | {"qk_norm": "head", "head_width": 16, "rope_magnitude": 1.3}, "qwen3"),
    "qwen3-mha": (LIKE_LLAMA | {"qk_norm": "head", "kv_heads": 0, "tied": True}, "qwen3"),
    "mistral": (LIKE_LLAMA | WINDOW | {"head_width": 16}, "mistral"),
    "olmo2": (LIKE_LLAMA | {"qk_norm": "whole", "norm_place": "after"}, "olmo2"),
    "olmo2-mha": (LIKE_LLAMA | {"qk_norm": "whole", "norm_place": "after", "kv_heads": 0}, "olmo2"),
    "smollm3": (LIKE_LLAMA | {"layer_pattern": "gn", "tied": True, "rope_theta": 2e6}, "smollm3"),
    "phi3": (LIKE_LLAMA | WINDOW | {"huggingface": "phi3"}, "phi3"),
    "phi3-mha": (LIKE_LLAMA | {"kv_heads": 0, "rope_width": 6}, "phi3"),
    "gemma2": (
        LIKE_LLAMA | WINDOW | GEMMA | {"layer_pattern": "lg", "attention_softcap": 1.5},
        "gemma2",
    ),
    "gemma3": (
        LIKE_LLAMA
        | WINDOW
        | GEMMA
        | {"layers": 4, "layer_pattern": "llg", "qk_norm": "head", "rope_theta": 400.0}
        | {"rope_local_theta": 30.0, "rope_scaling": "linear", "rope_factor": 8.0},
        "gemma3_text",
    ),
    "mixtral": (LIKE_LLAMA | WINDOW | EXPERTS, "mixtral"),
    "qwen3-moe": (
        LIKE_LLAMA
        | EXPERTS
        | {"qk_norm": "head", "expert_width": 24, "expert_every": 2, "experts_per_token": 3},
        "qwen3_moe",
    ),
    "olmoe": (LIKE_LLAMA | EXPERTS | {"qk_norm": "whole", "router_normalised": False}, "olmoe"),
    "dots1": (
        LIKE_LLAMA
        | WINDOW
        | EXPERTS
        | {
            "qk_norm": "head",
            "expert_width": 24,
            "dense_layers": 1,
            "shared_experts": 2,
            "layer_pattern": "gll",
        }
        | {"router_scores": "sigmoid", "router_groups": 2, "balance_bias": True, "router_scale": 2.5},
        "dots1",
    ),
    "deepseek-v3": (LIKE_LLAMA | EXPERTS | LATENT | {"q_latent": 20}, "deepseek_v3"),
    "deepseek-v3-yarn": (
        LIKE_LLAMA | EXPERTS | LATENT | YARN | {"rope_magnitude_part": 0.7, "rope_magnitude_all": 0.9},
        "deepseek_v3",
    ),
    "gpt-oss": (
        LIKE_LLAMA
        | WINDOW
        | YARN
        | {"rope_original_length": 20, "rope_high": 2.0, "rope_low": 0.3, "rope_theta": 150.0}
        | {"bias": True, "experts": 6, "experts_per_token": 3, "layer_pattern": "lg", "rope_truncate": False}
        | {"attention_sinks": True, "gate_limit": 0.4, "head_width": 16},
        "gpt_oss",
    ),
    "neox": (NEOX | {"residual": "parallel"}, "gpt_neox"),
    "neox-sequential": (NEOX | {"linear_bias": "mlp"}, "gpt_neox"),
    "gptj": (
        NEOX | {"residual": "shared", "linear_bias": "mlp", "output_bias": True, "rope_width": 8},
        "gptj",
    ),
    "phi": (NEOX | {"activation": "gelu_tanh", "residual": "shared", "output_bias": True}, "phi"),
    "opt": (TINY | {"activation": "relu", "position_offset": 2, "mlp_width": 80}, "opt"),
    "relu-squared": (LIKE_LLAMA | {"activation": "relu2"}, "llama"),
    "bloom": (TINY | {"positions": "alibi", "embedding_norm": True, "heads": 6}, "bloom"),
    "starcoder2": (TINY | WINDOW | {"positions": "rotary", "kv_heads": 2, "mlp_width": 80}, "starcoder2"),
}
LIKE_BERT = TINY | {"nsp": False}
MODERN = (
    LIKE_BERT
    | WINDOW
    | {"positions": "rotary", "token_types": 0, "gated": True, "bias": False, "mlp_width": 40}
)
MODERN |= {"norm_first": True, "embedding_norm": True, "output_bias": True, "layer_pattern": "gll"}
MODERN |= {
    "rope_theta": 400.0,
    "rope_local_theta": 30.0,
    "norm_epsilon": 1e-5,
    "pooler": "features",
    "layers": 4,
}
ENCODERS = {  # our fields, and the `model_type` there
    "bert-mlm": (LIKE_BERT, "bert"),
    "megatron-mlm": (LIKE_BERT | {"norm_first": True}, "megatron-bert"),
    "roberta": (LIKE_BERT | {"token_types": 1, "position_offset": 2}, "roberta"),
    "xlm-roberta": (
        LIKE_BERT | {"token_types": 1, "position_offset": 2, "huggingface": "xlm-roberta"},
        "xlm-roberta",
    ),
    "distilbert": (LIKE_BERT | {"token_types": 0, "pooler": "relu"}, "distilbert"),
    "electra": (LIKE_BERT | {"pooler": "gelu", "embedding_width": 16}, "electra"),
    "electra-base": (LIKE_BERT | {"pooler": "gelu"}, "electra"),
    "modernbert": (MODERN, "modernbert"),
}
FAMILIES = (
    {name: GPTConfig.from_dict(fields) for name, (fields, _) in DECODERS.items()}
    | {
        "bert": BERT_,
    }
    | {name: BERTConfig.from_dict(fields) for name, (fields, _) in ENCODERS.items()}
)


def scattered(config, dtype=torch.float64):
    """A model whose every parameter is random, biases and norms too: with zeros and ones a wrong one could
    hide.
    """
    torch.manual_seed(1)
    model = build(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(model, directory):
    fields, state = to_huggingface(model)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def theirs(model, directory):
    """The transformers model that loads what we wrote, in the same dtype, with nothing missing and nothing
    left over.
    """
    import transformers

    write(model, directory)
    kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    loaded, report = kind.from_pretrained(
        directory, dtype=model.token_table.weight.dtype, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.config._experts_implementation = "eager"  # its grouped products are not in float64
    return loaded.eval()


def gradients_in_our_layout(their_model, model, directory):
    """Their gradients, saved as they save weights and carried into our names and shapes by the importer."""
    with torch.no_grad():
        for parameter in their_model.parameters():
            parameter.copy_(parameter.grad)
    their_model.save_pretrained(directory)
    assert load_huggingface(directory).config == model.config  # as transformers writes it
    return dict(load_huggingface(directory, dtype=torch.float64).named_parameters())


def assert_same_gradients(model, reference):
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # a bias that follows the load of the experts
            continue
        difference = (parameter.grad - reference[name]).abs().max()
        # float64 rounding is 1e-16 per operation: 1e-10 leaves room for long sums and none for a wrong
        # formula
        assert difference <= 1e-10 * max(1.0, reference[name].abs().max()), (name, difference)


class InFull(TorchFunctionMode):
    """transformers rounds norms and softmaxes to float32 on the way, which hides everything below 1e-8; here they
    stay in float64.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            casts = func in (torch.Tensor.to, torch.Tensor.type) and args[1:] == (torch.float32,)
            if func is torch.Tensor.float or casts:
                return args[0]
            if func is F.softmax:
                kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_logits_and_gradients(name, tmp_path):
    config = FAMILIES[name]
    model = scattered(config)
    reference = theirs(model, tmp_path)
    assert reference.config.model_type == DECODERS[name][1]
    if name == "gptj":  # its angles are float64 when the model is, ours are float32
        from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

        for block in reference.transformer.h:
            block.attn.embed_positions = create_sinusoidal_positions(24, config.rope_width)
    if name == "bloom":  # the constant of its tanh is cut to eight digits
        for block in reference.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
    ids = torch.randint(0, config.vocab_size, (3, 24))
    labels = ids.clone()
    labels[0, 5:9] = -100
    with InFull():
        expected = reference(input_ids=ids, use_cache=False).logits
    logits = model(ids)
    assert (logits - expected).abs().max() < 1e-10 * expected.abs().max()
    for scores in (logits, expected):
        F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    assert_same_gradients(model, gradients_in_our_layout(reference, model, tmp_path))

    length = min(24, config.sequence_length)  # dynamic scaling turns the keys of a longer text again
    backend, found = TorchCausal(model), []
    cache = backend.new_cache(3)
    for start, stop in [(0, 9), *((i, i + 1) for i in range(9, 12)), (12, length)]:
        spans = [Span(row, start, ids[row, start:stop].numpy(), stop - start) for row in range(3)]
        found.append(torch.from_numpy(backend.step(spans, cache)).unflatten(0, (3, -1)))
    with torch.no_grad():
        whole = model(ids[:, :length])
    assert (torch.cat(found, 1) - whole).abs().max() < 1e-12 * whole.abs().max()


@pytest.mark.parametrize("norm_first", [False, True], ids=["bert", "megatron"])
def test_bert_loss_and_gradients(norm_first, tmp_path):
    model = scattered(replace(BERT_, norm_first=norm_first))
    reference = theirs(model, tmp_path)
    ids = torch.randint(0, 96, (3, 24))
    types = (torch.arange(24) >= 11).long().expand(3, 24)
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[1, 17:] = False
    targets = torch.where((torch.rand(3, 24) < 0.3) & mask, ids, -100)
    nsp_targets = torch.tensor([0, 1, 1])

    hidden = model.hidden(ids, token_types=types, attention_mask=mask)
    selected = targets != -100
    loss = F.cross_entropy(model.mlm_head(hidden[selected]), targets[selected])
    loss = loss + F.cross_entropy(model.nsp_head(hidden[:, 0]), nsp_targets)
    output = reference(input_ids=ids, token_type_ids=types, attention_mask=mask.long())
    expected = F.cross_entropy(output.prediction_logits.flatten(0, 1), targets.flatten())
    expected = expected + F.cross_entropy(output.seq_relationship_logits, nsp_targets)
    assert abs(loss.item() - expected.item()) < 1e-10
    loss.backward()
    expected.backward()
    assert_same_gradients(model, gradients_in_our_layout(reference, model, tmp_path))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_logits_and_gradients(name, tmp_path):
    """Logits of the masked-LM head at every real token, rows padded; ids leave out those that they pad with."""
    config = FAMILIES[name]
    model = scattered(config)
    reference = theirs(model, tmp_path)
    assert reference.config.model_type == ENCODERS[name][1]
    ids, real = torch.randint(4, 96, (3, 24)), torch.ones(3, 24, dtype=torch.bool)
    real[1, 17:] = False
    ids[1, 17:] = reference.config.pad_token_id or 0
    with InFull():
        expected = reference(input_ids=ids, attention_mask=real.long()).logits[real]
    logits = model(ids, attention_mask=real)[real]
    assert (logits - expected).abs().max() < 1e-10 * expected.abs().max()
    targets = torch.randint(0, 96, (int(real.sum()),))
    for scores in (logits, expected):
        F.cross_entropy(scores, targets).backward()
    assert_same_gradients(model, gradients_in_our_layout(reference, model, tmp_path))
    bounds = torch.tensor([0, 24, 41, 48, 72], dtype=torch.int32)  # the padding is a document of its own
    with torch.no_grad():
        unpadded = model.mlm_head(model.hidden(ids, document_bounds=bounds))[real]
    assert (unpadded - logits).abs().max() < 1e-12 * logits.abs().max()


@pytest.mark.parametrize(
    "kind", ["sequence-classification", "token-classification", "question-answering", "embedding"]
)
@pytest.mark.parametrize("name", ["megatron-mlm", "roberta", "distilbert", "electra", "modernbert"])
def test_encoder_heads(name, kind, tmp_path):
    """A head of each kind there has the same logits here, is read back, and both ways the tensors are the same."""
    import transformers

    labels = {"question-answering": ("start", "end"), "embedding": ()}.get(kind, ("a", "b", "c"))
    model = build_with_head(scattered(FAMILIES[name]), Head(kind, labels)).double().eval()
    fields, state = to_huggingface(model)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = (
        getattr(transformers, fields["architectures"][0])
        .from_pretrained(tmp_path, dtype=torch.float64)
        .eval()
    )
    ids = torch.randint(4, 96, (3, 20))
    with torch.no_grad(), InFull():
        output = reference(input_ids=ids)
    if kind == "question-answering":
        expected = torch.stack((output.start_logits, output.end_logits), -1)
    else:
        expected = output.last_hidden_state if kind == "embedding" else output.logits
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()
    reference.save_pretrained(tmp_path)
    again = load_huggingface(tmp_path, torch.float64)
    assert again.head == model.head and torch.equal(again.eval()(ids), model(ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_exact(name, tmp_path):
    model = scattered(FAMILIES[name], dtype=torch.float32)
    again = load_huggingface(write(model, tmp_path))
    assert again.config == model.config
    for (name, ours), (_, read) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, read), name


def test_a_bias_free_gpt_is_the_same_function_there(tmp_path):
    """GPT-2 always has biases there: ours without are written as zeros. fp32 logits agree within the
    exporter's bound.
    """
    model = scattered(preset("gpt-shakespeare"), dtype=torch.float32)
    reference = theirs(model, tmp_path)
    ids = torch.randint(0, 65, (2, 64))
    with torch.no_grad():
        assert (model(ids) - reference(input_ids=ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "bert-mlm", "llama"])
def test_logits_in_float32(name, tmp_path):
    model = scattered(FAMILIES[name], dtype=torch.float32)
    ids = torch.randint(0, 96, (2, 24))
    with torch.no_grad():
        assert (model(ids) - theirs(model, tmp_path)(input_ids=ids).logits).abs().max() < 1e-4


def test_a_further_tokens_block_of_deepseek_is_read_and_left_out(tmp_path):
    """Layer `num_hidden_layers` of a directory, with the copies of table and head that are published beside it."""
    fields, _ = DECODERS["deepseek-v3"]
    model = scattered(GPTConfig.from_dict(fields | {"predict_ahead": 1}))
    config, state = to_huggingface(model)
    at = "model.layers.3"
    shared = ("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")
    state |= {f"{at}.{copy}.weight": state[f"{one}.weight"].clone() for copy, one in shared}
    names = {name.removeprefix(f"{at}.") for name in state if name.startswith(at)}
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"} < names
    assert "mlp.gate.e_score_correction_bias" in names
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    again = load_huggingface(tmp_path, torch.float64)
    assert again.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name
    used = open_model(tmp_path).model
    assert used.config == model.config.in_use() and "3" not in used.blocks
