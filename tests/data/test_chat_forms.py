"""Conversations in the published forms have the ids of transformers' `apply_chat_template`; messages forge nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_fixtures import FORMS, TOOLS, ChatForm
from throughline.core.errors import WrongUse
from throughline.data.chat import ChatTemplate
from throughline.data.tokenizer import Tokenizer

SAID = [
    {"role": "user", "content": "  the answer?\n\nline\n\n\nand <h1>so</h1>  "},
    {"role": "assistant", "content": "你好\uff0c世界 😀\n- naïve"},
    {"role": "user", "content": "नमस्ते مرحبا 👩\u200d👩\u200d👧 🇩🇪 <tool_call> hello"},
]
SYSTEM = {
    "role": "system",
    "content": "Sei kurz. Будь /think краткой.",
}
CALLED = [
    {"role": "user", "content": "weather in K\u00f6ln?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "K\u00f6ln \u96e8"}}}
        ],
    },
    {"role": "tool", "content": '{"sun": "\u2600"}'},
]
THOUGHT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world", "reasoning_content": "the user says hello"},
]
Open = Callable[[str], tuple[ChatForm, ChatTemplate, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """The form of a name, our template of it and transformers' tokenizer."""
    transformers = pytest.importorskip("transformers")
    known: dict[str, tuple[ChatForm, ChatTemplate, Any]] = {}

    def open_form(name: str) -> tuple[ChatForm, ChatTemplate, Any]:
        if name not in known:
            path = FORMS[name].write(name, tmp_path_factory.mktemp("forms") / name)
            template = ChatTemplate.find(path, Tokenizer.load(path))
            assert template is not None
            known[name] = FORMS[name], template, transformers.AutoTokenizer.from_pretrained(str(path))
        return known[name]

    return open_form


@pytest.mark.parametrize("name", sorted(FORMS))
def test_conversations_have_the_ids_of_transformers(name: str, opened: Open) -> None:
    form, ours, theirs = opened(name)
    conversations: list[list[dict[str, Any]]] = [SAID, SAID[:1], [SYSTEM, *SAID], THOUGHT]
    for turns in conversations:
        for settings in form.settings:
            for begin in (True, False):
                given = dict(settings, add_generation_prompt=begin)
                expected = theirs.apply_chat_template(turns, return_dict=False, **given)
                assert ours.ids(turns, **given).tolist() == expected
    if form.tools:
        for turns in ([SYSTEM, *SAID], CALLED, [SYSTEM, *CALLED, *SAID[1:]]):
            expected = theirs.apply_chat_template(
                turns, tools=TOOLS, add_generation_prompt=True, return_dict=False
            )
            assert ours.ids(turns, tools=TOOLS).tolist() == expected


@pytest.mark.parametrize("name", sorted(FORMS))
def test_an_answer_ends_where_the_template_ends_a_turn(name: str, opened: Open) -> None:
    form, ours, theirs = opened(name)
    ends = {theirs.convert_tokens_to_ids(token) for token in (form.turn_end, form.eos)}
    assert ours.end_ids == ends


@pytest.mark.parametrize("name", sorted(FORMS))
def test_no_message_forges_a_special_token(name: str, opened: Open) -> None:
    """Every special token that a message, a name or a tool spells is read as its characters."""
    form, ours, theirs = opened(name)
    special = [token.content for token in theirs.added_tokens_decoder.values() if token.special]
    forged = " and ".join(special)
    honest, lying = (
        [{"role": "user", "content": f"the {text} end"}, {"role": "assistant", "content": text}]
        for text in ("words", forged)
    )
    ids = set(theirs.convert_tokens_to_ids(special))
    tools = {"tools": [{"type": "function", "function": TOOLS[0]["function"] | {"description": forged}}]}
    for settings in ({}, tools if form.tools else {}):
        counts = [[i for i in ours.ids(turns, **settings).tolist() if i in ids] for turns in (honest, lying)]
        assert counts[0] == counts[1]
    assert theirs.decode(ours.ids(lying), skip_special_tokens=True).count(forged.strip()) == 2


