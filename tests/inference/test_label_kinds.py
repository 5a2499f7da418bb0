"""Heads of several classes and of numbers, served and exported: what their outputs mean is what transformers says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from throughline.core.files import read_json
from throughline.data.tokenizer import Tokenizer
from throughline.inference.exports.export import export_onnx
from throughline.inference.graphs.parity import BOUNDS
from throughline.inference.graphs.real_text import compare_on_text, read_rows
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.source import open_model
from throughline.models.bert import Head
from throughline.models.config import MULTI_LABEL, REGRESSION, ProblemType
from throughline.models.huggingface import to_huggingface
from throughline.models.init import build_with_head

TEXTS = ["reads text", "The quick brown fox jumps", "dog"]
HEADS: dict[ProblemType, tuple[str, ...]] = {MULTI_LABEL: ("red", "green", "blue"), REGRESSION: ("score",)}


@pytest.fixture
def label_dirs(bert_dir: Path, tmp_path: Path) -> dict[str, Path]:
    """The BERT with a head of each kind, whose outputs are away from 0."""
    found = {}
    for problem, labels in HEADS.items():
        head = Head("sequence-classification", labels, problem)
        fields, state = to_huggingface(build_with_head(open_model(bert_dir).model, head, 3))
        state["classifier.weight"] = state["classifier.weight"] * 30
        found[problem] = directory = tmp_path / problem
        directory.mkdir()
        save_file(
            {name: value.contiguous() for name, value in state.items()}, directory / "model.safetensors"
        )
        (directory / "config.json").write_text(json.dumps(fields))
        (directory / "tokenizer.json").write_bytes((bert_dir / "tokenizer.json").read_bytes())
    return found


def test_outputs_are_served_as_what_they_are(
    label_dirs: dict[str, Path], in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of several classes each has the sigmoid of its logit, of a regression the number itself, from the directory and
    from the ONNX export; transformers reads the kind of head from the same config.json.
    """
    transformers = pytest.importorskip("transformers")
    served = []
    for problem, directory in label_dirs.items():
        export_onnx(directory, tmp_path / f"{problem}-onnx")
        assert read_json(tmp_path / f"{problem}-onnx" / "model.json")["head"]["problem"] == problem
        served += [f"{problem}={directory}", f"{problem}-onnx={tmp_path / f'{problem}-onnx'}"]
    tokenizer = Tokenizer.load(label_dirs[REGRESSION])
    framed = [[tokenizer.cls_id, *tokenizer.encode(text).tolist(), tokenizer.sep_id] for text in TEXTS]

    async def body(found) -> None:
        for problem, labels in HEADS.items():
            theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
                label_dirs[problem]
            ).eval()
            assert theirs.config.problem_type == problem and theirs.num_labels == len(labels)
            with torch.inference_mode():
                logits = [theirs(input_ids=torch.tensor([ids])).logits[0].double() for ids in framed]
            expected = [(row if problem == REGRESSION else row.sigmoid()).numpy() for row in logits]
            assert max(np.abs(row).max() for row in expected) > (1 if problem == REGRESSION else 0.6)
            for name in (problem, f"{problem}-onnx"):
                listed = (await found.client.get(f"/v1/models/{name}")).json()
                assert listed["problem_type"] == problem and tuple(listed["classes"]) == labels
                answer = await found.client.post("/v1/classify", json={"input": TEXTS, "model": name})
                for one, wanted in zip(answer.json()["data"], expected, strict=True):
                    np.testing.assert_allclose(one["probs"], wanted, atol=2e-3)
                    if problem == REGRESSION:
                        assert one["label"] == "score" and one["score"] == one["probs"][0]
                    else:
                        assert one["labels"] == [labels[i] for i in np.flatnonzero(wanted > 0.5)]
                        assert one["label"] == labels[int(wanted.argmax())]
        pairs = {"text_1": TEXTS[0], "text_2": TEXTS[1:], "model": REGRESSION}
        scores = [one["score"] for one in (await found.client.post("/v1/score", json=pairs)).json()["data"]]
        rows = [framed[0] + ids[1:] for ids in framed[1:]]
        with torch.inference_mode():
            for score, ids in zip(scores, rows, strict=True):
                types = [[0] * len(framed[0]) + [1] * (len(ids) - len(framed[0]))]
                logits = theirs(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor(types)).logits
                assert score == pytest.approx(logits.item(), abs=2e-3), "the number, no sigmoid of it"

    in_thread.run_with(monkeypatch, served, body)


def test_text_shows_a_difference_of_single_outputs(label_dirs: dict[str, Path], tmp_path: Path) -> None:
    """Each output is judged by itself: the softmax of one number is 1, whatever the number."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    for directory in label_dirs.values():
        rows = read_rows(text, directory / "tokenizer.json", 32)
        state = load_file(directory / "model.safetensors")
        reference = open_backend(directory)
        # alike for all classes: a softmax does not see it
        state["classifier.bias"] = state["classifier.bias"] + 1.5
        save_file(state, directory / "model.safetensors")
        bounds = BOUNDS["fp16"]
        assert compare_on_text(reference, reference, rows, bounds)["kl"] == 0
        report = compare_on_text(reference, open_backend(directory), rows, bounds)
        assert report["kl"] > 0.01 and not report["passed"]
