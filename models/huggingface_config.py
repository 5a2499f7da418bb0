"""`config.json` of the families at Hugging Face: from our configs and to them, by the tables of `families.toml`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.errors import Failed, Refused
from .config import BERTConfig, GPTConfig, ModelConfig
from .families import Family, families, shared

Fields = dict[str, Any]
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu", "relu2": "relu2"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
THEIR_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh"}
WHOLE = {"mlp_width": "feed_forward_size", "kv_heads": "key_value_heads", "head_width": "head_size"}
WHOLE |= {"expert_width": "expert_size", "embedding_width": "table_width", "value_width": "value_size"}
# a run's own decisions, or told by the tensors
NOT_THEIRS: tuple[str, ...] = ("huggingface", "nsp", "balance_loss", "router_z_loss", "balance_rate")
NOT_THEIRS += ("expert_capacity_factor", "predict_ahead", "predict_ahead_loss")
SCALINGS: dict[str, dict[str, tuple[str, float]]] = shared("scalings")
WINDOWS: dict[str, list[str]] = shared("windows")
UNTURNED = "qk_nope_head_dim"  # which with those that are turned is a head
LAYER_TYPES = {"g": "full_attention", "l": "sliding_attention", "n": "full_attention"}
OUR_TYPES = {"full_attention": "g", "sliding_attention": "l"}
OPTIONAL = ("attention_softcap", "logit_softcap", "q_latent")  # 0 here is none there


def describe(config: ModelConfig) -> tuple[Fields, ModelConfig]:
    """Their config fields for a shape, and the shape that they imply: some families always have biases."""
    kind = family_of_shape(config)
    return _write(config, kind), dataclasses.replace(config, **families()[kind].always)


def family_of_shape(config: ModelConfig) -> str:
    """The `model_type` that a model is written as. Raises `Refused`, with what is in the way, where there is none."""
    encoder = isinstance(config, BERTConfig)
    own = [kind for kind, family in families().items() if family.encoder == encoder]
    kinds = [kind for kind in (config.huggingface, *own) if kind in own]
    for kind in kinds:
        if not _differences(config, kind):
            return kind
    nearest = min(kinds, key=lambda kind: len(_differences(config, kind)))
    differing = _differences(config, nearest)
    why = f"the nearest, {families()[nearest].architecture}, has another {', '.join(differing)}"
    raise Refused("this shape has no Hugging Face layout of ours", where="model", why=why)


def _differences(config: ModelConfig, kind: str) -> list[str]:
    """Our fields that are others once the config is written as a family and read again."""
    wanted = dataclasses.asdict(config) | families()[kind].always
    wanted["layer_pattern"] = _pattern([config.kind_of(layer) for layer in range(config.layers)])
    wanted |= {ours: 0 for ours, size in _usual_sizes(wanted).items() if wanted.get(ours) == size}
    found = dataclasses.asdict(_read(_write(config, kind), families()[kind], ""))
    return [name for name, value in wanted.items() if name not in NOT_THEIRS and found[name] != value]


def _usual_sizes(fields: Fields) -> dict[str, int]:
    """What 0 stands for: a shape has one way to be written."""
    sizes = {"mlp_width": 4 * fields["width"], "kv_heads": fields["heads"], "rope_original_length": 0}
    sizes["expert_width"] = fields.get("mlp_width") or sizes["mlp_width"]
    sizes["head_width"] = fields["width"] // fields["heads"]
    sizes["value_width"] = fields.get("head_width") or sizes["head_width"]
    sizes["rope_width"] = sizes["query_scalar"] = fields.get("head_width") or sizes["head_width"]
    return sizes | {"embedding_width": fields["width"]}


def _write(config: ModelConfig, kind: str) -> Fields:
    family = families()[kind]
    fields: Fields = {"architectures": [family.architecture], "model_type": kind}
    for theirs, ours in family.fields.items():
        value = getattr(config, WHOLE.get(ours, ours))
        if ours == "activation":
            value = ACTIVATIONS[value]
        elif ours == "residual":
            value = value == "parallel"
        elif ours in OPTIONAL:
            value = value or None
        elif theirs == UNTURNED:
            value -= config.rope_width
        elif ours in ("query_scalar", "rope_width"):
            value = value or config.head_size
        fields[theirs] = value
    fields |= {name: values[0] for name, values in family.must.items()}
    fields |= dict.fromkeys(family.dropouts, config.dropout)
    if isinstance(config, BERTConfig) and config.nsp and family.names.pair:
        fields["architectures"] = [family.architecture.replace("ForMaskedLM", "ForPreTraining")]
    if family.pad == "none":  # theirs is an id of the published vocabulary, which a small one lacks
        fields["pad_token_id"] = None
    elif family.pad == "offset":
        fields["pad_token_id"] = config.position_offset - 1
        fields["max_position_embeddings"] += config.position_offset
    if family.biased:
        fields[family.biased] = config.has_bias("qkv")
    letters = [config.kind_of(layer) for layer in range(config.layers)]
    windows: Fields = {
        "sliding_window": config.attention_window or None,
        "use_sliding_window": config.attention_window > 0,
        "max_window_layers": config.layers - config.windowed_layers,
        "layer_types": [LAYER_TYPES[letter] for letter in letters],
        "local_attention": 2 * (config.attention_window - 1),
        "no_rope_layers": [int(letter != "n") for letter in letters],
    }
    fields |= {name: windows[name] for name in WINDOWS[family.windows] if name in windows}
    if config.positions == "rotary" and family.theta[0]:
        fields |= _write_rope(config, family)
    return fields


def _write_rope(config: ModelConfig, family: Family) -> Fields:
    names = SCALINGS.get(config.rope_scaling, {})
    rope = {theirs: getattr(config, ours) for theirs, (ours, _) in names.items() if getattr(config, ours)}
    if "original_max_position_embeddings" in names:
        rope.setdefault("original_max_position_embeddings", config.sequence_length)
    rope |= {} if config.rope_truncate else {"truncate": False}
    rope |= {"rope_type": "default" if config.rope_scaling == "none" else config.rope_scaling}
    fields: Fields = {family.theta[0]: config.rope_theta, "rope_scaling": rope if names else None}
    rope = rope | {"rope_theta": config.rope_theta}
    if family.part[0]:
        fields[family.part[0]] = rope["partial_rotary_factor"] = config.rotary_size / config.head_size
        fields["rope_scaling"] = rope if names else None
    if family.windows in ("bases", "near"):
        base = config.rope_local_theta or config.rope_theta
        fields["rope_local_base_freq" if family.windows == "bases" else "local_rope_theta"] = base
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
    return fields | {"rope_parameters": rope}


def read_config(fields: Fields, state: Mapping[str, Tensor], where: str) -> ModelConfig:
    """The config for their fields; `state` says which heads are there. Raises `Refused` for another kind."""
    kind = fields.get("model_type")
    try:
        if kind in families():
            config = _read(fields, families()[kind], where)
            if isinstance(config, BERTConfig):
                pair = families()[kind].names.pair
                config = dataclasses.replace(config, nsp=bool(pair) and f"{pair}.weight" in state)
            elif join := families()[kind].names.ahead.get("join"):
                ahead = sum(name.endswith(f".{join}.weight") for name in state)
                config = dataclasses.replace(config, predict_ahead=ahead)
        else:
            opening = "; ".join(family.models for family in families().values())
            what = f"models of type {kind!r} cannot be read"
            why = "its attention adds products of contents and distances" if "deberta" in str(kind) else ""
            raise Refused(what, where=where, why=why, fix=f"these can (docs/models.md): {opening}")
    except KeyError as error:
        raise Failed(f"config.json has no field {error}", where=where) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise Failed("config.json holds a value of the wrong kind", where=where, why=str(error)) from error
    if problems := config.validate():
        what = "config.json describes a model that cannot be built"
        raise Failed(what, where=where, why="\n".join(problems))
    if family_of_shape(config) != kind:
        config = dataclasses.replace(config, huggingface=kind)
    return config


def unlike_ours(where: str, why: str) -> Refused:
    """The error of a model that uses something that ours do not have."""
    return Refused("this model uses something that ours do not have", where=where, why=why)


def _read(fields: Fields, family: Family, where: str) -> ModelConfig:
    if quantised := fields.get("quantization_config"):
        kind = str(quantised.get("quant_method"))
        loader = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}.get(kind, "its own config")
        how = f"dtype='bfloat16', quantization_config={loader}(dequantize=True)"
        fix = f"write them in bf16 by transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY, {how})"
        fix += ".save_pretrained(NEW, save_original_format=False)"
        raise Refused("the weights of this model are quantised", where=where, why=f"by {kind}", fix=fix)
    must = family.must | {"add_cross_attention": (False,)}
    known = {*family.fields, *must, *family.ignored, *shared("everywhere"), *family.dropouts, family.biased}
    known |= {*WINDOWS[family.windows], family.theta[0], family.part[0], "rope_parameters", "rope_scaling"}
    for name, value in fields.items():
        if name in must and value is not None and value not in must[name]:
            raise unlike_ours(where, f"{name} = {value!r}")
        if name not in known and value is not None:
            raise unlike_ours(where, f"{name} = {value!r}, a field that may change the numbers")
    found = family.shape | _read_table(fields, where, family)
    if family.biased:
        biased, usual = fields.get(family.biased, found.get("bias", True)), found.get("bias", True)
        if biased is not None and biased != usual:
            found["linear_bias"] = "attention" if biased else "mlp"
    if found.get("positions") == "rotary" and family.theta[0]:
        found |= _read_rope(fields, family, where, found)
    if family.windows:
        found |= _read_windows(fields, family, found)
    if family.pad == "offset":
        given = fields.get("pad_token_id")
        found["position_offset"] = offset = (1 if given is None else given) + 1
        found["sequence_length"] -= offset
    if family.encoder:
        return BERTConfig(**found)
    width = found["head_width"] if found.get("head_width") else found["width"] // found["heads"]
    for name in ("rope_width", "query_scalar"):
        found[name] = 0 if found.get(name) in (None, width) else found[name]
    return GPTConfig(**found)


def _read_table(fields: Fields, where: str, family: Family) -> Fields:
    """Our fields; a size that is the usual one or absent is 0, so that a shape has one way to be written."""
    found, usual = Fields(), family.usual
    for theirs, ours in family.fields.items():
        value = fields.get(theirs, usual.get(theirs)) if theirs in usual or ours in found else fields[theirs]
        if ours == "activation":
            if value not in THEIR_ACTIVATIONS:
                raise unlike_ours(where, f"{theirs} = {value!r}")
            value = THEIR_ACTIVATIONS[value]
        elif ours == "residual":
            value = "parallel" if value else "sequential"
        elif ours in OPTIONAL:
            value = value or 0
        if found.get(ours) is None:
            found[ours] = value
        elif value not in (None, found[ours]):  # a second name of theirs for one of ours
            raise unlike_ours(where, f"{theirs} = {value!r}")
    if UNTURNED in family.fields:
        found["head_width"] += found["rope_width"]
    sizes = {name: size for name, size in _usual_sizes(found).items() if name in WHOLE}
    return found | {name: 0 for name, size in sizes.items() if name in found and found[name] in (None, size)}


def _read_rope(fields: Fields, family: Family, where: str, found: Fields) -> Fields:
    given: Any = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope: Fields = given.get("full_attention") or given
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and kind not in SCALINGS:
        raise unlike_ours(where, f"scaled rope: {rope}")
    names = SCALINGS.get(kind, {})
    plain = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    plain |= {"truncate"} if kind == "yarn" or rope.get("truncate", True) else set()
    plain |= {"original_max_position_embeddings"} if kind in ("default", "dynamic", "linear") else set()
    if other := {name for name in rope if rope[name] is not None} - plain - set(names):
        raise unlike_ours(where, f"scaled rope with {', '.join(sorted(other))}: {rope}")
    ours = {ours: rope.get(theirs) or usual for theirs, (ours, usual) in names.items()}
    if ours.get("rope_original_length") == found["sequence_length"]:
        ours["rope_original_length"] = 0
    usual = 0.1 * math.log(ours["rope_factor"]) + 1.0 if kind == "yarn" else 0.0
    if kind == "yarn" and math.isclose(ours["rope_magnitude"], usual, rel_tol=1e-15):
        ours["rope_magnitude"] = 0.0  # the usual one, told
    ours = {name: float(value) if name != "rope_original_length" else value for name, value in ours.items()}
    if kind == "yarn" and not rope.get("truncate", True):
        ours["rope_truncate"] = False
    theta: Any = fields.get("rope_theta", fields.get(family.theta[0], family.theta[1]))
    ours |= {"rope_scaling": kind if names else "none", "rope_theta": float(rope.get("rope_theta") or theta)}
    if family.part[0]:
        share = rope.get("partial_rotary_factor") or fields.get(family.part[0]) or family.part[1]
        ours["rope_width"] = int((found.get("head_width") or found["width"] // found["heads"]) * share)
    if family.windows in ("bases", "near"):
        local: Any = given.get("sliding_attention") or {}
        name = "rope_local_base_freq" if family.windows == "bases" else "local_rope_theta"
        ours["rope_local_theta"] = float(local.get("rope_theta") or fields.get(name) or 10000.0)
    return ours


def _read_windows(fields: Fields, family: Family, found: Fields) -> Fields:
    """The window and the letters of the layers, as few of them as repeat."""
    layers, window, style = found["layers"], fields.get("sliding_window", 4096), family.windows
    usual = family.usual
    if style == "nope":
        interval, given = fields.get("no_rope_layer_interval", 4), fields.get("no_rope_layers")
        turned = [(layer + 1) % interval for layer in range(layers)] if given is None else given
        letters = ["g" if turn else "n" for turn in turned[:layers]]
    elif style == "all":
        if family.architecture != "MistralForCausalLM":  # whose absent window is one of 4,096
            window = fields.get("sliding_window")
        letters = ["l"] * layers
    else:
        types = fields.get("layer_types")
        if style == "from":
            window = window if fields.get("use_sliding_window", usual.get("use_sliding_window")) else None
            first = fields.get("max_window_layers", usual.get("max_window_layers", 28))
            letters = ["l" if layer >= first else "g" for layer in range(layers)]
        elif style == "near":
            window = fields.get("local_attention", 128) // 2 + 1
            every = fields.get("global_attn_every_n_layers", 3)
            letters = ["l" if layer % every else "g" for layer in range(layers)]
        else:
            turn = fields.get("sliding_window_pattern", 6) if style == "bases" else 2
            letters = ["l" if (layer + 1) % turn else "g" for layer in range(layers)]
        if types is not None:
            letters = [OUR_TYPES[kind] for kind in types]
    if not window or style == "nope":
        letters = ["g" if letter == "l" else letter for letter in letters]
    near = "l" in letters
    others = {} if near else {"rope_local_theta": 0.0}
    return others | {"attention_window": window if near else 0, "layer_pattern": _pattern(letters)}


def _pattern(letters: list[str]) -> str:
    """The fewest letters of which these are repetitions, the last one perhaps cut; "" where all are g or all l."""
    sizes = range(1, len(letters) + 1)
    size = next(n for n in sizes if all(letter == letters[i % n] for i, letter in enumerate(letters)))
    return "" if letters[:size] in (["g"], ["l"]) else "".join(letters[:size])
