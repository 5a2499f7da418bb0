"""What a prompt means and what an answer says, of a model with a SentencePiece-style tokenizer and two end tokens:
equal to transformers' tokenizer, `generate` and `decode` on the same directory.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from throughline.data.tokenizer import Tokenizer
from tokenizer_fixtures import write_sentencepiece

TEXT = "hello world 😀😀 你好 नमस्ते"
PROMPTS = [
    "hello world",
    "",
    " the answer",
    "a 😀",
    "<|user|>\nhello<|end|>\n<|assistant|>",
    "<s>hello",
    "日本",
]


@pytest.fixture
def ask(sentencepiece_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs an async test body against a server with the model as "gpt"."""
    return lambda body, **limits: in_thread.run_with(
        monkeypatch, [f"gpt={sentencepiece_dir}"], body, **limits
    )


@pytest.fixture(scope="module")
def theirs(sentencepiece_dir: Path) -> tuple[Any, Any]:
    """transformers' tokenizer and model of the directory."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(sentencepiece_dir)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(sentencepiece_dir).eval()


def continued(theirs: tuple[Any, Any], ids: list[int], count: int = 10) -> list[int]:
    """transformers' greedy continuation, its end token included."""
    import torch

    with torch.inference_mode():
        made = theirs[1].generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return made[0, len(ids) :].tolist()


