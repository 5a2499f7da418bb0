"""Collections in BEIR's form: BEIR's rules, against trec_eval's definitions written out and pytrec_eval's numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.eval.beir import Collection, ranking, read_collection
from throughline.eval.search import VECTORS, WORDS, chosen_weight, score

DRAW = np.random.default_rng(3)


def trec_eval(run: dict[str, float], grades: dict[str, int]) -> dict[str, float]:
    """nDCG at 10 and recall as trec_eval computes them: by score, of equal ones the larger id first; gains are grades
    above zero; the ideal ranking and recall's denominator count every relevant document of the qrels.
    """
    order = sorted(run, key=lambda name: (run[name], name), reverse=True)
    gains = [max(grades.get(name, 0), 0) for name in order]
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    dcg = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:10], 1))
    best = sum(gain / math.log2(rank + 1) for rank, gain in enumerate(ideal[:10], 1))
    values = {"nDCG@10": dcg / best if best else 0.0}
    for most in (5, 10, 100):
        values[f"recall@{most}"] = sum(gain > 0 for gain in gains[:most]) / len(ideal) if ideal else 0.0
    return values


def write_collection(
    folder: Path, documents: dict[str, str], queries: dict[str, str], qrels: list[tuple[str, str, object]]
) -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        rows = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("keep", [False, True])
def test_the_scores_are_trec_eval_s_by_beir_s_rules(keep: bool) -> None:
    """Random collections with equal scores, grades from -1 to 3, judged documents that are not there and queries that
    are documents; every relevant document of a query counts.
    """
    for _ in range(20):
        names = [f"d{number}" for number in DRAW.permutation(130)]
        queries = {f"d{number}": f"text {number}" for number in range(4)} | {"q": "another"}
        judged = [*names[:12], "gone", "gone too"]
        grades = {query: dict(zip(judged, DRAW.integers(-1, 4, 14).tolist())) for query in queries}
        grades["q"] = {"d5": 0, "d6": -1}  # without a relevant document: zeros, and in the mean
        scores = {text: DRAW.integers(0, 40, 130).astype(np.float32) for text in queries.values()}
        collection = Collection({name: name for name in names}, queries, grades)
        expected = []
        for query, text in queries.items():
            run = dict(zip(names, scores[text].tolist()))
            if not keep:
                run.pop(query, None)
            expected.append(trec_eval(run, grades[query]))
        found = score(collection, scores.__getitem__, None, 0.2, keep)[WORDS]
        for metric, value in found.items():
            assert value == pytest.approx(np.mean([row[metric] for row in expected])), metric


def test_numbers_of_pytrec_eval() -> None:
    """Computed with pytrec_eval-terrier 0.5.7: a tie, a missing relevant document, a negative grade."""
    collection = Collection(
        dict.fromkeys("abc", ""),
        {"q1": "one", "q2": "two"},
        {"q1": {"a": 1, "zz": 2, "b": -1}, "q2": {"a": 1}},
    )
    scores = {"one": np.array([1.0, 1.0, 1.0]), "two": np.array([1.0, 1.0, 0.1])}
    found = score(collection, scores.__getitem__, None, 0.2)[WORDS]
    assert found["nDCG@10"] == pytest.approx((0.19004688335796713 + 0.6309297535714575) / 2)
    assert found["recall@5"] == pytest.approx((0.5 + 1.0) / 2)


def test_equal_scores_across_the_cut_go_by_id() -> None:
    names = [f"d{number:02d}" for number in range(30)]
    assert ranking(names, np.zeros(30), 3) == ["d29", "d28", "d27"]
    assert ranking(names, np.array([1.0, *np.zeros(29)]), 2) == ["d00", "d29"]
    assert ranking([], np.zeros(0), 3) == []


def test_the_query_s_own_document_sets_no_scale_and_no_weight() -> None:
    """It is left out before both scores are brought to [0, 1], and when queries choose the weight."""
    collection = Collection(dict.fromkeys("qab", ""), {"q": "q"}, {"q": {"a": 1}})
    words, vectors = np.array([100.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.9])
    assert chosen_weight(collection, lambda _: words, lambda _: vectors) == 0
    found = score(collection, lambda _: words, lambda _: vectors, 0.4)
    assert found["both"]["nDCG@10"] == 1 > found[VECTORS]["nDCG@10"]
    alone = Collection({"q": ""}, {"q": "q"}, {"q": {"a": 1}})  # nothing is left to find
    assert score(alone, lambda _: words[:1], lambda _: vectors[:1], 0.4)["both"]["recall@100"] == 0


def test_what_a_collection_lacks_is_counted_and_named(tmp_path: Path) -> None:
    """Judged documents that are missing stay in the qrels, missing queries do not; of an id twice the last counts."""
    folder = write_collection(
        tmp_path / "c",
        {"a": "one", "b": "two", "c": "one"},
        {"q": "text"},
        [("q", "a", 1), ("q", "x1", 2), ("q", "x2", "1.0"), ("r", "a", 1), ("q", "b", -1)],
    )
    with open(folder / "corpus.jsonl", "a") as file:
        file.write('{"_id": "b", "title": "a title", "text": "again"}\n')
    found = read_collection(folder)
    assert found.documents["b"] == "a title again" and list(found.documents) == ["a", "b", "c"]
    assert found.relevant == {"q": {"a": 1, "x1": 2, "x2": 1, "b": -1}} and found.queries == {"q": "text"}
    assert found.missing_documents == ("x1", "x2") and found.missing_queries == ("r",)
    said = "\n".join(found.warnings)
    assert "2 of 4 judged documents" in said and "(x1, x2): they count as not found" in said
    assert "1 of 2 queries" in said and "(r): they are left out" in said
    assert "1 documents" in said and "have the `_id` of an earlier one (b): the last one counts" in said
    assert "1 documents have the title and text of another (c)" in said


def test_the_rule_stands_under_the_table(tmp_path: Path) -> None:
    """The query's own document is left out and said; the option keeps it; the warnings are printed."""
    pytest.importorskip("bm25s")
    documents = {"d1": "the cat sat", "d2": "the cat sat on the mat", "d3": "a moon"}
    folder = write_collection(
        tmp_path / "c", documents, {"d1": "the cat sat"}, [("d1", "d2", 1), ("d1", "no", 1)]
    )
    done = CliRunner().invoke(main, ["search", str(folder)])
    assert done.exit_code == 0 and "1 queries have the id of a document: it is left out" in done.output
    assert "1 of 2 judged documents" in done.output and "--keep-identical-ids" in done.output
    assert "as an answer" not in done.output
    with open(folder / "qrels" / "test.tsv", "a") as file:
        file.write("d1\td1\t0\n")  # judged, and no answer
    found = json.loads(CliRunner().invoke(main, ["search", str(folder), "--json", "-q"]).stdout)
    assert found["identical_ids"] == found["missing_documents"] == 1 and not found["missing_queries"]
    assert found["scores"][WORDS]["recall@5"] == 0.5
    words = ["search", str(folder), "--json", "-q", "--keep-identical-ids"]
    kept = json.loads(CliRunner().invoke(main, words).stdout)
    assert kept["scores"][WORDS]["nDCG@10"] < found["scores"][WORDS]["nDCG@10"]


