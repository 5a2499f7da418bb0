"""API keys: what needs one, scopes, quotas and places, errors of a key file, and what a refused request leaves in the
log and the metrics.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from throughline.core.errors import WrongUse
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.keys import Key, find_key, read_keys, replace_keys
from throughline.inference.serving.reload import ReloadedFile
from throughline.inference.serving.server import Server, build_app

Asked = tuple[str, str, dict | None]
METRICS: Asked = ("GET", "/metrics", None)
MODELS: Asked = ("GET", "/v1/models", None)
COMPLETION: Asked = ("POST", "/v1/completions", {"prompt": "x"})
LOAD: Asked = ("POST", "/models/load", {"model": "absent"})


def answers(
    asked: Sequence[tuple[str, Asked]],
    keys: Sequence[Key],
    telemetry: Telemetry | None = None,
    **options: Any,
) -> list[httpx.Response]:
    """What a server without models answers to these requests, each with the text of a key ("": none)."""

    async def ask() -> list[httpx.Response]:
        server = Server(Catalogue([], directory=Path()), ServerLimits(), telemetry or Telemetry())
        transport = httpx.ASGITransport(build_app(server, keys, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            found = []
            for key, (method, path, body) in asked:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                found.append(await client.request(method, path, json=body, headers=headers))
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        (None, {"completion"}),
        (("inference",), {"completion"}),
        (("metrics",), {"metrics"}),
        (("admin",), {"load"}),
        (("inference", "metrics", "admin"), {"completion", "metrics", "load"}),
    ],
)
def test_a_key_does_what_its_scopes_say(scopes: tuple[str, ...] | None, allowed: set[str]) -> None:
    """Any key lists models. What is allowed gets past the guard: a server without models answers 400 or 404 then."""
    key = Key.of("sesame") if scopes is None else Key.of("sesame", scopes=scopes)
    wanted = {"completion": COMPLETION, "metrics": METRICS, "load": LOAD}
    found = answers([("sesame", MODELS), *(("sesame", asked) for asked in wanted.values())], [key])
    assert found[0].status_code == 200
    for name, answer in zip(wanted, found[1:], strict=True):
        assert (answer.status_code != 403) == (name in allowed), name
    assert {answer.status_code for answer in found[1:]} <= {200, 400, 403, 404}


def test_a_quota_counts_inference_requests_alone() -> None:
    """A key of two requests a minute lists models and is scraped as often as it likes."""
    key = Key.of("sesame", per_minute=2, scopes=("inference", "metrics"))
    asked = [MODELS, METRICS, ("GET", "/health", None)] * 5 + [COMPLETION] * 3
    found = [answer.status_code for answer in answers([("sesame", one) for one in asked], [key])]
    assert found == [200] * 15 + [400, 400, 429]


def test_metrics_may_be_open_where_keys_are_needed() -> None:
    asked = [("", METRICS), ("", MODELS)]
    assert [one.status_code for one in answers(asked, [Key.of("a")], open_metrics=True)] == [200, 401]
    assert [one.status_code for one in answers(asked, [Key.of("a")])] == [401, 401]


def test_refused_requests_are_counted_and_logged_where_they_were_meant_for() -> None:
    lines: list[dict] = []
    telemetry = Telemetry(lambda level, **fields: lines.append(fields))
    key = Key.of("sesame", name="ops", per_minute=1)
    unknown = ("POST", "/v1/completions", {"prompt": "a secret", "temprature": 1})
    asked = [
        ("", COMPLETION),
        ("sesame", unknown),
        ("sesame", COMPLETION),
        ("", ("GET", "/v1/models/x", None)),
    ]
    assert [one.status_code for one in answers(asked, [key], telemetry)] == [401, 400, 429, 401]
    labels = [("/v1/completions", "401"), ("/v1/completions", "400"), ("/v1/completions", "429")]
    page = telemetry.page().decode()
    for endpoint, status in [*labels, ("/v1/models/{name:path}", "401")]:
        assert f'throughline_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in page
    assert [line["path"] for line in lines] == ["/v1/completions"] * 3 + ["/v1/models/{name:path}"]
    assert lines[1]["error"] == "unknown field 'temprature'" and lines[1]["param"] == "temprature"
    assert "requests a minute" in lines[2]["error"] and lines[2]["key"] == "ops"
    assert all("secret" not in str(line) for line in lines)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("good\n\nlist:x:38:38:Mailing List Manager:/var\n", 3, "word 2 of the line is no NAME=VALUE"),
        ("# ours\ngood name=a\nbad colour=red\n", 3, "no setting is called 'colour'"),
        ("good scope=metrics\n", 1, "did you mean scopes"),
        ("good scopes=metric\n", 1, "did you mean metrics"),
        ("one\ngood priority=high\n", 2, "Expected `int`"),
        ("one\ngood places=0\n", 2, ">= 1"),
        ("one\ntwo\none name=again\n", 3, "the same key stands twice"),
        ("one\nsecrét\n", 2, "not visible ASCII"),
        ("one\n\xff\n", 2, "not visible ASCII"),
    ],
)
def test_an_error_in_a_key_file_names_its_line_and_no_key(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse) as refused:
        read_keys(file, None, 64)
    assert refused.value.where == f"{file}:{line}" and said in str(refused.value)
    assert all(word not in str(refused.value) for word in ("secrét", "good", "Mailing"))


def test_bytes_that_are_no_text_are_found_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"one\ntwo\n\xff\xfe\n")
    with pytest.raises(WrongUse) as refused:
        read_keys(tmp_path / "keys", None, 64)
    assert refused.value.where == f"{tmp_path / 'keys'}:3"


def test_keys_of_the_variable_have_settings_and_bytes_that_are_no_ascii_match_nothing() -> None:
    keys = read_keys(None, "one, two scopes=metrics+admin name=ops", 64)
    assert [(key.name, key.scopes) for key in keys] == [
        ("", ("inference",)),
        ("ops", ("metrics", "admin")),
    ]
    assert find_key(keys, b"Bearer two") is keys[1]
    assert find_key(keys, "Bearer secrét".encode()) is None and find_key(keys, b"Bearer \xe9") is None
    with pytest.raises(WrongUse, match="API keys"):
        read_keys(None, "secrét", 64)


def test_keys_are_read_again_while_requests_hold_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new key is let in, a removed one is not, one that stays keeps what it has used; a faulty file changes nothing
    and says why.
    """
    file = tmp_path / "keys"
    file.write_text("old places=5\nstays places=5\n")
    keys = read_keys(file, "variable", 64)
    held = keys[2]
    held.take(3)
    reloaded = ReloadedFile(
        "the API keys", [file], lambda: replace_keys(keys, read_keys(file, "variable", 64))
    )
    assert not reloaded.changed()
    for text in ("new\nstays places=4 name=ops\n", "bad colour=red\n", ""):
        aside = tmp_path / "aside"
        aside.write_text(text)
        os.replace(aside, file)
        assert reloaded.changed() and not reloaded.changed()
        reloaded.reload()
        assert find_key(keys, b"Bearer new") and find_key(keys, b"Bearer variable")
        assert find_key(keys, b"Bearer old") is None
        assert find_key(keys, b"Bearer stays") is held and (held.held, held.places, held.name) == (
            3,
            4,
            "ops",
        )
    told = capsys.readouterr().err
    assert told.count("the API keys were read again") == 1
    assert "stay in use" in told and f"{file}:1" in told and "there is no API key in the file" in told


