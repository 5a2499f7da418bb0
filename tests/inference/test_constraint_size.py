"""Expressions and schemas that would take a grammar compiler seconds or minutes are refused before it sees them."""

import json
from pathlib import Path
from typing import Any

import pytest
from throughline.inference.serving.constraint_size import expression_size


@pytest.mark.parametrize(
    ("pattern", "positions", "repetitions"),
    [
        ("a{1000000}", 1_000_000, 1),
        ("a{0000001000000}", 1_000_000, 1),
        ("(a{1000}){1000}", 1_000_000, 2),
        ("((a{100}){100}){100}", 1_000_000, 3),
        ("x{2}{3}{4}", 24, 3),
        ("a{,5}b{3,}", 8, 2),
        (r"\{1000000}", 9, 0),
        (r"[{1000000}]{2}", 2, 1),
        (r"[]a]{2}[^\]{9}]", 3, 1),
        (r"(?:ab|c){2,5}d*", 16, 2),
        (r"(?P<year>[0-9]{4})-\p{L}{20}", 25, 2),
        ("(" * 3000 + "a" + "{999999999999})" * 3000, 10**12, 3000),
        ("[" * 10_000, 1, 0),
    ],
)
def test_an_expression_is_as_large_as_it_is_written_out(
    pattern: str, positions: int, repetitions: int
) -> None:
    assert expression_size(pattern) == (positions, repetitions)


TOO_LARGE = [
    {"guided_regex": "a{1000000}"},
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_regex": ".?" * 3000},
    {"structured_outputs": {"regex": "(a{100}){200}b"}},
    {"guided_json": {"type": "string", "pattern": "^a{1000000}$"}},
    {"guided_json": {"type": "object", "patternProperties": {"^(a{500}){500}$": {}}}},
    {"guided_json": {"properties": {f"p{i}": {"pattern": "a{9999}"} for i in range(11)}}},
    {"guided_json": {"type": "integer", "multipleOf": 999_983}},
    {"guided_json": {"type": "number", "multipleOf": 99_999.5}},
    {"guided_json": {"allOf": [{"multipleOf": prime} for prime in (97, 89, 83)]}},
]


def test_what_is_too_large_is_refused_before_it_is_compiled(
    gpt_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these took llguidance 0.6 to 25 seconds, then mostly ended in a 500."""

    async def body(found: Any) -> None:
        def refuse(constraint: str) -> Any:
            raise AssertionError("it was compiled")

        monkeypatch.setattr(found.workers["gpt"], "_guide", refuse)
        for fields in TOO_LARGE:
            answer = await found.client.post("/v1/completions", json={"prompt": "x"} | fields)
            assert answer.status_code == 400 and "is too large to follow" in answer.text, fields
        shape = {"type": "json_schema", "json_schema": {"schema": TOO_LARGE[4]["guided_json"]}}
        answer = await found.client.post("/v1/completions", json={"prompt": "x", "response_format": shape})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"

    in_thread.run_with(monkeypatch, [f"gpt={gpt_dir}"], body)


def test_usual_constraints_are_within_the_bounds() -> None:
    from throughline.inference.serving.api_types import CompletionBody

    for fields in (
        {"guided_regex": r"(\+\d{1,3} )?\d{2,4}[ -]?\d{3,10}"},
        {"guided_choice": [f"choice number {number} " + "x" * 180 for number in range(256)]},
        {"guided_json": {"properties": {"price": {"type": "number", "multipleOf": 0.01}}}},
        {"guided_json": {"properties": {f"p{i}": {"pattern": "^[a-z]{1,64}$"} for i in range(300)}}},
    ):
        constraint = CompletionBody(prompt=["x"], **fields).constraint()
        assert constraint is not None and json.loads(constraint)
