"""Fields that current clients send: each field that the openai package knows is read, accepted at the values that
change nothing, or refused with the reason. None is unknown.
"""

import json
from typing import Any

import pytest
from throughline.core.errors import WrongUse
from throughline.inference.serving import api_types as api
from throughline.inference.serving.accounts import ServerLimits
from throughline.inference.serving.calls import read

HELLO = [{"role": "user", "content": "The quick"}]


def body_of(kind: Any, **fields: Any) -> Any:
    return read(kind, json.dumps(fields).encode(), ServerLimits())


@pytest.mark.parametrize(
    ("kind", "module", "params"),
    [
        (api.ChatBody, "chat.completion_create_params", "CompletionCreateParamsBase"),
        (api.CompletionBody, "completion_create_params", "CompletionCreateParamsBase"),
        (api.EmbeddingBody, "embedding_create_params", "EmbeddingCreateParams"),
        (api.ResponsesBody, "responses.response_create_params", "ResponseCreateParamsBase"),
    ],
)
def test_no_field_of_the_openai_package_is_unknown(kind: Any, module: str, params: str) -> None:
    pytest.importorskip("openai")
    from importlib import import_module

    known = getattr(import_module(f"openai.types.{module}"), params).__annotations__
    assert "model" in known
    for name in known:
        with pytest.raises(WrongUse) as refused:  # the fields that it must have are missing
            body_of(kind, **{name: [[{}]]})  # neither the type nor a value that changes nothing
        assert "unknown field" not in refused.value.what
        if "is not supported" in refused.value.what:
            assert refused.value.why, f"{name} is refused without a reason"


def test_every_refusal_has_a_reason() -> None:
    kinds = {body for body in vars(api).values() if isinstance(body, type) and issubclass(body, api.Body)}
    for kind in kinds:
        for name, unsupported in kind.unsupported.items():
            assert unsupported.why or unsupported.accepts("anything"), (kind, name)


# what agents and frameworks send unasked
UNASKED = {
    "prompt_cache_key": "agent-7",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "user-7",
    "moderation": {"model": "omni-moderation-latest", "policy": {"input": {"mode": "score"}}},
    "service_tier": "flex",
    "user": "me",
    "metadata": {"run": "7"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "store": False,
    "top_k": -1,
    "top_p": 1,
    "min_p": 0,
    "seed": -1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
    "prediction": None,
    "detokenize": True,
    "priority": 0,
}


def test_what_clients_send_unasked_is_accepted() -> None:
    for kind, own in (
        (api.ChatBody, {"messages": HELLO, "verbosity": "low", "reasoning_effort": "high"}),
        (api.ResponsesBody, {"input": HELLO, "include": ["reasoning.encrypted_content"]}),
        (api.CompletionBody, {"prompt": "x", "max_completion_tokens": 5, "best_of": 1}),
    ):
        sampling = body_of(kind, **UNASKED, **own).sampling({})
        assert (sampling.top_k, sampling.seed) == (0, None)
    assert body_of(api.CompletionBody, prompt="x").most_tokens() == 16
    assert body_of(api.CompletionBody, prompt="x", max_completion_tokens=5).most_tokens() == 5
    assert body_of(api.EmbeddingBody, input="x", user="me", safety_identifier="me", priority=0)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (api.ChatBody, {"tools": [{"type": "function"}]}, "calls no tools"),
        (api.ChatBody, {"audio": {"voice": "alloy"}}, "answers are text"),
        (api.ChatBody, {"moderation": {"policy": {"output": {"mode": "block"}}}}, "no moderation model"),
        (api.ChatBody, {"chat_template": "{{ messages }}"}, "the model's own chat template"),
        (api.ChatBody, {"store": True}, "stores no answers"),
        (api.ResponsesBody, {"previous_response_id": "resp_1"}, "stores no answers"),
        (api.ResponsesBody, {"truncation": "auto"}, "read whole or refused"),
        (api.ResponsesBody, {"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        (api.CompletionBody, {"reasoning_effort": "low"}, "/v1/chat/completions"),
        (api.EmbeddingBody, {"truncate_prompt_tokens": 9}, "use truncate"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(kind: Any, fields: dict[str, Any], reason: str) -> None:
    required = {"messages": HELLO} if kind is api.ChatBody else {"input": "x"}
    required = {"prompt": "x"} if kind is api.CompletionBody else required
    with pytest.raises(WrongUse, match="is not supported by this server") as refused:
        body_of(kind, **required, **fields)
    assert reason in refused.value.why and refused.value.where == next(iter(fields))


def test_a_negative_seed_is_a_seed_and_minus_one_is_a_new_one() -> None:
    seeds = [body_of(api.CompletionBody, prompt="x", seed=seed).sampling({}).seed for seed in (-2, 7, -1)]
    assert seeds == [2**63 - 2, 7, None]


def test_messages_as_clients_send_them_back() -> None:
    """Results of tools with the id of their call, refusals, annotations, earlier reasoning."""
    said = {"type": "output_text", "text": "a", "annotations": [{"type": "url_citation"}], "logprobs": []}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}]},
        {"role": "assistant", "content": [said], "id": "msg_1", "status": "completed", "phase": "commentary"},
        {"role": "assistant", "content": None, "refusal": "no", "provider_specific_fields": {}},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "never", "cache_control": {"type": "ephemeral"}}],
            "reasoning": "hm",
        },
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        {"role": "function", "content": "4", "name": "add"},
    ]
    turns = [message.turn() for message in body_of(api.ChatBody, messages=messages).messages]
    assert [turn["content"] for turn in turns] == ["x", "a", "no", "never", "4", "4"]
    assert turns[3]["reasoning_content"] == "hm" and turns[4]["tool_call_id"] == "call_1"
    assert turns[5]["name"] == "add"


def test_effort_and_verbosity_are_variables_of_the_template() -> None:
    """`none` switches the thinking of Qwen 3's template off; what the request says of its variables wins."""
    body = body_of(api.ChatBody, messages=HELLO, chat_template_kwargs={"enable_thinking": True})
    assert body.variables("high", "low") == {
        "reasoning_effort": "high",
        "verbosity": "low",
        "enable_thinking": True,
    }
    assert body_of(api.ChatBody, messages=HELLO).variables("none", None) == {"enable_thinking": False}