def spelled(tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """A bias that makes a model write this text: by a grammar, which leaves one way to write each character."""
    return {"guided_choice": [text], "max_tokens": len(tokenizer.encode(text)) + 8}


def events_of(streamed: Any) -> list[dict[str, Any]]:
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_greedy_answers_are_those_of_transformers(ask: Any, theirs: tuple[Any, Any]) -> None:
    """BOS and the special tokens of a prompt are read as transformers reads them; the text is its decoding."""
    tokenizer = theirs[0]

    async def body(found: Any) -> None:
        for prompt in PROMPTS:
            for add in (True, False):
                ids = tokenizer(prompt, add_special_tokens=add).input_ids
                if prompt.startswith("<s>") and add:
                    ids = ids[1:]  # never twice
                if not ids:
                    continue
                expected = continued(theirs, ids)
                asked = {"prompt": prompt, "max_tokens": 10, "add_special_tokens": add}
                answer = await found.complete(**asked)
                (choice,) = answer["choices"]
                assert choice["token_ids"] == expected and answer["usage"]["prompt_tokens"] == len(ids), (
                    prompt
                )
                before = tokenizer.decode(ids, skip_special_tokens=True)
                whole = tokenizer.decode([*ids, *expected], skip_special_tokens=True)
                if whole.startswith(before) and not before.endswith("\ufffd"):
                    assert choice["text"] == whole[len(before) :]
                streamed = await found.client.post(
                    "/v1/completions", json={"model": "gpt", "temperature": 0, "stream": True} | asked
                )
                assert "".join(event["choices"][0]["text"] for event in events_of(streamed)) == choice["text"]
                same = await found.complete(prompt=ids, max_tokens=10)
                assert same["choices"] == answer["choices"], "ids are read as they are"

    ask(body)


@pytest.mark.parametrize("text", ["😀😀", "你好世界", "नमस्ते", "naïve é!", " 👩‍👩‍👧 🇩🇪", "hello\n\nworld"])
def test_text_spelled_in_bytes_is_whole_in_every_form(ask: Any, sentencepiece_dir: Path, text: str) -> None:
    """Constrained, whole and streamed, behind a stop string outside ASCII, and with the bytes of each token."""
    pytest.importorskip("llguidance", reason="needs llguidance")
    tokenizer = Tokenizer.load(sentencepiece_dir)

    async def body(found: Any) -> None:
        asked = {"prompt": "a"} | spelled(tokenizer, f"ab{text}")
        whole = (await found.complete(**asked, logprobs=2))["choices"][0]
        assert whole["text"] == f"ab{text}" and whole["finish_reason"] == "stop"
        stopped = (await found.complete(**asked, stop=[text]))["choices"][0]
        assert stopped["text"] == "ab" and stopped["finish_reason"] == "stop"
        listed = whole["logprobs"]
        assert "".join(listed["tokens"]) == whole["text"]
        for token, offset, top in zip(listed["tokens"], listed["text_offset"], listed["top_logprobs"]):
            assert whole["text"][offset : offset + len(token)] == token and top is not None
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
        chat |= {"model": "gpt", "temperature": 0} | spelled(tokenizer, f"ab{text}")
        said = (await found.client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        content = said["logprobs"]["content"]
        joined = b"".join(bytes(token["bytes"] or []) for token in content)
        assert joined.decode() == said["message"]["content"] == f"ab{text}"
        assert "".join(token["token"] for token in content) == f"ab{text}"
        streamed = events_of(await found.client.post("/v1/chat/completions", json=chat | {"stream": True}))
        parts = [event["choices"][0] for event in streamed]
        assert "".join(part["delta"].get("content", "") for part in parts) == f"ab{text}"
        told = [token for part in parts for token in (part["logprobs"] or {}).get("content", ())]
        assert [token["bytes"] for token in told] == [token["bytes"] for token in content]

    ask(body)


def test_a_cut_character_has_its_real_bytes(ask: Any, sentencepiece_dir: Path) -> None:
    """Two of the four tokens of an emoji: the text has U+FFFD for each, the bytes are those of the emoji."""
    pytest.importorskip("llguidance", reason="needs llguidance")

    async def body(found: Any) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "temperature": 0}
        chat |= {"guided_choice": ["😀"], "max_tokens": 2}
        said = (await found.client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        assert said["finish_reason"] == "length" and said["message"]["content"] == "\ufffd\ufffd"
        content = said["logprobs"]["content"]
        assert [token["bytes"] for token in content] == [[byte] for byte in "😀".encode()[:2]]
        assert "".join(token["token"] for token in content) == "\ufffd\ufffd"

    ask(body)


def test_an_echoed_prompt_has_the_offsets_of_its_text(ask: Any, theirs: tuple[Any, Any]) -> None:
    """With BOS in front, which is no text, special tokens that the prompt spells, and characters of several tokens."""

    async def body(found: Any) -> None:
        for prompt in ("hello<|end|>", "hello world"):
            asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
            listed = (await found.complete(**asked))["choices"][0]["logprobs"]
            assert "".join(listed["tokens"]) == prompt
        for prompt in ("hello world 😀!", "<|user|>\nhello<|end|>\n", "the  answer"):
            asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 5}
            answer = await found.complete(**asked)
            choice, listed = answer["choices"][0], answer["choices"][0]["logprobs"]
            ids = theirs[0](prompt).input_ids
            assert choice["token_ids"][: len(ids)] == ids and choice["text"].startswith(prompt)
            assert listed["tokens"][0] == "" and listed["text_offset"][0] == 0
            if "<|" not in prompt:
                assert "".join(listed["tokens"]) == choice["text"]
            for token, offset in zip(listed["tokens"], listed["text_offset"]):
                if token.strip() and "<|" not in prompt:
                    assert choice["text"][offset : offset + len(token)] == token

    ask(body)


def test_every_end_token_ends_every_answer(ask: Any, sentencepiece_dir: Path) -> None:
    """`</s>` of the tokenizer and `<|end|>` of generation_config.json, by ids, in completions and in chats; neither is
    text. `min_tokens` and `ignore_eos` hold for both.
    """
    tokenizer = Tokenizer.load(sentencepiece_dir)
    letter = tokenizer.vocab["x"]

    async def answers(found: Any, end: int, **fields: Any) -> list[tuple[str, str, int]]:
        """The text, the reason and the tokens of a completion and of a chat that would end at once."""
        fields |= {"temperature": 0, "max_tokens": 4, "logit_bias": {str(end): 100, str(letter): 60}}
        (said,) = (await found.complete(prompt="hello", **fields))["choices"]
        request = fields | {"messages": [{"role": "user", "content": "hello"}]}
        chat = (await found.client.post("/v1/chat/completions", json=request)).json()
        (choice,) = chat["choices"]
        return [
            (said["text"], said["finish_reason"], len(said["token_ids"])),
            (choice["message"]["content"], choice["finish_reason"], chat["usage"]["completion_tokens"]),
        ]

    async def body(found: Any) -> None:
        for name in ("</s>", "<|end|>"):
            end = tokenizer.vocab[name]
            assert await answers(found, end) == [("", "stop", 1)] * 2
            assert await answers(found, end, min_tokens=2) == [("xx", "stop", 3)] * 2
            assert await answers(found, end, ignore_eos=True) == [("", "length", 4)] * 2
            shown = await answers(found, end, ignore_eos=True, skip_special_tokens=False)
            assert shown == [(name * 4, "length", 4)] * 2

    ask(body)


def test_no_stop_string_ends_an_answer_before_its_least_tokens(ask: Any, sentencepiece_dir: Path) -> None:
    """As vLLM: stop strings are looked for behind `min_tokens` tokens; earlier ones are text."""
    letter = Tokenizer.load(sentencepiece_dir).vocab["x"]
    fields = {"prompt": "hello", "max_tokens": 6, "logit_bias": {str(letter): 100}}

    async def body(found: Any) -> None:
        for stop, least, text in (("x", 0, ""), ("x", 2, "xx"), ("xx", 3, "xx"), ("xx", 6, "xxxxxx")):
            for logprobs in (None, 1):
                answer = await found.complete(**fields, stop=stop, min_tokens=least, logprobs=logprobs)
                (choice,) = answer["choices"]
                finish = "length" if least == 6 else "stop"
                assert (choice["text"], choice["finish_reason"]) == (text, finish), (stop, least)

    ask(body)


def test_a_directory_of_links_has_what_stands_beside_its_tokenizer(
    sentencepiece_dir: Path, in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's cache keeps each file elsewhere, under its hash, and links to it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sentencepiece_dir.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blobs / str(number))

    async def body(found: Any) -> None:
        served = found.server.catalogue.find("gpt")
        assert "/v1/chat/completions" in served.endpoints and len(served.end_ids) == 2

    in_thread.run_with(monkeypatch, [f"gpt={snapshot}"], body)


def test_an_end_token_outside_the_vocabulary_refuses_no_chat(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of models that others have trained on name such ends; no request has stated them."""
    model = write_sentencepiece(tmp_path / "model", {"eos_token_id": [2, 999_999]})

    async def body(found: Any) -> None:
        request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        assert (await found.client.post("/v1/chat/completions", json=request)).status_code == 200

    in_thread.run_with(monkeypatch, [f"gpt={model}"], body)


def test_a_constrained_answer_may_end_with_any_end_token(ask: Any, sentencepiece_dir: Path) -> None:
    """Where the expression may go on, the model says when it ends: by an end of a text or of a turn."""
    pytest.importorskip("llguidance", reason="needs llguidance")
    tokenizer = Tokenizer.load(sentencepiece_dir)

    async def body(found: Any) -> None:
        for name in ("</s>", "<|end|>"):
            bias = {str(tokenizer.vocab[name]): 100, str(tokenizer.vocab["x"]): 60}
            answer = await found.complete(
                prompt="hello", guided_regex="x+", logit_bias=bias, max_tokens=9, min_tokens=3
            )
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("xxx", "stop"), name

    ask(body)


def test_defaults_of_generation_config_hold_where_a_request_says_nothing(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not with the option that turns them off, which leaves OpenAI's own defaults."""
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    model = write_sentencepiece(tmp_path / "model", defaults)
    seen: list[Any] = []

    async def body(found: Any) -> None:
        served = found.server.catalogue.find("gpt")
        job = served.job
        monkeypatch.setattr(served, "job", lambda *given: seen.append(job(*given)) or seen[-1])
        await found.complete(prompt="hello", max_tokens=1, temperature=None)
        await found.complete(prompt="hello", max_tokens=1, temperature=0, top_k=-1, top_p=1)
        request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "min_p": 0.5}
        await found.client.post("/v1/chat/completions", json=request)
        response = await found.client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 1})
        assert response.json()["temperature"] == seen[-1].sampling.temperature

    def told(job: Any) -> tuple[float, ...]:
        sampling = job.sampling
        return (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.repetition_penalty,
            sampling.min_p,
        )

    in_thread.run_with(monkeypatch, [f"gpt={model}"], body)
    of_model = (0.6, 20, 0.95, 1.1)
    assert [told(job) for job in seen] == [
        (*of_model, 0),
        (0, 0, 1, 1.1, 0),
        (*of_model, 0.5),
        (*of_model, 0),
    ]
    seen.clear()
    in_thread.run_with(monkeypatch, [f"gpt={model}"], body, generation_config=False)
    assert [told(job) for job in seen] == [
        (1, 0, 1, 1, 0),
        (0, 0, 1, 1, 0),
        (1, 0, 1, 1, 0.5),
        (1, 0, 1, 1, 0),
    ]


