"""Files of requests: answers in the order of the lines, equal to those of single commands, and a stopped run
goes on without answering anything twice.
"""

import json
from pathlib import Path

import pytest
from throughline.core.backend import BackendOptions
from throughline.core.errors import WrongUse
from throughline.inference.runtimes.sampling import Sampling
from throughline.inference.serving import offline
from throughline.inference.serving.generation import NO_IDS, Job, Sequence
from throughline.inference.serving.offline import continue_text, embed_file, embed_texts, generate_file

CPU = BackendOptions(device="cpu", threads=1)
PROMPTS = ["The quick", "jumps over the lazy dog", "", "again and", "x" * 2000, "The quick brown"]


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_is_answered_in_order(text_onnx: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "id": number} for number, prompt in enumerate(PROMPTS)]
    rows[1] |= {"samples": 2, "seed": 7, "temperature": 1.0, "max_tokens": 3}
    rows += [{"prompt": "a", "id": 6, "samples": 0}, {"prompt": "a", "id": 7, "top_k": 2.5}]
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    facts = generate_file(text_onnx, source, out, Job(NO_IDS, 8), CPU)
    assert (facts["lines"], facts["resumed"], facts["errors"]) == (8, 0, 3)
    found = lines(out)
    assert [row["id"] for row in found] == list(range(8)) and "fills the model's context" in found[4]["error"]
    assert [len(row.get("answers", [])) for row in found] == [1, 2, 1, 1, 0, 1, 0, 0]
    assert "samples" in found[6]["error"] and "top_k" in found[7]["error"]
    for number in (0, 3, 5):
        alone = "".join(d.text for _, d in continue_text(text_onnx, PROMPTS[number], Job(NO_IDS, 8), CPU))
        assert found[number]["answers"] == [alone]
    sampled = Sampling(temperature=1.0, seed=8)
    second = "".join(d.text for _, d in continue_text(text_onnx, PROMPTS[1], Job(NO_IDS, 3, sampled), CPU))
    assert found[1]["answers"][1] == second
    with pytest.raises(WrongUse, match="there is a file already"):
        generate_file(text_onnx, source, out, Job(NO_IDS, 8), CPU)


def test_a_line_whose_computing_fails_stops_no_other(
    gpt_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both answers of one line fail: it has one error, the others are answered."""
    accept = Sequence.accept

    def failing(sequence: Sequence, *rest):
        if sequence.job.max_tokens == 7:
            raise ValueError("not a number")
        return accept(sequence, *rest)

    monkeypatch.setattr(Sequence, "accept", failing)
    rows = [{"prompt": "a"}, {"prompt": "b", "max_tokens": 7, "samples": 2}, {"prompt": "c"}]
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    facts = generate_file(gpt_onnx, source, out, Job(NO_IDS, 4), CPU)
    assert facts["errors"] == 1 and [sorted({*row} - {*rows[1]}) for row in lines(out)] == [
        ["answers", "finish"],
        ["error"],
        ["answers", "finish"],
    ]


def test_a_misspelt_setting_is_told_once(
    gpt_onnx: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And carried along, as fields of the line's own are, of which nothing is said."""
    rows = [{"prompt": prompt, "temprature": 0, "title": "x"} for prompt in ("a", "b")]
    source, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    facts = generate_file(gpt_onnx, source, out, Job(NO_IDS, 2), CPU)
    said = capsys.readouterr().err
    assert said.count("'temprature'") == 1 and "did you mean temperature?" in said and "title" not in said
    assert facts["errors"] == 0 and [row["temprature"] for row in lines(out)] == [0, 0]


def test_a_stopped_run_goes_on(gpt_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS * 3])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    generate_file(gpt_onnx, source, whole, Job(NO_IDS, 6), CPU)
    partial = tmp_path / "out.jsonl.partial"

    class Stop(Exception):
        pass

    original = offline._generate

    def stopping(*arguments):
        for count, answer in enumerate(original(*arguments)):
            if count == 7:
                raise Stop
            yield answer

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(offline, "_generate", stopping)
        generate_file(gpt_onnx, source, out, Job(NO_IDS, 6), CPU)
    assert not out.exists()
    with open(partial, "ab") as file:
        file.write(b'9\t{"cut')  # by a crash
    with pytest.raises(WrongUse, match="of another model, input or setting"):
        generate_file(gpt_onnx, source, out, Job(NO_IDS, 7), CPU)
    facts = generate_file(gpt_onnx, source, out, Job(NO_IDS, 6), CPU)
    assert facts["resumed"] == 7 and out.read_bytes() == whole.read_bytes() and not partial.exists()


