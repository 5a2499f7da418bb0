"""The commands as a user runs them: export, serve, generate, embed, bench latency."""

import json
import signal
import socket
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from throughline.cli.main import main

BERT_NORMALIZER = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
BERT_NORMALIZER |= {"strip_accents": None, "lowercase": False}


def run(*arguments: str | Path, text: str | bytes | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=text)
    return result.exit_code, result.stdout + result.stderr


def test_export_prints_parity_and_latency(bert_dir: Path, tmp_path: Path) -> None:
    code, text = run("export", bert_dir, "--to", "onnx", "--out", tmp_path / "out")
    assert code == 0, text
    for word in ("mlm_logits", "sentence_embedding", "p99 ms", f"throughline serve {tmp_path / 'out'}"):
        assert word in text
    code, text = run("export", bert_dir, "--to", "onnx", "--out", tmp_path / "out")
    assert code == 2 and "already exists" in text


def test_export_of_rounded_weights_asks_for_text(bert_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = ("export", bert_dir, "--out", out)
    code, text = run(*start, "--to", "onnx", "--precision", "int8", "--variant", "onnxruntime")
    assert code == 2 and "--text FILE" in text
    code, text = run(*start, "--to", "calibration")
    assert code == 2 and "needs text" in text
    code, text = run(*start, "--to", "onnx", "--opset", 16)
    assert code == 2 and "16" in text
    code, text = run(*start, "--to", "tensorrt-rtx", "--capability", "9.0")
    assert code == 2 and ("no compiler for compute capability 9.0" in text)
    code, text = run(*start, "--to", "tensorrt-rtx", "--batches", "8,1")
    assert code == 2 and "numbers from 1 on that grow" in text
    assert not out.exists()


def test_export_without_a_latency_table(gpt_dir: Path, tmp_path: Path) -> None:
    words = ("--to", "onnx", "--out", tmp_path / "out", "--no-bench", "--precision", "fp16", "--json")
    code, text = run("export", gpt_dir, *words)
    assert code == 0, text
    report = json.loads(text[text.index("{") :])
    assert report["latency"] == [] and report["precision"] == "fp16" and len(report["layers"]) == 2
    code, text = run("generate", tmp_path / "out", "--prompt", "The", "--max-tokens", 3)
    assert code == 0, text  # its caches are float16


def test_generate_continues_and_repeats_with_a_seed(gpt_onnx: Path) -> None:
    arguments = ("generate", gpt_onnx, "--prompt", "The quick", "--max-tokens", 30, "--seed", 3)
    code, text = run(*arguments)
    assert code == 0 and text.startswith("The quick") and len(text) > 12
    assert run(*arguments) == (code, text)
    code, several = run(*arguments, "--samples", 2, "--json")
    answers = json.loads(several)["answers"]
    assert text.strip("\n") == ("The quick" + answers[0]).strip("\n") and answers[0] != answers[1]
    code, text = run("generate", gpt_onnx, "--max-tokens", 1000, text="from standard input")
    assert code == 0 and text.startswith("from standard input")


def test_generate_says_what_is_wrong(bert_onnx: Path, gpt_onnx: Path) -> None:
    for arguments, message in (
        ((bert_onnx, "--prompt", "x"), "generating needs a GPT"),
        ((gpt_onnx, "--prompt", "long " * 500), "fills the model's context"),
        ((gpt_onnx, "--prompt", "x", "--top-p", 2), "top_p is out of range"),
        (("absent", "--prompt", "x"), "no such model"),
    ):
        code, text = run("generate", *arguments)
        assert code == 2 and message in text
        assert text.startswith("error:"), "the prompt stands before the message"


def test_serve_says_what_is_wrong_before_it_loads(tmp_path: Path) -> None:
    """What a user mistypes: a path, a file of TLS, the file of keys. Nothing is loaded for it."""
    (tmp_path / "my-gpt").mkdir()
    (tmp_path / "cert.pem").write_text("no certificate")
    model, cert, absent = tmp_path / "my-gpt", tmp_path / "cert.pem", tmp_path / "absent"
    for arguments, *messages in (
        ((tmp_path / "my-gtp",), "no such model", f"did you mean {model}?"),
        ((f"a={tmp_path / 'zzz'}",), "no such model", "check the spelling"),
        ((f"a={model}", f"a={model}"), "two models are called 'a'", "NAME=PATH"),
        ((model, "--tls-cert", cert), "TLS needs a certificate and its key", "give both"),
        ((model, "--tls-cert", cert, "--tls-key", absent), "--tls-key", f"{absent}' does not exist"),
        ((model, "--tls-cert", cert, "--tls-key", cert), f"where: {cert}", "TLS cannot begin", "PEM"),
        ((model, "--api-key-file", absent), "keys cannot be read", "No such file", "one key a line"),
        ((model, "--api-key-file", cert), f"where: {cert}:1", "word 2 of the line is no NAME=VALUE"),
        ((model, "--follow"), "no such option: --follow", "give --watch"),
    ):
        code, text = run("serve", *arguments, "--port", 0)
        assert code == 2 and "loading" not in text, text
        for message in messages:
            assert message in text


def test_a_file_that_is_no_model_is_said_to_be_none(gpt_onnx: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for path in (tmp_path / "notes.txt", gpt_onnx / "model.onnx"):
        code, text = run("generate", path, "--prompt", "x")
        assert code == 2 and "this file is no model" in text and "give its directory" in text


def test_generate_takes_bytes_that_are_no_text(gpt_onnx: Path) -> None:
    """From standard input and from an argument, which Python hands over with surrogates."""
    for arguments, given in ((("--prompt", "ab\udcff"), None), ((), b"ab\xff")):
        code, text = run("generate", gpt_onnx, "--max-tokens", 2, *arguments, text=given)
        assert code == 0 and text.startswith("ab\ufffd"), text


def test_embed_writes_a_line_per_text(bert_onnx: Path, tmp_path: Path) -> None:
    texts = ["A model", "the lazy dog jumps over the text", "A model"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    code, text = run("embed", bert_onnx, tmp_path / "in.txt", "--out", tmp_path / "out.jsonl")
    assert code == 0, text
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == texts
    vectors = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-4)
    code, text = run("embed", bert_onnx, "-", text=texts[1])
    assert code == 0 and json.loads(text)["embedding"] == pytest.approx(rows[1]["embedding"], abs=1e-4)


def test_embed_reads_lines_and_names_the_one_that_is_wrong(bert_onnx: Path, tmp_path: Path) -> None:
    """Unicode's separators and form feeds end no line; a missing directory is made; the message says which line it is
    about.
    """
    text = tmp_path / "in.txt"
    text.write_bytes("\ufeffA model\r\nreads\u2028text\x0cagain\n".encode() + b"\xff")
    out = tmp_path / "new" / "out.jsonl"
    code, said = run("embed", bert_onnx, text, "--out", out)
    assert code == 0, said
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [row["text"] for row in rows] == ["A model", "reads\u2028text\x0cagain", "\ufffd"]
    text.write_text("A model\n" + "word " * 100)
    code, said = run("embed", bert_onnx, text, "--out", tmp_path / "long.jsonl")
    assert code == 1 and "line 2: the text is longer than the model's context" in said


def test_bench_latency_prints_a_table(bert_onnx: Path, bert_dir: Path) -> None:
    code, text = run("bench", "latency", bert_onnx, bert_dir, "--seconds", 0.05)
    assert code == 0 and "onnxruntime" in text and "torch" in text and "p95 ms" in text
    code, text = run("bench", "latency", bert_onnx, "--seconds", 0.05, "--json")
    rows = json.loads(text)["latency"]
    assert {(row["batch"], row["tokens"]) for row in rows} == {(1, 32), (1, 63), (8, 32), (8, 63)}


def test_a_taken_port_is_one_clear_error(gpt_onnx: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run("serve", gpt_onnx, "--port", port)
    assert (
        code == 2
        and f"cannot listen on port {port}" in text
        and "address already in use" in text
        and "--port" in text
    )
    code, text = run("serve", gpt_onnx, "--port", 0, "--host", "192.0.2.1")  # of nobody: RFC 5737
    assert code == 2 and "--host" in text and "stop what is using it" not in text


def test_serve_answers_and_drains_on_sigterm(gpt_onnx: Path, bert_onnx: Path, start_server) -> None:
    """The real process: requests in flight when SIGTERM comes are answered whole, then it ends with 0."""
    with start_server(f"gpt={gpt_onnx}", f"bert={bert_onnx}", "--slots", "2", "--drain-wait", "0.2") as (
        process,
        base,
    ):

        def post(path: str, fields: dict) -> dict:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(base + path, json.dumps(fields).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        assert post("v1/fill-mask", {"input": "A [MASK] reads"})["data"][0]["candidates"]
        answers: list[dict] = []

        def ask() -> None:
            answers.append(
                post(
                    "v1/completions",
                    {"prompt": "x", "max_tokens": 120, "temperature": 0, "n": 8, "logit_bias": {"0": -100}},
                )
            )

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        while sum(json.load(urllib.request.urlopen(base + "ready"))["accepted"].values()) < 6 * 8 + 1:
            assert all(thread.is_alive() for thread in threads), (
                "answered before the signal: make the work longer"
            )
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert process.wait(60) == 0
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [8 * 120] * 6
        assert "draining" in "".join(process.said)


def test_embed_writes_the_form_that_is_named(bert_onnx: Path, tmp_path: Path) -> None:
    """Vectors as .npy, records with all their fields as .parquet; another form and markup are refused."""
    import pyarrow.parquet

    texts = ["A model", "the lazy dog"]
    table = tmp_path / "t.csv"
    table.write_text("id,body\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)))
    for name in ("v.npy", "v.parquet", "v.jsonl"):
        code, said = run("embed", bert_onnx, table, "--field", "body", "--out", tmp_path / name)
        assert code == 0, said
    vectors = np.load(tmp_path / "v.npy")
    kept = pyarrow.parquet.read_table(tmp_path / "v.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert (
        vectors.shape == (2, 48) and [row["body"] for row in kept] == [row["body"] for row in lines] == texts
    )
    np.testing.assert_allclose([row["embedding"] for row in kept], vectors, atol=1e-6)
    np.testing.assert_allclose([row["embedding"] for row in lines], vectors, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "v.jsonl", "v.npy", "v.parquet"]
    code, said = run("embed", bert_onnx, table, "--out", tmp_path / "v.csv")
    assert code == 2 and ".npy" in said
    (tmp_path / "p.html").write_text("<p>x</p>")
    code, said = run("embed", bert_onnx, tmp_path / "p.html")
    assert code == 2 and "markup" in said


def test_embed_keeps_a_row_for_every_line(bert_dir: Path, tmp_path: Path) -> None:
    """Blank lines, lines without a token and long ones keep their rows in every form, counted, with exit code 1; a line
    ends with LF, CRLF or CR alone.
    """
    import pyarrow.parquet

    model = tmp_path / "bert"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(bert_dir / name)
    tokenizer = json.loads((bert_dir / "tokenizer.json").read_text())
    tokenizer["normalizer"] = BERT_NORMALIZER  # which drops U+200B
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    lines = ["A model", "", "  ", "\u200b", "the lazy dog", "word " * 99, "reads\x0ctext"]
    source = tmp_path / "lines.txt"
    source.write_bytes("\n".join(lines).replace("\n", "\r", 1).replace("\n", "\r\n", 1).encode())
    good = [0, 4, 6]
    for form in ("npy", "parquet", "jsonl"):
        code, said = run("embed", model, source, "--out", tmp_path / f"v.{form}")
        assert code == 1 and "4 of 7 lines were refused" in said and "line 2: the text is empty" in said
        assert said.count("why:") == said.count("fix:") == 1 and "--truncate" in said
    array = np.load(tmp_path / "v.npy")
    assert array.shape == (7, 48) and [bool(row.any()) for row in array] == [i in good for i in range(7)]
    written = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet").to_pylist()
    assert [row["text"] for row in written] == [row["text"] for row in table] == lines
    assert [row.get("error") for row in written] == [row["error"] for row in table]
    for place in good:
        np.testing.assert_allclose(written[place]["embedding"], array[place], atol=1e-6)
        np.testing.assert_allclose(table[place]["embedding"], array[place], atol=1e-6)
    done = CliRunner().invoke(main, ["embed", str(model), str(source), "--prompt", "the "])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1 and ["embedding" in row for row in rows] == [i in good for i in range(7)]
    done = CliRunner().invoke(main, ["embed", str(model), str(source), "--json", "-q"])
    assert done.exit_code == 1 and len(json.loads(done.stdout)["embeddings"]) == 7
    source.write_text("\n\u200b\n")
    code, said = run("embed", model, source, "--out", tmp_path / "none.npy")
    assert code == 1 and "2 of 2 lines were refused" in said and not (tmp_path / "none.npy").exists()


def test_embed_keeps_a_row_for_every_record(bert_dir: Path, tmp_path: Path) -> None:
    """The vectors of a file of records stand at their records' places; the errors are kept beside them."""
    import pyarrow.parquet

    source = tmp_path / "in.jsonl"
    rows = [{"text": "word " * 99, "n": 0}, {"text": "A model", "n": 1}, {"text": None, "n": 2}]
    source.write_text("".join(json.dumps(row) + "\r" for row in rows))
    code, said = run("embed", bert_dir, source, "--out", tmp_path / "v.npy")
    assert code == 1 and "2 of 3 lines were refused" in said and said.count("fix:") == 1
    assert said.index("--truncate") < said.index("--chunk") < said.index("v.npy.jsonl")
    array = np.load(tmp_path / "v.npy")
    assert [bool(row.any()) for row in array] == [False, True, False]
    code, _ = run("embed", bert_dir, source, "--out", tmp_path / "v.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet").to_pylist()
    assert code == 1 and [row["n"] for row in table] == [0, 1, 2] and table[0]["embedding"] is None
    np.testing.assert_allclose(table[1]["embedding"], array[1], atol=1e-6)
    source.write_text(json.dumps({"doc": {"text": "A model"}}) + "\n")
    code, said = run("embed", bert_dir, source, "--field", "doc.text", "--out", tmp_path / "inside.npy")
    assert code == 0, said
    np.testing.assert_allclose(np.load(tmp_path / "inside.npy")[0], array[1], atol=1e-6)
    for words in (["--chunk", "--out", tmp_path / "c.npy"], ["--chunk"]):
        file = source if "--out" in words else tmp_path / "lines.txt"
        (tmp_path / "lines.txt").write_text("a\n")
        code, said = run("embed", bert_dir, file, *words)
        assert code == 2 and "several rows" in said


def test_a_refused_line_is_no_success(bert_onnx: Path, gpt_onnx: Path, tmp_path: Path) -> None:
    """The others are answered, and the first error is named; --truncate embeds the long one."""
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"text": "A model"}) + "\n" + json.dumps({"text": "word " * 99}) + "\n"
    )
    code, said = run("embed", bert_onnx, tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl")
    assert code == 1 and "1 of 2 lines were refused" in said and "longer than the model's context" in said
    assert "embedding" in json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    code, said = run("embed", bert_onnx, tmp_path / "in.jsonl", "--truncate", "--out", tmp_path / "all.jsonl")
    assert code == 0, said
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "a" * 2000 + '"}\n')
    code, said = run(
        "generate", gpt_onnx, tmp_path / "p.jsonl", "--max-tokens", 2, "--out", tmp_path / "g.jsonl"
    )
    assert code == 1 and "1 of 2 lines were refused" in said
