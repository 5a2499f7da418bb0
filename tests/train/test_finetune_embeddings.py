"""Retrieval trains the embeddings that `throughline embed` gives, and ranks a passage by its place among all."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from finetune_cases import DRAW, WORDS, recipe_for, task_for, write_records
from safetensors.torch import load_file, save_file
from throughline.models.sentence import MEAN, Sentence, read_sentence
from throughline.train.checkpoints.weights_in import open_weights
from throughline.train.finetune.run import finetune


@pytest.mark.parametrize("sentence", [MEAN, Sentence("cls", longest=5, prompt="who ")])
def test_embeddings_trained_are_embeddings_given(
    bases: dict[str, Path], tmp_path: Path, sentence: Sentence
) -> None:
    """What the loss compares is what `throughline embed` gives, of the base and of the model that was tuned."""
    from throughline.inference.serving.offline import embed_texts

    base = shutil.copytree(bases["bert"], tmp_path / "base")
    sentence.write(base, 32, 32)
    task = task_for("retrieval", bases, pair_field="b")
    task.sentence, (model, _) = read_sentence(base), open_weights(base)
    texts = ["the cat likes a dog", "the moon"]
    with torch.no_grad():
        (answer,) = task.answers(model.hidden, [{"text": texts[0], "b": texts[1]}], torch.device("cpu"))
    vectors = task.vectors(*answer)
    assert np.abs(vectors.numpy() - embed_texts(base, texts, truncate=True)).max() < 1e-5
    records = write_records("retrieval", tmp_path, 20)
    recipe = recipe_for("retrieval", {"bert": base}, records, epochs=1, batch_rows=4)
    finetune(recipe, tmp_path / "out")
    assert read_sentence(tmp_path / "out") == read_sentence(base)
    bare = json.loads((base / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (base / "config.json").write_text(json.dumps(bare))
    state = {n: v for n, v in load_file(base / "model.safetensors").items() if not n.startswith("cls.")}
    save_file(state, base / "model.safetensors")
    finetune(recipe, tmp_path / "bare")
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"] == ["BertModel"]


def test_the_rank_of_a_passage_is_its_place_among_all(bases: dict[str, Path]) -> None:
    """Counted plainly: 1 for the nearest of the different passages. Some queries share theirs."""
    task, cpu = task_for("retrieval", bases, pair_field="b"), torch.device("cpu")
    model, _ = open_weights(bases["bert"])
    passages = [" ".join(DRAW.choice(WORDS, 4)) for _ in range(12)]
    records = [{"text": " ".join(DRAW.choice(WORDS, 3)), "b": passages[i % 12]} for i in range(20)]
    with torch.no_grad():
        found = task.measure(model, records, cpu)
        (answer,) = task.answers(model.hidden, records, cpu)
    vectors = task.vectors(*answer).numpy()
    ranks = []
    for number, record in enumerate(records):
        likeness = {other["b"]: vectors[2 * number] @ vectors[2 * i + 1] for i, other in enumerate(records)}
        ranks.append(sorted(likeness, key=lambda text: -likeness[text]).index(record["b"]) + 1)
    assert found["passages"] == 12 and max(ranks) > 1
    assert found["accuracy_at_1"] == pytest.approx(np.mean(np.array(ranks) == 1))
    assert found["accuracy_at_10"] == pytest.approx(np.mean(np.array(ranks) <= 10))
    assert found["mean_reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(ranks)))