def test_the_forms_of_the_hub(tmp_path: Path) -> None:
    """MTEB's: qrels as .jsonl, tables as parquet in directories, `id`, numbers as ids, a score that is a float."""
    for name in ("corpus", "queries", "qrels"):
        (tmp_path / name).mkdir()
    rows = pyarrow.table({"id": ["1", "2"], "title": [None, "t"], "text": ["one", "two"]})
    pyarrow.parquet.write_table(rows, tmp_path / "corpus" / "test-00000-of-00001.parquet")
    (tmp_path / "queries" / "queries.jsonl").write_text('{"_id": 7, "text": "one"}\r\n')
    line = '{"query-id": 7, "corpus-id": 2, "score": 1.0}\n'
    (tmp_path / "qrels" / "test.jsonl").write_text(line)
    found = read_collection(tmp_path)
    assert found.documents == {"1": "one", "2": "t two"} and found.relevant == {"7": {"2": 1}}
    assert not found.warnings


def test_ids_that_were_numbered_apart_are_told(tmp_path: Path) -> None:
    """A query's only answer has its own id by accident: the rule leaves it out, and the warning says so."""
    pytest.importorskip("bm25s")
    folder = write_collection(tmp_path / "c", {"0": "the cat", "1": "a moon"}, {"0": "cat"}, [("0", "0", 1)])
    done = CliRunner().invoke(main, ["search", str(folder)])
    assert "1 queries have the document with their own id as an answer" in done.output
    assert (
        "as an answer" not in CliRunner().invoke(main, ["search", str(folder), "--keep-identical-ids"]).output
    )


def test_half_a_surrogate_pair_is_the_replacement_character(tmp_path: Path) -> None:
    """A text cut within an emoji holds half of its pair, which no tokenizer takes; a store replaces it too."""
    (tmp_path / "qrels").mkdir()
    corpus = '{"_id": "1", "title": "cut \\ud83d", "text": "half \\ude00 \\ud83d\\ude00"}\n'
    (tmp_path / "corpus.jsonl").write_text(corpus)
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "\\ud83d?"}\n')
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t1\n")
    collection = read_collection(tmp_path, "test")
    assert collection.documents == {"1": "cut \ufffd half \ufffd 😀"}
    assert collection.queries == {"q": "\ufffd?"}
