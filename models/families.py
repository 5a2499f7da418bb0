"""The model families of `families.toml`, in its order, and what no family needs to say. No torch."""

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..core.errors import Refused
from .config import GPTConfig, ModelConfig

# Fields of any config.json that change no number of the model. Dropout is a run's own decision.
IGNORED = frozenset(
    """architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id initializer_range initializer_factor init_std return_dict is_decoder
    return_dict_in_generate output_hidden_states output_attentions output_scores torchscript use_bfloat16
    tf_legacy_loss pruned_heads task_specific_params problem_type id2label label2id num_labels finetuning_task
    tokenizer_class prefix gradient_checkpointing auto_map max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens remove_invalid_values
    chunk_size_feed_forward cross_attention_hidden_size is_encoder_decoder tie_encoder_decoder summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout attention_dropout attn_pdrop
    embd_pdrop resid_pdrop hidden_dropout attention_probs_dropout_prob hidden_dropout_prob classifier_dropout
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    _attn_implementation attn_implementation _attn_implementation_autoset""".split()
)


class Names(NamedTuple):
    """Their names of a decoder's tensors."""

    token: str
    layer: str
    norms: dict[str, str]
    qkv: list[str]  # three tensors, or one
    matrices: dict[str, str]
    norm: str
    output: str = "lm_head"
    position: str = ""
    how: str = "split"


class Family(NamedTuple):
    """What a `model_type` of theirs is in our fields; families.toml says what each of these is."""

    architecture: str
    models: str
    fields: dict[str, str]
    usual: dict[str, Any]
    names: Names
    shape: dict[str, Any] = {}
    must: dict[str, list[Any]] = {}
    ignored: list[str] = []
    theta: tuple[str, float] = ("rope_theta", 10000.0)
    part: tuple[str, float] = ("", 1.0)
    windows: str = ""
    biased: str = ""


@cache
def families() -> dict[str, Family]:
    """By `model_type`."""
    table = tomllib.loads(files(__package__).joinpath("families.toml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for kind, said in table.items():
        row = _merged(found.get(said.pop("like", ""), {}), said)
        found[kind] = row
    return {kind: _family(row) for kind, row in found.items()}


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A row with the lines of its tables over those of another; "" takes a line away."""
    both = {
        name: _merged(before.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in said.items()
    }
    return {name: value for name, value in (before | both).items() if value != "" or name == "biased"}


def _family(row: dict[str, Any]) -> Family:
    absent = {name: None for name in row.pop("optional", [])}
    row = row | {"usual": absent | row["usual"], "names": Names(**row["names"])}
    return Family(**row)


def refuse_beyond(config: ModelConfig, known: Collection[str], who: str) -> None:
    """Raise Refused where a decoder has fields set, beyond those of a GPT-2 and a Llama, that `who` does not know."""
    if isinstance(config, GPTConfig) and (unknown := config.beyond(known)):
        why = ", ".join(f"{name} = {getattr(config, name)!r}" for name in unknown)
        fix = "docs/models.md has the table of what each family can do; torch generates, evaluates and serves it"
        raise Refused(f"{who} does not know this model", where=f"model.{unknown[0]}", why=why, fix=fix)
