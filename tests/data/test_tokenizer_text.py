"""Ids to text and text to ids are what the `tokenizers` library and transformers make of the same file."""

import json
from pathlib import Path

import numpy as np
import pytest
from throughline.data.text_stream import TextStream
from throughline.data.tokenizer import Tokenizer
from tokenizer_fixtures import TOKENIZERS, byte_level, sentencepiece
from tokenizers import AddedToken


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(TOKENIZERS[request.param]().to_str())


def streamed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), skip: bool = True) -> str:
    """The text of all parts, as a server gives them out."""
    stream = TextStream(tokenizer, stop, skip_special_tokens=skip)
    text = ""
    for token_id in ids:
        text += stream.push(token_id)
        if stream.stopped:
            return text
    return text + stream.finish()


def test_streamed_text_of_any_ids_is_the_librarys_decoding(tokenizer: Tokenizer) -> None:
    """Broken characters and special tokens too; the texts of single tokens join to the same."""
    rng = np.random.default_rng(1)
    for length in (1, 2, 5, 30):
        for _ in range(60):
            ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
            for skip in (False, True):
                whole = tokenizer.decode(ids, skip_special_tokens=skip)
                assert streamed(tokenizer, ids, skip=skip) == whole
                pieces = tokenizer.pieces(ids, skip_special_tokens=skip)
                assert "".join(pieces) == whole and len(pieces) == len(ids)
            begin = tokenizer.decode(ids[:1], skip_special_tokens=True)
            if begin and (whole := tokenizer.decode(ids, skip_special_tokens=True)).startswith(begin):
                rest = tokenizer.pieces(ids[1:], before=ids[:1])
                assert "".join(rest) == whole[len(begin) :]


@pytest.mark.parametrize("text", ["😀😀", "你好世界", "नमस्ते", "naïve é", "👩‍👩‍👧 🇩🇪"])
def test_characters_spelled_in_bytes_survive(text: str) -> None:
    tokenizer = Tokenizer(sentencepiece().to_str())
    ids = tokenizer.encode(f"ab{text} hello").tolist()
    assert streamed(tokenizer, ids) == f"ab{text} hello"
    assert streamed(tokenizer, ids, (text,)) == "ab"
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == f" ab{text} hello"


def test_a_run_of_bytes_begun_by_the_prompt_is_continued() -> None:
    tokenizer = Tokenizer(sentencepiece().to_str())
    ids = tokenizer.encode("ab😀é").tolist()
    for cut in range(1, len(ids)):
        told = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert told + "".join(tokenizer.pieces(ids[cut:], before=ids[:cut])) == "ab😀é"


def test_prompts_have_the_ids_of_transformers(tokenizer: Tokenizer) -> None:
    """Special tokens that a prompt spells are parsed and the post-processor's are added, once."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._library)
    special = [token.content for token in tokenizer._library.get_added_tokens_decoder().values()]
    texts = ["hello world", " and", "\n\n a", "é 日本", *(f"the {token} \n and" for token in special)]
    for text in texts:
        for add in (True, False):
            expected = theirs(text, add_special_tokens=add).input_ids
            assert tokenizer.encode_prompt(text, add_special_tokens=add).tolist() == expected, text
    before, behind = tokenizer.framing
    for token_id in before:
        brought = tokenizer.decode([token_id]) + "hello"
        assert tokenizer.encode_prompt(brought).tolist().count(token_id) == 1
    assert tokenizer.encode_prompt("hello").tolist()[len(before) :][: -len(behind) or None] == (
        tokenizer.encode("hello").tolist()
    )


def test_encoding_depends_on_the_text_alone() -> None:
    """Truncation, padding and BPE's random merges, which a file may ask for, are off and are not written."""
    library = sentencepiece()
    plain = Tokenizer(library.to_str())
    library.model.dropout = 0.5
    library.enable_truncation(2)
    library.enable_padding(length=64)
    asked = Tokenizer(library.to_str())
    for _ in range(8):
        assert asked.encode("hello world answer").tolist() == plain.encode("hello world answer").tolist()
        assert asked.encode_prompt("hello world").tolist() == plain.encode_prompt("hello world").tolist()
    assert asked.fingerprint() == plain.fingerprint()
    assert json.loads(asked.to_json())["model"]["dropout"] is None


@pytest.mark.parametrize("asked", [True, False])
def test_the_post_processor_alone_decides_about_bos(asked: bool, tmp_path: Path) -> None:
    """transformers reads `add_bos_token` of tokenizer_config.json only where there is no tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    library = sentencepiece()
    if asked:
        library.post_processor = None
    library.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": asked}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("hello").input_ids
    assert Tokenizer.load(tmp_path).encode_prompt("hello").tolist() == theirs


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "flags", [{"rstrip": True}, {"lstrip": True, "rstrip": True}, {"normalized": True}, {"single_word": True}]
)
def test_flags_of_added_tokens_are_those_of_transformers(
    flags: dict[str, bool], special: bool, tmp_path: Path
) -> None:
    """Also of a token that only tokenizer_config.json makes special, by naming it as the end of text."""
    transformers = pytest.importorskip("transformers")
    library = byte_level()
    tokens = [AddedToken(name, **{"normalized": False} | flags) for name in ("<END>", "<U>")]
    if special:
        library.add_special_tokens(tokens)
    else:
        library.add_tokens(tokens)
    library.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<END>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(tmp_path)), Tokenizer.load(tmp_path)
    for text in ("a <END> b", "a<END>\n b<U>\n c <U> d", "x<END>y <END>", "the<U>and <U> and"):
        ids = theirs(text).input_ids
        assert ours.encode_prompt(text).tolist() == ids
        raw = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert ours.encode(text).tolist() == raw
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_roles_are_found_in_every_file_that_names_them(tmp_path: Path) -> None:
    """special_tokens_map.json counts where transformers reads it; config.json's end where nothing else names one."""
    transformers = pytest.importorskip("transformers")
    library = byte_level()
    library.save(str(tmp_path / "tokenizer.json"))
    eot, end = (library.token_to_id(name) for name in ("<|eot_id|>", "<|end_of_text|>"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [eot, end]}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|begin_of_text|>"}')
    assert Tokenizer.load(tmp_path).eos_id == eot
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end_of_text|>"}}')
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert Tokenizer.load(tmp_path).eos_id == theirs.eos_token_id == end
