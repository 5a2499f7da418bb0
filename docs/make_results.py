"""Write docs/results.md, the headline table of README.md and the tables of docs/inference.md from
benchmarks/results/*.json.

Usage: python docs/make_results.py [--check]. With --check nothing is written; the exit code is 1 when a page is stale.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# What README.md shows: claim -> what was done, with the library that did it where it is not this package.
HEADLINES = {
    "bpe-fast-vs-datasets-map": "Text to tokens on disk, GPT-2's BPE (encoded by the library gigatoken)",
    "wordpiece-vs-tokenizers": "Text to tokens on disk, BERT's WordPiece (encoded by the library tokie)",
    "gpt-time-to-loss": "Small GPT trained to the loss that nanoGPT reaches",
    "gpt124-1024-vs-transformers": "GPT-2 124M trained, rows of 1,024 tokens",
    "eval-124m": "GPT-2 124M scored zero-shot, the same answers",
    "bert-int8-default": "BERT-Base reads a text of 128 tokens, int8 (computed by ONNX Runtime)",
    "gpt-vs-litserve": "Small GPT served to 32 clients at once (computed by ONNX Runtime)",
    "kill-restart": "Until a job trains again after one of its processes was killed",
}
# Benchmarks whose peer is a bound set beforehand or the program itself, not another program.
BOUNDS = ("checkpoints", "data_order", "faults", "gpu_check", "gpu_scale", "long_attention", "precision")
SECTIONS = {
    "Races": "Throughline and another program, in turn on the same machine and input, the peer at its best settings.",
    "Bounds": "Throughline against a bound that was set before the measurement, or against itself without a feature.",
    "Proofs": "Equalities of Throughline with itself, with formulas and with published tables; no peer is involved.",
}
COLUMNS = ("claim", "ratio (range)", "goal", "met", "Throughline", "peer")
MOST_RATIO = 10_000  # of a bound that was met exactly: nothing is divided by


@dataclass(frozen=True)
class Row:
    """One claim as it was measured on one machine."""

    benchmark: str
    claim: dict[str, Any]
    machine: str
    date: str

    @property
    def section(self) -> str:
        if self.benchmark.startswith("prove_") or "layout_proof" in self.benchmark:
            return "Proofs"
        return "Bounds" if self.benchmark in BOUNDS else "Races"

    @property
    def peer(self) -> str:
        """The peer without its settings."""
        return re.split(r", | \{| \(|; |: ", self.claim["peer"])[0]

    def cells(self) -> list[str]:
        claim = self.claim
        unit = claim["unit"].partition(",")[0]
        low, high = (f"{ratio:.2f}" for ratio in claim["spread"])
        ratio = f"{claim['ratio']:.2f}" + (f" ({low}-{high})" if low != high else "")
        return [
            claim["name"],
            ratio if claim["ratio"] < MOST_RATIO else f"over {MOST_RATIO:,}",
            "-" if claim["goal"] is None else f"{claim['goal']:.3g}",
            {True: "yes", False: "**no**", None: "-"}[claim["met"]],
            f"{_figure(claim['ours'])} {unit}",
            f"{_figure(claim['theirs'])} ({self.peer})",
        ]

    @property
    def measured(self) -> str:
        return f"{self.machine}, {self.date}"


def rows() -> list[Row]:
    """Every measured claim of every machine."""
    found = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for name, line in json.loads(file.read_text()).items():
            found += [Row(name, claim, machine_of(line), line["date"]) for claim in line["claims"]]
    return found


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def newest(found: list[Row]) -> list[Row]:
    """Of each claim the row that stands in every page: the one that was measured last (of one day: of the last file)."""
    last: dict[str, Row] = {}
    for row in found:
        if row.claim["name"] not in last or row.date >= last[row.claim["name"]].date:
            last[row.claim["name"]] = row
    return [*last.values()]


def machine_of(line: dict[str, Any]) -> str:
    """The machine of a benchmark's line, as the tables name it."""
    facts = line["machine"]
    cores = f"{facts['cores']} core{'s' * (facts['cores'] != 1)}"
    return f"{(facts['gpus'] or [facts['cpu']])[0]}, {cores}"


def results_page(found: list[Row]) -> str:
    """docs/results.md: a section for each kind of claim, a table for each benchmark."""
    lines = [
        "# Results",
        "",
        "Made by `make reference` from `benchmarks/results/`, by the script of `benchmarks/` that is named over each table.",
        "`make bench` measures the races again, `make bert-toy` and the `make prove-…` targets what has one of its own,",
        "`make bench-quick` every claim in small. A ratio is oriented so that larger is better for Throughline: the median of",
        "paired measurements, with their range. A goal that was not met stays in its table. Of each claim the newest",
        "measurement stands here, in README.md and in every other page; older ones, of other machines too, are folded below it.",
    ]
    for section, about in SECTIONS.items():
        lines += ["", f"## {section}", "", about]
        mine = [row for row in found if row.section == section]
        for benchmark in sorted({row.benchmark for row in mine}):
            every = [row for row in mine if row.benchmark == benchmark]
            shown = newest(every)
            lines += ["", f"### `{benchmark}.py`"]
            for measured in dict.fromkeys(row.measured for row in shown):
                rows = [row.cells() for row in shown if row.measured == measured]
                lines += ["", f"{measured}:", "", *_table(COLUMNS, rows)]
            lines += ["", *_folded("The peers' settings", _settings(shown))]
            before = [[*row.cells(), row.measured] for row in every if row not in shown]
            lines += _folded(f"Measured before: {len(before)} rows", _table((*COLUMNS, "measured"), before))
    return "\n".join(lines) + "\n"


