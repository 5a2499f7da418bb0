"""`throughline bench serve` against our own server: what it counts is what was sent and answered."""

import http.server
import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.inference.serving.accounts import ServerLimits, Telemetry
from throughline.inference.serving.catalogue import Catalogue
from throughline.inference.serving.keys import Key
from throughline.inference.serving.load import Target, load, seeded, waits
from throughline.inference.serving.server import Server, build_app


def test_a_load_counts_what_was_answered(
    gpt_onnx: Path, bert_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bodies = [
        {"prompt": "The quick", "max_tokens": count, "temperature": 0, "logit_bias": {"0": -100}}
        for count in (3, 40)  # of which not all come in one read, however busy the machine
    ]
    (tmp_path / "bodies.jsonl").write_text("\n".join(map(json.dumps, bodies)))
    with in_thread.on_a_port_with(monkeypatch, [f"gpt={gpt_onnx}", f"bert={bert_onnx}"]) as (base, _):

        def bench(*words: str) -> dict:
            done = CliRunner().invoke(main, ["bench", "serve", base, "--json", *words])
            assert done.exit_code == 0, done.output
            return json.loads(done.stdout)

        found = bench(
            "--input",
            str(tmp_path / "bodies.jsonl"),
            "--requests",
            "10",
            "--clients",
            "1,4",
            "--plot",
            str(tmp_path / "p.html"),
        )
        assert found["model"] == "gpt" and [row["clients"] for row in found["load"]] == [1, 4]
        for row in found["load"]:
            seconds = row["answered"] / row["requests_per_s"]
            assert row["answered"] == 10 and row["not"] == {}
            assert row["generated_per_s"] * seconds == pytest.approx(5 * (3 + 40))
            assert (
                0 < row["first_p50_ms"] <= row["total_p50_ms"] <= row["total_p99_ms"]
                and row["gap_p99_ms"] > 0
            )
        assert (tmp_path / "p.html").read_text().count('class="plot"') == 4
        embedded = bench(
            "--endpoint", "embeddings", "--prompt-words", "3-9", "--requests", "6", "--clients", "2"
        )
        assert embedded["model"] == "bert" and embedded["load"][0]["answered"] == 6
        assert embedded["load"][0]["first_p50_ms"] is None
        # no ranges: what is made fits the model's context
        made = bench("--requests", "8", "--clients", "2", "--model", "gpt")
        assert made["load"][0]["answered"] == 8 and made["load"][0]["first_error"] is None
        words = ["--requests", "8", "--clients", "2", "--prompt-words", "1-60", "--max-tokens", "1-150"]
        told = CliRunner().invoke(main, ["bench", "serve", base, *words])
        assert told.exit_code == 0 and "requests failed, the first with: " in told.stderr, told.output
        assert "context" in told.stderr
    refused = CliRunner().invoke(main, ["bench", "serve", base])
    assert refused.exit_code == 2 and "does not list its models" in refused.output
    assert CliRunner().invoke(main, ["bench", "serve", base, "--clients", "0"]).exit_code == 2


def test_a_wrong_key_is_told_by_the_server(in_thread) -> None:
    """What the server answers is the reason that is shown."""
    app = build_app(Server(Catalogue([]), ServerLimits(), Telemetry()), keys=[Key.of("sesame")])
    with in_thread.on_a_port(app) as (host, port):
        told = CliRunner().invoke(main, ["bench", "serve", f"http://{host}:{port}"])
    assert told.exit_code == 2 and "401: a valid API key is needed" in told.output
    assert "--api-key-variable" in told.output


def test_a_kept_connection_that_the_server_closes_is_opened_again() -> None:
    """Each answer is the last of its connection, and the client is not told."""

    class Closing(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = Target(f"http://127.0.0.1:{server.server_port}", "completions", "any")
        seen, _ = load(target, seeded("completions", 6, 0, (1, 3), (1, 3)), 2)
        server.shutdown()
    assert [(one.status, one.error, one.generated) for one in seen] == [(200, "", 3)] * 6


def test_made_requests_depend_on_the_seed_alone() -> None:
    one, same, other = (seeded("completions", 20, seed, (3, 9), (1, 5)) for seed in (1, 1, 2))
    assert one == same != other
    assert all(3 <= len(ask["prompt"].split()) <= 9 and 1 <= ask["max_tokens"] <= 5 for ask in one)


def test_events_of_one_read_share_its_wait() -> None:
    """Three events that came 30 ms after the first, in one read, took 10 ms each; what came with the first, nothing."""
    times_s = [1.0, 1.00001, 1.03, 1.03002, 1.03003, 1.05]
    assert waits(times_s) == pytest.approx([0.01, 0.01, 0.01, 0.02], rel=0.01)
    assert waits([1.0]) == waits([]) == []
