"""`eval --url`: the scores of a model behind a server are those of its directory, and what a server can do wrong is
said.
"""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from throughline.core.errors import Failed, WrongUse
from throughline.eval import endpoint
from throughline.eval.session import Request, evaluate_one

pytest.importorskip("openai")
RECORDS = {
    "openbookqa": {"query": "The fox", "choices": ["jumps", "sleeps a while", "barks"], "gold": 1},
    "triviaqa": {"context": "Question: Who jumps?\nAnswer:", "answer": "fox", "aliases": ["fox", "the fox"]},
    "lambada_openai": {"text": "A model reads text and says which word is likely"},
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A record of each task: several choices, a written answer, one word."""
    files = ("openbookqa/openbook_qa", "triviaqa/triviaqa_sm_sub", "lambada/lambada_test")
    for file, record in zip(files, RECORDS.values()):
        path = tmp_path / "data" / f"{file}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record) + "\n")
    return tmp_path / "data"


def test_scores_through_a_server_equal_the_directorys(
    gpt_dir: Path, data_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Log-probabilities within 1e-3 nats (another batch, another kernel), all else equal; asked again, no request is
    sent: the answers are stored.
    """
    asked = {"tasks": ",".join(RECORDS), "data_dir": data_dir, "window": 100}
    here, _ = evaluate_one(Request(gpt_dir, **asked, out=tmp_path / "here"))
    with in_thread.on_a_port_with(monkeypatch, [f"gpt={gpt_dir}"]) as (base, _):
        request = Request(
            Path("gpt"), **asked, out=tmp_path / "there", url=base, tokenizer=gpt_dir, against=str(gpt_dir)
        )
        there, _ = evaluate_one(request)
        assert max(there["against"]["largest_difference"].values()) < 1e-3
        with pytest.raises(WrongUse, match="no model 'absent'"):
            evaluate_one(Request(Path("absent"), **asked, url=base, model="absent", tokenizer=gpt_dir))
        monkeypatch.setattr(endpoint.Endpoint, "complete", lambda *_, **__: pytest.fail("asked again"))
        again, _ = evaluate_one(request)
    assert again == there
    for one, other in zip(here["tasks"], there["tasks"], strict=True):
        for name, metric in one["metrics"].items():
            assert metric["value"] == pytest.approx(other["metrics"][name]["value"], rel=1e-3), name
    texts = [
        [
            one
            for one in map(json.loads, (tmp_path / out / "scores" / "samples.jsonl").open())
            if one["task"] == "triviaqa"
        ]
        for out in ("here", "there")
    ]
    assert texts[0] == texts[1]


def test_a_long_text_loses_its_beginning() -> None:
    """Eight are read, and the last one is predicted alone, as of a directory."""
    reader = SimpleNamespace(of_prompt=lambda ids, last: (ids, last))
    scorer: Any = SimpleNamespace(window=8, reader=reader, of_tokens=lambda *found: found)
    assert endpoint.EndpointScorer._pair_score(scorer, tuple(range(10)), (10, 11)) == (tuple(range(3, 12)), 2)
    assert endpoint.EndpointScorer._pair_score(scorer, (0, 1), (2,)) == ((0, 1, 2), 1)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [(500, {}), (200, {"choices": [{"text": "", "index": 0, "logprobs": None}]})],
            "no log-probabilities",
        ),
        ([(401, {"error": {"message": "wrong key"}})], "wrong key"),
    ],
)
def test_a_server_that_cannot_is_named(
    answers: list[tuple[int, dict]],
    message: str,
    gpt_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A fault of the server is asked again; a server without log-probabilities of prompts and one that refuses the
    key end in one error of ours.
    """
    left = iter(answers)

    class Server(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "gpt", "object": "model", "max_model_len": 128}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*next(left))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    request = Request(
        Path("gpt"), "lambada_openai", limit=1, out=tmp_path, url=url, tokenizer=gpt_dir, clients=1
    )
    with pytest.raises(Failed, match="server") as caught:
        evaluate_one(request)
    server.shutdown()
    assert message in str(caught.value)