def _settings(shown: list[Row]) -> list[str]:
    """What the tables leave out of the peers, once for all claims that share it."""
    claims: dict[str, list[str]] = {}
    for row in shown:
        if row.peer != row.claim["peer"]:
            claims.setdefault(row.claim["peer"], []).append(row.claim["name"])
    return [f"- {', '.join(names)}: {peer}" for peer, names in claims.items()]


def _folded(title: str, lines: list[str]) -> list[str]:
    """Lines that a click unfolds; nothing of none, and of a table without rows."""
    if len(lines) == 0 or lines[-1].startswith("| --- "):
        return []
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def headline_rows(found: list[Row]) -> Iterator[list[str]]:
    """README's rows: what was done, figure, peer and ratio, each from the machine that measured it last."""
    for name, about in HEADLINES.items():
        rows = [row for row in newest(found) if row.claim["name"] == name]
        if not rows:
            sys.exit(
                f"README's claim {name} stands in no record of benchmarks/results: measure it, or take it out of HEADLINES"
            )
        row = rows[0]
        claim, unit = row.claim, row.claim["unit"].partition(",")[0]
        values = (claim["ours"], claim["theirs"])
        ours, theirs = (f"{x:,.0f} {unit}" if x >= 1000 else f"{x:.3g} {unit}" for x in values)
        yield [about, ours, f"{theirs} ({row.peer})", f"{claim['ratio']:.1f}", row.machine]


def lines_of(benchmark: str) -> Iterator[dict[str, Any]]:
    """What a benchmark wrote on each machine that ran it."""
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        if (line := json.loads(file.read_text()).get(benchmark)) is not None:
            yield line


def latency_rows(found: list[Row]) -> Iterator[list[str]]:
    """docs/inference.md: what was measured, ours, the peer, the ratio, the goal; the share of that machine's
    bandwidth.
    """
    shares = {
        machine_of(line): line.get("details", {}).get("gpt_share_of_bandwidth", {})
        for line in lines_of("latency")
    }
    names = {
        "gpt-fp32-onnxruntime": "onnxruntime fp32", "gpt-int8-onnxruntime": "onnxruntime int8",
        "gpt-fp32": "llama.cpp f32", "gpt-quantised-q8_0": "llama.cpp q8_0", "gpt-quantised": "llama.cpp q4_0",
    }  # fmt: skip
    for row in newest(found):
        if row.benchmark == "latency":
            share = shares[row.machine].get(names.get(row.claim["name"], ""))
            yield [*row.cells(), "-" if share is None else f"{share:.0%}", row.measured]


def precision_rows() -> Iterator[list[str]]:
    """docs/inference.md: what each form of each trained model costs."""
    for line in lines_of("precision"):
        for name in ("gpt", "bert"):
            for form, row in line["details"].get(name, {}).items():
                contested = f"{row['contested']:.2%} of {row['contested_predictions']:,}"
                yield [
                    f"{name.upper()}, {form}",
                    f"{max(row['kl'], 0.0):.2g}",
                    f"{row['top1_agreement']:.2%}",
                    contested,
                    f"{row['loss']:.4f} ({row['torch_loss']:.4f})",
                ]


def block(name: str, text: str, header: tuple[str, ...], cells: list[list[str]]) -> str:
    """The text with a new table between the marks of this name."""
    begin, end = f"<!-- {name}: made by `make reference` -->", f"<!-- end of {name} -->"
    table = "\n".join([begin, *_table(header, cells), end])
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: table, text, flags=re.S)


def inference_page(found: list[Row]) -> str:
    """docs/inference.md with its two measured tables."""
    text = (ROOT / "docs" / "inference.md").read_text()
    columns = (*COLUMNS, "share of bandwidth", "machine, date")
    text = block("latency", text, columns, list(latency_rows(found)))
    columns = ("model, form", "mean KL", "top-1", "where right with p < 0.9", "loss (torch)")
    return block("precision", text, columns, list(precision_rows()))


def _table(header: tuple[str, ...], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]


def main() -> int:
    found = rows()
    columns = ("what", "Throughline", "peer", "ratio", "machine")
    readme = (ROOT / "README.md").read_text()
    made = {
        ROOT / "docs" / "results.md": results_page(found),
        ROOT / "docs" / "inference.md": inference_page(found),
        ROOT / "README.md": block("figures", readme, columns, list(headline_rows(found))),
    }
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" not in sys.argv:
        for path in stale:
            path.write_text(made[path])
        return 0
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
