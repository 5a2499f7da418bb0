"""What stands beside a tokenizer: end tokens, defaults of sampling, and what of them an export or a GGUF file has."""

import json
from pathlib import Path
from typing import Any

import pytest
from throughline.core.errors import Refused
from throughline.data.gguf import tokenizer_file
from throughline.data.model_settings import copy_chat, end_ids, sampling_defaults
from throughline.data.tokenizer import Tokenizer
from tokenizer_fixtures import byte_level, sentencepiece

GENERATION = "generation_config.json"


def directory(path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in ((GENERATION, generation), ("config.json", config)):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, (2,)),
        ({"eos_token_id": [2, 262]}, {"eos_token_id": 2}, (2, 262)),
        ({"eos_token_id": 262}, {"eos_token_id": [2, 0]}, (0, 2, 262)),
        ({"temperature": 1.0}, {"text_config": {"eos_token_id": [1, 106]}}, (1, 2, 106)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (2,)),
        ({"eos_token_id": [0, True, "x", -1]}, {}, (0, 2)),
    ],
)
def test_ends_are_those_of_all_files(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    place = directory(tmp_path / "model", generation, config)
    assert end_ids(place, Tokenizer(sentencepiece().to_str())) == ends


@pytest.mark.parametrize(
    ("stated", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0.1, "repetition_penalty": 1.1, "top_k": None}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True, "max_new_tokens": 9}, {}),
    ],
)
def test_defaults_of_sampling_are_what_the_file_states(
    tmp_path: Path, stated: dict[str, Any], defaults: dict[str, float]
) -> None:
    assert sampling_defaults(directory(tmp_path / "model", stated, None)) == defaults


def test_settings_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    place = directory(tmp_path / "model", {"temperature": "warm"}, None)
    with pytest.raises(Refused, match="temperature is 'warm'"):
        sampling_defaults(place)
    (place / GENERATION).write_text("[1]")
    with pytest.raises(Refused, match="no JSON object"):
        sampling_defaults(place)
    (place / GENERATION).write_text("{")
    with pytest.raises(Refused, match=GENERATION):
        end_ids(place, Tokenizer(sentencepiece().to_str()))


def test_ends_of_a_config_go_with_the_model(tmp_path: Path) -> None:
    """An export has another config.json, so its generation_config.json names them."""
    tokenizer = Tokenizer(sentencepiece().to_str())
    target = directory(tmp_path / "target", None, None)
    for number, generation in enumerate((None, {"temperature": 0.6}, {"eos_token_id": [262]})):
        source = directory(tmp_path / str(number), generation, {"eos_token_id": [2, 0]})
        copy_chat(source, target)
        copied = json.loads((target / GENERATION).read_text())
        assert end_ids(target, tokenizer) == end_ids(source, tokenizer)
        assert copied | {"eos_token_id": 0} == (generation or {}) | {"eos_token_id": 0}
    untouched = directory(tmp_path / "same", {"eos_token_id": [2, 0]}, {"eos_token_id": 2})
    copy_chat(untouched, target)
    assert (target / GENERATION).read_bytes() == (untouched / GENERATION).read_bytes()


def test_a_gguf_file_has_its_bos_and_its_ends(tmp_path: Path) -> None:
    """A tokenizer made of metadata puts the BOS that the file asks for and ends at each of its end tokens."""
    gguf = pytest.importorskip("gguf")
    library = byte_level()
    texts = [library.id_to_token(i) for i in range(library.get_vocab_size())]
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    kinds = [gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in texts]
    bos, eos, eot = (texts.index(f"<|{name}|>") for name in ("begin_of_text", "end_of_text", "eot_id"))
    given = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.eot_token_id": eot,
        "tokenizer.ggml.add_bos_token": True,
    }
    file = tokenizer_file(tmp_path / "model.gguf", given)
    assert file is not None
    tokenizer = Tokenizer.load(file)
    assert tokenizer.encode_prompt("hello world").tolist() == library.encode("hello world").ids
    assert end_ids(file.parent, tokenizer) == tuple(sorted((eos, eot)))
    given["tokenizer.ggml.add_bos_token"] = False
    without = Tokenizer.load(tokenizer_file(tmp_path / "model.gguf", given))
    assert without.encode_prompt("hello").tolist() == library.encode("hello", add_special_tokens=False).ids