def test_tokens_there_and_back_with_the_special_ones(ask: Any, theirs: tuple[Any, Any]) -> None:
    async def body(found: Any) -> None:
        async def post(path: str, **fields: Any) -> Any:
            return (await found.client.post(path, json=fields)).json()

        for text in (TEXT, "<|user|>\nhello"):
            for add in (True, False):
                told = await post("/tokenize", prompt=text, add_special_tokens=add)
                assert told["tokens"] == theirs[0](text, add_special_tokens=add).input_ids
        assert (await post("/tokenize", prompt=TEXT))["tokens"][0] == 1
        ids = theirs[0](TEXT).input_ids
        assert (await post("/detokenize", tokens=ids))["prompt"] == TEXT
        shown = await post("/detokenize", tokens=ids, skip_special_tokens=False)
        assert shown["prompt"] == theirs[0].decode(ids)

    ask(body)


def test_the_end_of_a_prompt_is_kept_behind_its_bos(ask: Any, theirs: tuple[Any, Any]) -> None:
    """As a tokenizer of transformers that cuts on the left: BOS counts, and stays."""
    tokenizer = theirs[0]
    text = "hello world the answer " * 80
    tokenizer.truncation_side = "left"

    async def body(found: Any) -> None:
        for last, kept in ((7, 7), (-1, 252)):
            ids = tokenizer(text, truncation=True, max_length=kept).input_ids
            assert len(ids) == kept and ids[0] == 1
            wanted = await found.complete(prompt=ids, max_tokens=4)
            cut = await found.complete(prompt=text, max_tokens=4, truncate_prompt_tokens=last)
            assert cut["choices"] == wanted["choices"] and cut["usage"]["prompt_tokens"] == kept

    ask(body)


