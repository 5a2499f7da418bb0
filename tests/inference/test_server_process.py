"""The server as processes: HTTP apart from the model, deaths, drains, deadlines, TLS."""

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from throughline.inference.serving import listen


def call(
    base: str, path: str, body: dict | None = None, context: ssl.SSLContext | None = None
) -> tuple[int, dict]:
    """Status and body of a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(process.pid).children() if "worker" in " ".join(child.cmdline())
    ]


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


LONG = {"prompt": "x", "max_tokens": 150, "temperature": 0, "model": "gpt", "logit_bias": {"0": -100}}


@pytest.mark.slow
def test_a_model_that_stands_still_or_dies_takes_no_one_with_it(gpt_onnx: Path, start_server) -> None:
    """Stopped: health checks go on. Killed: its requests are answered with an error, a new one serves."""
    with start_server(f"gpt={gpt_onnx}", "--slots", "1") as (process, base):
        (first,) = workers(process)
        first.suspend()
        answers: list[tuple[int, dict]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(call(base, "v1/completions", LONG)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: call(base, "ready")[1]["accepted"]["gpt"] == 3)
        assert call(base, "health") == (200, {"status": "ok"}) and not answers
        first.kill()
        for thread in threads:
            thread.join(60)
        assert [status for status, _ in answers] == [500] * 3
        assert all("the process of the model ended" in body["error"]["message"] for _, body in answers)
        assert call(base, "ready")[0] == 503 or workers(process)[0].pid != first.pid
        status, body = call(base, "v1/completions", LONG)
        assert status == 200 or "starting again" in body["error"]["message"]
        wait_until(lambda: call(base, "ready")[0] == 200)
        assert call(base, "v1/completions", LONG)[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_model_behind(gpt_onnx: Path, start_server) -> None:
    with start_server(f"gpt={gpt_onnx}") as (process, _):
        (worker,) = workers(process)
        process.kill()
        process.wait()
        worker.wait(60)


@pytest.mark.slow
def test_a_server_whose_watcher_has_gone_serves_on_and_drains(gpt_onnx: Path) -> None:
    """Nobody reads stderr any more: neither an access-log line nor a message of the drain may stop it."""
    words = ["-m", "throughline.cli.main", "serve", f"gpt={gpt_onnx}", "--port", "0", "--drain-wait", "0.1"]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    try:
        line = ""
        while "serving" not in line:
            line = process.stderr.readline()
        base = json.loads(line)["message"].split(" at ")[1]
        process.stderr.close()
        assert call(base, "v1/completions", LONG)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_onnx_graphs_are_served_without_torch(
    gpt_onnx: Path, bert_onnx: Path, start_server, tmp_path: Path
) -> None:
    """What the image for serving alone leaves out of our dependencies, torch among it, fails to be imported in
    both processes.
    """
    root = Path(listen.__file__).parents[2]
    needed = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    absent = {re.match("[a-z-]+", line)[0] for line in needed} - set(
        (root / "containers" / "serve.txt").read_text().split()
    )
    assert {"torch", "datasets"} < absent
    for name in absent:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(f"raise ImportError('{name} is not here')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    models = (f"gpt={gpt_onnx}", f"bert={bert_onnx}", "--backend", "onnxruntime")
    with start_server(*models, PYTHONPATH=path) as (_, base):
        greedy = {"model": "gpt", "prompt": "the quick", "max_tokens": 8, "temperature": 0, "logprobs": 2}
        status, body = call(base, "v1/completions", greedy)
        assert status == 200 and len(body["choices"][0]["logprobs"]["tokens"]) == 8
        drawn = greedy | {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5}
        status, body = call(base, "v1/completions", drawn | {"echo": True, "n": 2})
        assert status == 200 and len(body["choices"]) == 2
        assert call(base, "v1/embeddings", {"model": "bert", "input": ["The fox", "a dog"]})[0] == 200
        assert call(base, "v1/fill-mask", {"model": "bert", "input": "The quick [MASK]"})[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_connections_made_before_the_port_closes_are_taken_up() -> None:
    """A connection that the kernel made and nobody accepted yet is served; one that begins later is not made,
    and so is refused by the closed port instead of being reset.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        early = [socket.create_connection(address) for _ in range(5)]
        listen.refuse_new(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        for client in early:
            client.sendall(b"question")
            server, _ = listener.accept()
            server.sendall(b"answer to " + server.recv(100))
            assert client.recv(100) == b"answer to question"
            server.close()
            client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


@pytest.mark.slow
def test_sigterm_under_load_loses_no_request(gpt_onnx: Path, start_server) -> None:
    """Eight clients ask without a pause, as behind a load balancer that goes on until the port is closed:
    every connection that was taken is answered, 200 and whole; /ready says 503 while requests are taken.
    """
    with start_server(f"gpt={gpt_onnx}", "--slots", "4", "--drain-wait", "1.5") as (process, base):
        outcomes: list[str] = []

        def client() -> None:
            while True:
                try:
                    status, body = call(base, "v1/completions", LONG | {"max_tokens": 20})
                except urllib.error.URLError as error:
                    if isinstance(error.reason, ConnectionRefusedError):
                        return  # the port has closed
                    outcomes.append(repr(error.reason))
                    return
                except (http.client.HTTPException, OSError) as error:
                    outcomes.append(repr(error))
                    return
                whole = status == 200 and body["usage"]["completion_tokens"] == 20
                outcomes.append("whole" if whole else f"{status} {body}")

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(outcomes) > 16)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: call(base, "ready")[0] == 503, 1)
        before = len(outcomes)
        wait_until(lambda: len(outcomes) > before + 8, 5)  # still taken
        for thread in threads:
            thread.join(60)
        assert process.wait(60) == 0
        assert set(outcomes) == {"whole"}
        assert "draining" in "".join(process.said)


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_ends_the_command(tmp_path: Path, gpt_dir: Path) -> None:
    """With the model's own error and exit code, and nothing left running."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((gpt_dir / "config.json").read_text())
    words = ["-m", "throughline.cli.main", "serve", str(broken), "--port", "0"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode in (1, 2, 3) and "error: " in ended.stderr and "Traceback" not in ended.stderr
    assert "serving" not in ended.stderr


@pytest.mark.slow
def test_tls_and_keys_from_the_command_line(gpt_onnx: Path, start_server, tmp_path: Path) -> None:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    words += " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    made = subprocess.run(words.split(), cwd=tmp_path, capture_output=True)
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    (tmp_path / "keys").write_text("# of the test\nsesame\n")
    options = ("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    with start_server(f"gpt={gpt_onnx}", *map(str, options), "--api-key-file", str(tmp_path / "keys")) as (
        _,
        base,
    ):
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        assert base.startswith("https://") and call(base, "health", context=context)[0] == 200
        assert call(base, "v1/models", context=context)[0] == 401


@pytest.mark.slow
def test_ten_times_too_many_requests_are_answered_or_refused(gpt_onnx: Path, start_server) -> None:
    """A minute of ten times as many requests as can be answered, of ten times as many clients as places: 200 or 429
    and nothing else, accepted answers whole and in bounded time (the goal is twice the p99 of a full queue, on a
    machine that does nothing else; here eighty clients share its cores), the server's memory grows by less than
    200 MB, and five seconds later a single request is answered as before.
    """
    limits = ("--slots", "2", "--queue", "6", "--no-access-log")
    with start_server(f"gpt={gpt_onnx}", *limits) as (process, base):

        def memory() -> int:
            tree = [psutil.Process(process.pid), *workers(process)]
            return sum(one.memory_info().rss for one in tree)

        body = (
            LONG  # long enough that ten times the answers' rate is a rate that clients in Python can ask at
        )
        expected = call(base, "v1/completions", body)[1]["choices"][0]["token_ids"]

        def hurl(clients: int, seconds: float, rest_s: float = 1.0) -> tuple[Counter[str], float]:
            """Outcomes by name, and the p99 of accepted ones in seconds."""
            outcomes, took_s, end = Counter[str](), list[float](), time.monotonic() + seconds

            def client() -> None:
                while time.monotonic() < end:
                    began_s = time.monotonic()
                    status, answer = call(base, "v1/completions", body)
                    if status == 200:
                        took_s.append(time.monotonic() - began_s)
                        same = answer["choices"][0]["token_ids"] == expected
                        outcomes["whole" if same else "wrong"] += 1
                    else:
                        outcomes[str(status)] += 1
                        time.sleep(rest_s)

            threads = [threading.Thread(target=client) for _ in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds + 30)
            return outcomes, float(np.percentile(took_s, 99))

        full, full_p99_s = hurl(8, 10)  # as many clients as places: 2 slots and 6 in the queue
        before = memory()
        rate = full["whole"] / 10
        over, over_p99_s = hurl(80, 60, rest_s=72 / (9 * rate))  # those who are refused make nine tenths
        assert over["429"] > 5 * over["whole"]  # nine, less what their connections take
        assert set(full) == {"whole"} and set(over) == {"whole", "429"} and over["whole"] > 20
        print(f"p99 at ten times too many {over_p99_s:.3f} s, at a full queue {full_p99_s:.3f} s")
        assert over_p99_s <= 4 * full_p99_s, (over_p99_s, full_p99_s)
        assert memory() - before < 200e6
        time.sleep(5)
        assert call(base, "ready")[1]["queued"] == {"gpt": 0}
        assert call(base, "v1/completions", body)[1]["choices"][0]["token_ids"] == expected
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
