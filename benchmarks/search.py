"""Search over the shipped paragraphs by docs/own-search.md's model: recall@5 beside an untrained BERT's and BM25's.

python benchmarks/search.py [--quick]

Runs the page's commands, then asks the 596 questions of the odd-numbered XQuAD paragraphs, none of which was
in the training pairs, over all 240 paragraphs; the same fine-tuning without pretraining is a row too.
Embeddings are those of `throughline embed`. BM25 (Robertson and Zaragoza 2009, k1 = 1.5, b = 0.75) is written
here over lower-case words. A question is right when its paragraph is among the first five. The BERT has seen
a few novels and no web: that it loses to BM25 is no surprise, and stays in the table. `--quick` has the page's commands
read one novel and the first 40 paragraphs and pairs, train as `walk.py --quick` does, and asks 40 questions.
"""

import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from common import claim, finish, parser, settings, throughline
from walk import ROOT, script, walk

DOCUMENTS = ROOT / "recipes" / "samples" / "xquad-en"
FIRST = 5
K1, B = 1.5, 0.75
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
    for name in ("paragraphs.jsonl", "pairs.jsonl"):
        lines = (DOCUMENTS / name).read_text().splitlines(keepends=True)
        (documents / name).write_text("".join(lines[:QUICK_LINES]))
    (novels / QUICK_NOVEL).symlink_to(DOCUMENTS.parent / "novels" / QUICK_NOVEL)
    return documents


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def bm25(queries: list[str], passages: list[str]) -> np.ndarray:
    """Scores (queries, passages)."""
    counts = [Counter(words(text)) for text in passages]
    lengths = np.array([sum(count.values()) for count in counts])
    seen = Counter(word for count in counts for word in count)
    scores = np.zeros((len(queries), len(passages)))
    for place, query in enumerate(queries):
        for word in words(query):
            found = seen[word]
            rarity = math.log(1 + (len(passages) - found + 0.5) / (found + 0.5))
            times = np.array([count[word] for count in counts])
            scores[place] += rarity * times * (K1 + 1) / (times + K1 * (1 - B + B * lengths / lengths.mean()))
    return scores


def cosines(model: Path, queries: list[str], passages: list[str], place: Path, quick: bool) -> np.ndarray:
    """Scores (queries, passages) of the embeddings that `throughline embed` writes; with `quick` in one command."""
    files = {"all": queries + passages} if quick else {"queries": queries, "passages": passages}
    vectors = []
    for name, texts in files.items():
        file = place / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        out = place / f"{name}.embedded.jsonl"
        out.unlink(missing_ok=True)
        throughline("embed", model, file, "--truncate", "--out", out)
        vectors += [row["embedding"] for row in rows(out)]
    made = np.array(vectors)
    return made[: len(queries)] @ made[len(queries) :].T


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
        again = finetuning(options.quick) | {"model": place / "untrained", "data.train": made / "pairs.jsonl"}
        changed = [word for name, value in again.items() for word in ("--set", f"{name}={value}")]
        throughline("finetune", "finetune-search", *changed, "--out", place / "fine-tuned")
        models = {
            "fine-tuned": made / "model",
            "fine-tuned without pretraining": place / "fine-tuned",
            "pretrained": made / "bert",
            "untrained": place / "untrained",
        }
        found = {
            name: recall(cosines(path, queries, passages, place, options.quick), right)
            for name, path in models.items()
        }
    found["BM25"] = recall(bm25(queries, passages), right)
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
    finish(
        "search", claims, details={"recall": found, "questions": len(queries), "paragraphs": len(passages)}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