def test_a_conversation_is_read_with_its_variables_and_calls(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`chat_template_kwargs`, `reasoning_effort` and earlier tool calls reach the template."""
    model = write_sentencepiece(tmp_path / "model")
    template = (
        "{{ bos_token }}{{ enable_thinking }} {{ reasoning_effort }}|"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}"
        "{{ call.function.name }}={{ call.function.arguments.items() | list }}{% endfor %}"
        "{{ m.tool_call_id }}|{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    messages = [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 4}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "content": "8", "tool_call_id": "c1"},
    ]
    expected = "False high|user:hello|assistant:add=[('x', 4)]now=[]|tool:8c1|"
    ids = Tokenizer.load(model).encode_prompt(expected).tolist()

    async def body(found: Any) -> None:
        served, seen = found.server.catalogue.find("gpt"), []
        job = served.job
        monkeypatch.setattr(served, "job", lambda *given: seen.append(job(*given)) or seen[-1])
        request = {"messages": messages, "max_tokens": 1, "reasoning_effort": "high"}
        request["chat_template_kwargs"] = {"enable_thinking": False}
        for fields in ({}, {"add_special_tokens": True}):  # whose BOS the template has put already
            answer = await found.client.post("/v1/chat/completions", json=request | fields)
            assert answer.status_code == 200, answer.text
            assert seen[-1].prompt_ids.tolist() == ids
        odd = request | {"chat_template_kwargs": {"turns": 1, "self": 2, "messages": []}}
        assert (await found.client.post("/v1/chat/completions", json=odd)).status_code == 200

    in_thread.run_with(monkeypatch, [f"gpt={model}"], body)