def test_keys_are_needed_everywhere_but_for_probes_and_the_page(
    gpt_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found) -> None:
        for path, status in (
            ("/health", 200),
            ("/ready", 200),
            ("/", 200),
            ("/metrics", 401),
            ("/v1/models", 401),
        ):
            assert (await found.client.get(path)).status_code == status
        wrong = await found.client.get("/v1/models", headers={"Authorization": "Bearer key-onE"})
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        for key in ("key-one", "key-two"):
            right = await found.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert right.status_code == 200

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, keys=("key-one", "key-two"))


def test_a_key_file_says_who_may_do_how_much(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsesame name=alice priority=2 places=3\n\nopen per_minute=2\n")
    keys = read_keys(file, "third", 64)
    assert [(key.name, key.priority, key.places) for key in keys] == [
        ("", 0, 32),
        ("alice", 2, 3),
        ("", 0, 32),
    ]
    assert find_key(keys, b"Bearer sesame") is keys[1] and find_key(keys, b"Basic sesame") is None
    keys[1].take(3)
    for refused in (lambda: keys[1].take(1), lambda: [keys[2].begin() for _ in range(3)]):
        with pytest.raises(Exception, match="this key") as told:
            refused()
        assert told.value.status_code == 429 and int(told.value.headers["Retry-After"]) >= 1
    with pytest.raises(WrongUse, match="too many answers for this key"):  # however long it waits
        keys[1].take(4)
    for wrong in ("a places=0", "a b", "a colour=red", "# none"):
        file.write_text(wrong)
        with pytest.raises(WrongUse, match="key"):
            read_keys(file, None, 64)


def test_one_key_cannot_take_the_places_of_another(
    gpt_onnx: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(found: Any) -> None:
        request = {"prompt": "x", "max_tokens": 100, "temperature": 0, "logit_bias": {"0": -100}, "n": 4}

        async def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return (await found.client.post("/v1/completions", json=request, headers=headers)).status_code

        greedy = [asyncio.create_task(ask("one")) for _ in range(4)]
        while not found.remote().waiting:
            await asyncio.sleep(0.002)
        assert await ask("two") == 200
        assert sorted([await task for task in greedy]) == [200, 200, 429, 429]
        assert await ask("one") == 200  # its places are its own again

    usual = in_thread.Key.of
    monkeypatch.setattr(in_thread.Key, "of", lambda text: usual(text, places="8"))
    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, keys=("one", "two"), slots=2, queue=14)
