"""Search over the shipped paragraphs by docs/own-search.md's model: recall@5 beside an untrained BERT's and BM25's.

python benchmarks/search.py [--quick]

Runs the page's commands, then asks the 596 questions of the odd-numbered XQuAD paragraphs, none of which was
in the training pairs, over all 240 paragraphs; the same fine-tuning without pretraining is a row too.
Embeddings, BM25 (the library bm25s) and the score of both are those of `throughline search`; half of the questions
choose the weight of both for the others. A question is right when its paragraph is among the first five. The BERT
has seen a few novels and no web: that it loses to BM25 is no surprise, and stays in the table. `--quick` has the
page's commands read one novel and the first 40 paragraphs and pairs, train as `walk.py --quick` does, and asks 40
questions.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import claim, finish, parser, settings, throughline
from throughline.eval.beir import read_collection
from throughline.eval.search import BOTH, WORDS, by_embeddings, by_words, chosen_weight, score
from walk import ROOT, script, walk

DOCUMENTS = ROOT / "recipes" / "samples" / "xquad-en"
FIRST = 5
QUICK_LINES = 40  # of paragraphs, pairs and questions
QUICK_NOVEL = "Stevenson_Treasure_1883.txt.bz2"
UNTRAINED = {"train.steps": 1, "schedule.warmup_steps": 0, "optimizer.learning_rate": 1e-12}  # first values


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cut_samples(place: Path) -> Path:
    """Recipes for `walk` whose samples are the first lines of the paragraphs and pairs, and one novel; the
    directory of the paragraphs.
    """
    samples = place / "recipes" / "samples"
    documents, novels = samples / DOCUMENTS.name, samples / "novels"
    documents.mkdir(parents=True)
    novels.mkdir()
    for name in ("paragraphs.jsonl", "pairs.jsonl", "questions.jsonl"):
        lines = (DOCUMENTS / name).read_text().splitlines(keepends=True)
        (documents / name).write_text("".join(lines[:QUICK_LINES]))
    (novels / QUICK_NOVEL).symlink_to(DOCUMENTS.parent / "novels" / QUICK_NOVEL)
    return documents


def bm25(queries: list[str], passages: list[str]) -> np.ndarray:
    """Scores (queries, passages)."""
    return np.stack([*map(by_words(passages), queries)])


def cosines(model: Path, queries: list[str], passages: list[str]) -> np.ndarray:
    """Scores (queries, passages) of the embeddings; a passage's is that of its nearest chunk."""
    return np.stack([*map(by_embeddings(model, passages), queries)])


def recall(scores: np.ndarray, right: np.ndarray) -> float:
    """Share of the queries whose passage is among the first FIRST; ties count for the others."""
    own = scores[np.arange(len(right)), right][:, None]
    return float(((scores >= own).sum(1) <= FIRST).mean())


def finetuning(quick: bool) -> dict[str, str | Path]:
    """What the page's `throughline finetune` sets."""
    commands = script(ROOT / "docs" / "own-search.md", quick).replace("\\\n", "")
    command = re.search(r"^throughline finetune (.*)", commands, re.M)
    assert command is not None, commands
    return dict(re.findall(r"--set (\S+?)=(\S+)", command[1]))


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    questions = rows(DOCUMENTS / "questions.jsonl")[: QUICK_LINES if options.quick else None]
    queries, right = [row["query"] for row in questions], np.array([row["id"] for row in questions])
    if options.quick:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the commands: another benchmark has the other core
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        documents = cut_samples(place) if options.quick else DOCUMENTS
        passages = [row["text"] for row in rows(documents / "paragraphs.jsonl")]
        walk("own-search", place, options.quick)
        made = place / "runs" / "search"
        given = settings({"data.train": str(made / "tokens")} | UNTRAINED)
        throughline("train", "bert-novels-phase1", *given, "--run-dir", place / "untrained")
        again = finetuning(options.quick) | {
            "model.init_from": place / "untrained",
            "data.train": made / "pairs.jsonl",
        }
        changed = [word for name, value in again.items() for word in ("--set", f"{name}={value}")]
        throughline("finetune", "finetune-search", *changed, "--out", place / "fine-tuned")
        models = {
            "fine-tuned": made / "model",
            "fine-tuned without pretraining": place / "fine-tuned",
            "pretrained": made / "bert",
            "untrained": place / "untrained",
        }
        scores = {name: cosines(path, queries, passages) for name, path in models.items()}
        dev, test = (read_collection(made / "folder", split) for split in ("dev", "test"))
        words, vectors = by_words(passages), by_embeddings(made / "model", passages)
        weight = chosen_weight(dev, words, vectors)
        parts = score(test, words, vectors, weight)
        print(f"embeddings weighed {weight:g} as dev chose: {parts}")
    scores["BM25"] = bm25(queries, passages)
    found = {name: recall(each, right) for name, each in scores.items()}
    print(f"recall@{FIRST} of {len(queries)} questions over {len(passages)} paragraphs: {found}")
    how = {"unit": f"recall@{FIRST}", "better": "higher"}
    claims = [
        claim(
            f"search-over-{name.lower().replace(' ', '-')}",
            [found["fine-tuned"]],
            [max(found[name], 1e-9)],
            peer=name,
            goal=goal,
            **how,
        )
        for name, goal in (
            ("untrained", 2.0),
            ("pretrained", None),
            ("fine-tuned without pretraining", None),
            ("BM25", None),
        )
    ]
    both, alone = ([parts[way]["nDCG@10"]] for way in (BOTH, WORDS))
    claims.append(
        claim("hybrid-over-bm25", both, alone, peer="BM25", unit="nDCG@10", better="higher", goal=1.0)
    )
    details = {"recall": found, "questions": len(queries), "paragraphs": len(passages), "weight": weight}
    finish("search", claims, details=details | {"parts": parts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