def test_embeddings_of_a_file(bert_dir: Path, tmp_path: Path) -> None:
    texts = ["A fox.", "The lazy dog jumps again.", "", "Over"]
    source = written(tmp_path / "in.jsonl", [{"text": text, "n": i} for i, text in enumerate(texts)])
    facts = embed_file(bert_dir, source, tmp_path / "out.jsonl", CPU)
    found = lines(tmp_path / "out.jsonl")
    assert facts["errors"] == 1 and "error" in found[2] and [row["n"] for row in found] == [0, 1, 2, 3]
    expected = embed_texts(bert_dir, [texts[i] for i in (0, 1, 3)], CPU)
    for row, vector in zip((found[0], found[1], found[3]), expected):
        assert row["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)


def test_a_long_text_is_embedded_by_its_beginning_when_asked(bert_dir: Path, tmp_path: Path) -> None:
    """Refused without `truncate`; with it the tail makes no difference, in a file and in a list."""
    beginning = "The lazy dog jumps again. " * 200
    source = written(tmp_path / "in.jsonl", [{"text": beginning}, {"text": beginning + "Over"}])
    assert embed_file(bert_dir, source, tmp_path / "refused.jsonl", CPU)["errors"] == 2
    assert embed_file(bert_dir, source, tmp_path / "out.jsonl", CPU, truncate=True)["errors"] == 0
    first, second = (row["embedding"] for row in lines(tmp_path / "out.jsonl"))
    assert first == pytest.approx(second, abs=1e-6)
    [listed] = embed_texts(bert_dir, [beginning], CPU, truncate=True)
    assert first == pytest.approx(listed.tolist(), abs=1e-6)


def test_a_bad_line_stops_nobody_else(gpt_onnx: Path, bert_dir: Path, tmp_path: Path) -> None:
    """No JSON, no text, a text that is none: each has its error in its place; a file of such lines alone is refused
    before anything runs.
    """
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt": "a"}\n\nno JSON\n{"text": "b"}\n{"prompt": 5}\n{"prompt": "c", "samples": 0}\n[1]\n'
    )
    facts = generate_file(gpt_onnx, source, tmp_path / "out.jsonl", Job(NO_IDS, 5), CPU)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["error" in row for row in rows] == [False, True, True, True, True, True] and rows[1]["line"] == 3
    assert facts["errors"] == 5 and facts["first_error"].startswith("record 2: this line is no JSON")
    found = embed_file(bert_dir, source, tmp_path / "vectors.jsonl", CPU, chunk=True)
    rows = [json.loads(line) for line in (tmp_path / "vectors.jsonl").read_text().splitlines()]
    assert found["errors"] == 5 and ["embedding" in row for row in rows].index(True) == 2
    source.write_text('{"text": "b"}\n')
    with pytest.raises(WrongUse, match="nothing to answer"):
        generate_file(gpt_onnx, source, tmp_path / "other.jsonl", Job(NO_IDS, 5), CPU)


def test_a_prompt_is_begun_and_an_answer_ended_as_transformers_does(
    sentencepiece_dir: Path, tmp_path: Path
) -> None:
    """BOS in front unless it is turned off, special tokens parsed, in a file of prompts too; the second end token that
    generation_config.json names ends an answer and is no text.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(sentencepiece_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(sentencepiece_dir).eval()
    prompts = ["hello world", "<|user|>\nhello<|end|>\n<|assistant|>"]
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    generate_file(sentencepiece_dir, source, out, Job(NO_IDS, 8), CPU)
    answered = [json.loads(line)["answers"][0] for line in out.read_text().splitlines()]
    for prompt, answer in zip(prompts, answered, strict=True):
        for add in (True, False):
            ids = theirs(prompt, add_special_tokens=add, return_tensors="pt").input_ids
            made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
            deltas = [
                delta
                for _, delta in continue_text(
                    sentencepiece_dir, prompt, Job(NO_IDS, 8), CPU, add_special_tokens=add
                )
            ]
            assert [delta.token.id for delta in deltas if delta.token] == made
            if add:
                assert "".join(delta.text for delta in deltas) == answer
    end = theirs.convert_tokens_to_ids("<|end|>")
    likely = Job(NO_IDS, 8, Sampling(temperature=0.0, logit_bias=((end, 100.0),)))
    (delta,) = [delta for _, delta in continue_text(sentencepiece_dir, "hello", likely, CPU)]
    assert (delta.token.id, delta.text, delta.finish) == (end, "", "stop")
