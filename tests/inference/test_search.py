"""Search: metrics against a library and by hand, chunks that lose nothing, prompts, and a folder in BEIR's form."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import ndcg_score
from throughline.cli.main import main
from throughline.data.tokenizer import Tokenizer
from throughline.eval.beir import Collection, metrics
from throughline.eval.search import BOTH, VECTORS, WORDS, by_embeddings, by_words, chosen_weight, fused, score
from throughline.inference.serving.encoding import Reader
from throughline.inference.serving.offline import embed_texts

DRAW = np.random.default_rng(0)


def test_the_metrics_are_the_field_s() -> None:
    """nDCG at 10 of graded answers as scikit-learn has it, recall as a share of the answers."""
    for _ in range(20):
        grades, scores = DRAW.integers(0, 4, 30), DRAW.random(30)
        names = [str(number) for number in range(30)]
        order = [names[place] for place in np.argsort(-scores)]
        found = metrics(order, dict(zip(names, grades.tolist())))
        assert found["nDCG@10"] == pytest.approx(ndcg_score(grades[None], scores[None], k=10))
        answers = {name for name, grade in zip(names, grades) if grade}
        assert found["recall@5"] == pytest.approx(len(answers & set(order[:5])) / len(answers))
        assert found["recall@100"] == 1.0


def test_both_lie_between_their_parts() -> None:
    words, vectors = DRAW.random(20), DRAW.random(20)
    assert (np.argsort(fused(words, vectors, 0.0)) == np.argsort(words)).all()
    assert (np.argsort(fused(words, vectors, 1.0)) == np.argsort(vectors)).all()
    assert fused(np.zeros(3), np.array([1.0, 3, 2]), 0.3).argmax() == 1  # no word of the query is anywhere


def test_the_rarer_word_decides() -> None:
    pytest.importorskip("bm25s")
    scores = by_words(["the house and the garden", "the moor at night", "the town"])("the moor")
    assert scores.argmax() == 1 and scores.min() > 0  # "the" counts a little
    assert not by_words(["", "?"])("moor").any() and not by_words(["the moor"])("").any()  # no word at all


@pytest.mark.parametrize(
    "text", ["the cat sees a dog and a moon " * 40, "cat", "".join(DRAW.choice([*"abcdefgh"], 900))]
)
def test_chunks_hold_the_whole_text_and_fit(text: str, bert_dir: Path) -> None:
    """Every piece fits behind its prompt, and together with overlaps they hold every word in its order."""
    tokenizer = Tokenizer.load(bert_dir)
    reader = Reader(tokenizer, 24, tokenizer.vocab_size)
    pieces = reader.chunks(text, "say: ")
    for piece in pieces:
        reader.frame({"text": "say: " + piece})
    held, place = text.strip(), 0
    for piece in pieces:
        found = held.find(piece, max(place - len(piece), 0))
        assert 0 <= found <= place
        place = found + len(piece) + 1
    assert place >= len(held) and (len(pieces) == 1) == (text == "cat")


def test_a_folder_is_searched_by_words_by_embeddings_and_by_both(bert_dir: Path, tmp_path: Path) -> None:
    """A query that is its document is found first by each; a split and a document that are not there are named."""
    pytest.importorskip("bm25s")
    texts = ["the cat sees a dog", "a moon over the house " * 30, "my king is in the garden"]
    (tmp_path / "qrels").mkdir()

    def put(name: str, rows: list[dict]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    put("corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)])
    put("queries.jsonl", [{"_id": f"q{i}", "text": text} for i, text in enumerate(texts)])
    lines = "".join(f"q{i}\td{i}\t1\n" for i in range(3))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + lines)
    done = CliRunner().invoke(main, ["search", str(tmp_path), "--model", str(bert_dir), "--json", "-q"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["queries"] == found["documents"] == 3 and set(found["scores"]) == {WORDS, VECTORS, BOTH}
    assert all(each["nDCG@10"] == pytest.approx(1.0) for each in found["scores"].values())
    done = CliRunner().invoke(main, ["search", str(tmp_path), "--split", "dev"])
    assert done.exit_code == 2 and "dev.tsv" in done.output
    words = ["search", str(tmp_path), "--model", str(bert_dir), "--tune"]
    (tmp_path / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    done = CliRunner().invoke(main, [*words, "dev", "--json", "-q"])  # words alone find it: the least weight
    assert json.loads(done.stdout)["weight"] == 0
    assert CliRunner().invoke(main, [*words, "test"]).exit_code == 2  # those that choose cannot test


def test_the_chosen_weight_is_that_of_the_most_ndcg() -> None:
    """Words find the first query's document, embeddings the second's; both are found with weights between."""
    documents = {name: name for name in "abc"}
    collection = Collection(documents, {"x": "x", "y": "y"}, {"x": {"a": 1}, "y": {"b": 1}})
    words = {"x": np.array([1.0, 0.0, 0.0]), "y": np.array([0.0, 0.72, 1.0])}
    vectors = {"x": np.array([0.4, 0.0, 1.0]), "y": np.array([0.0, 1.0, 0.3])}
    weight = chosen_weight(collection, words.__getitem__, vectors.__getitem__)
    assert weight == pytest.approx(0.3)  # 0.28 (1 - w) < 0.7 w from 0.286 on
    found = score(collection, words.__getitem__, vectors.__getitem__, weight)
    assert found[BOTH]["nDCG@10"] == 1 > max(found[WORDS]["nDCG@10"], found[VECTORS]["nDCG@10"])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("qrels/test.tsv", "0 Q0 1 1\n", "no query is asked"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n0\t0\n", "cells: 2; columns: 3"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n0\t0\tone\n", "'one' is no whole number"),
        ("qrels/test.tsv", "query-id\tcorpus-id\tscore\n7\t0\t1\n", "none of its 1 queries is in"),
        ("corpus.jsonl", '{"name": 0, "text": "a"}\n', "no `_id`"),
    ],
)
def test_a_broken_folder_is_told_with_its_line(name: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    for file in ("corpus.jsonl", "queries.jsonl"):
        (tmp_path / file).write_text('{"_id": 0, "text": "a"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n")
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(main, ["search", str(tmp_path)])
    assert done.exit_code in (1, 2) and told in done.output and Path(name).name in done.output


def test_documents_and_queries_without_a_token_are_no_error(bert_dir: Path) -> None:
    """Collections have empty documents: they have no direction, so their cosine with any query is 0."""
    search = by_embeddings(bert_dir, ["the cat", "", " \n", "a moon"])
    scores = search("the cat")
    assert scores[0] == pytest.approx(1, abs=1e-5) and scores[1] == scores[2] == 0
    assert not search("").any()


def test_chunks_and_prompts_are_embedded(bert_dir: Path, tmp_path: Path) -> None:
    """A row for each chunk, whose vector is that of its text behind the prompt."""
    rows = [{"id": 7, "text": "a moon over the house " * 40}, {"id": 8, "text": "cat"}]
    source, out = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["embed", str(bert_dir), str(source), "--out", str(out), "--chunk", "--prompt", "the "]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["chunk"] for row in found if row["id"] == 7] == list(range(len(found) - 1)) and len(found) > 3
    vectors = embed_texts(bert_dir, ["the " + row["text"] for row in found])
    np.testing.assert_allclose([row["embedding"] for row in found], vectors, atol=1e-5)