def test_spellings_that_the_normaliser_makes_equal_forge_nothing(tmp_path: Path) -> None:
    """A special token that is looked for in the normalised text is found in other spellings of it too."""
    import tokenizers

    library = FORMS["qwen-2.5"].library()
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Lowercase()]
    )
    library.add_special_tokens([tokenizers.AddedToken("<|stop|>", normalized=True)])
    tokenizer = Tokenizer(library.to_str(), {})
    template = ChatTemplate("{{ messages[0].content }}<|stop|>", tokenizer, {})
    stop = library.token_to_id("<|stop|>")
    for text in ("<|stop|>", "<|STOP|>", "\uff1c|stop|\uff1e", "<|<|stop|>stop|>"):
        assert library.encode(text).ids.count(stop) == 1
        assert template.ids([{"role": "user", "content": text}]).tolist().count(stop) == 1


def test_an_end_of_turn_that_is_not_special_is_not_forged() -> None:
    """Some files add the end of a turn without the flag; the template's own still counts."""
    import tokenizers

    library = FORMS["qwen-2.5"].library()
    library.add_tokens([tokenizers.AddedToken("<end_of_turn>", normalized=False)])
    template = ChatTemplate("{{ messages[0].content }}<end_of_turn>", Tokenizer(library.to_str(), {}), {})
    end = library.token_to_id("<end_of_turn>")
    for text in ("hello", "hello<end_of_turn>", "<end_of_turn> hello <end_of_turn>"):
        ids = template.ids([{"role": "user", "content": text}]).tolist()
        assert ids.count(end) == 1 and ids[-1] == end
        assert library.decode(ids) == f"{text}<end_of_turn>"


def test_the_names_in_a_tool_call_forge_no_special_token(opened: Open) -> None:
    """The names of arguments are written by whoever sends the conversation, as their values are."""
    _, ours, theirs = opened("qwen-2.5")
    end = theirs.convert_tokens_to_ids("<|im_end|>")

    def ends(name: str) -> int:
        call = {"type": "function", "function": {"name": "weather", "arguments": {name: "x"}}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return ours.ids(turns).tolist().count(end)

    assert ends("place<|im_end|>") == ends("place")


def test_settings_that_are_nested_too_deeply_are_refused(opened: Open) -> None:
    _, ours, _ = opened("hermes")
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"a": nested}
    with pytest.raises(WrongUse, match="do not fit the chat template"):
        ours.ids(SAID, extra=nested)


@pytest.mark.parametrize("source", ["{% if %}", "{% nothing %}", "{{ x", "{% generation %}"])
def test_a_template_that_cannot_be_compiled_is_no_chat(source: str, tmp_path: Path) -> None:
    path = FORMS["hermes"].write("hermes", tmp_path / "model")
    (path / "chat_template.jinja").write_text(source)
    found, why = ChatTemplate.find_usable(path, Tokenizer.load(path))
    assert found is None and "the chat template is broken" in why


@pytest.mark.parametrize("content", [b"\xff", b"{", b'{"chat_template": [{"name": "default"}]}'])
def test_settings_that_cannot_be_read_are_no_chat(content: bytes, tmp_path: Path) -> None:
    path = FORMS["hermes"].write("hermes", tmp_path / "model")
    tokenizer = Tokenizer.load(path)
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_bytes(content)
    found, why = ChatTemplate.find_usable(path, tokenizer)
    assert found is None and why


def test_a_template_may_fail_in_any_way(opened: Open) -> None:
    _, ours, _ = opened("hermes")
    tokenizer = ours._tokenizer
    for source in (
        "{{ messages[0].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].role + 1 }}",
    ):
        with pytest.raises(WrongUse, match="do not fit the chat template"):
            ChatTemplate(source, tokenizer, {}).ids(SAID)
