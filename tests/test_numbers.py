"""No number without its origin: what README and docs state in figures was generated from an artifact, is quoted with
its source, or stands in numbers_exempt.txt with a reason.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXEMPT = Path(__file__).with_name("numbers_exempt.txt")
MOST_EXEMPTIONS = 20
GENERATED = {"cli.md", "recipe.md", "task-file.md", "results.md", "reproductions.md", "planning.md"}
JOURNAL = "journal.md"  # a diary of measurements, each with its command

UNIT = (
    r"(?:%|x\b|times\b|(?:n|u|m)?s\b|seconds?\b|min(?:utes?)?\b|h\b|hours?\b|days?\b|[KMGTP]i?B\b|bytes?\b|"
    r"[kKMGTP]?(?:tokens|rows|requests)/s|[GTP]?FLOPS?\b|[GT]FLOP/s|Gb/s|GB/s|nats\b|"
    r"(?:million|billion|trillion)\b)"
)
NUMBER = r"(?<![\w.#/-])\d[\d,]*(?:\.\d+)?"
WITH_UNIT = re.compile(rf"{NUMBER}\s?{UNIT}")
IN_TABLE = re.compile(rf"{NUMBER}(?![\w.-]*\w)")
# a paper or a page, a program that measures, a file of results, a test that keeps a bound
SOURCE = re.compile(
    r"et al\.|arXiv|https?://|\b(?:19|20)\d\d\b|`(?:python )?(?:benchmarks|tests|planner/published)/[\w./]+|"
    r"`make (?:bench|prove|reproduce|bert)[\w-]*|\bTable \d|mlcommons|NVIDIA/|google-research/"
)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(heading, block) for each paragraph and table, without code, inline code, generated parts and links' targets."""
    text = re.sub(r"<!-- (\w+): made by.*?<!-- end of \1 -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    heading = ""
    for block in re.split(r"\n\s*\n", text):
        lines = []
        for line in block.splitlines():
            if line.startswith("#"):
                heading = line.strip("# ")
            elif not line.startswith("    "):
                lines.append(line)
        if lines:
            yield heading, "\n".join(lines)


def numbers(block: str) -> list[str]:
    """The figures of a block: with a unit anywhere, any in a table's cells."""
    bare = re.sub(r"`[^`]*`", " ", block)
    bare = re.sub(r"\]\([^)]*\)", "]", bare)
    pattern = IN_TABLE if block.lstrip().startswith("|") else WITH_UNIT
    return [found.group(0) for found in pattern.finditer(bare)] or (
        [found.group(0) for found in WITH_UNIT.finditer(bare)] if pattern is IN_TABLE else []
    )


def unsourced(page: Path) -> list[tuple[str, str, list[str]]]:
    """(heading, block, figures) of what has figures and no source; a table's may stand in the paragraph before it or
    after it.
    """
    found, all_blocks = [], list(blocks(page.read_text()))
    for place, (heading, block) in enumerate(all_blocks):
        is_table = block.lstrip().startswith("|")
        near = [text for _, text in all_blocks[max(place - 1, 0) : place + 2]] if is_table else []
        if any(map(SOURCE.search, near)):
            continue
        parts = block.splitlines() if is_table else [block]
        found += [
            (heading, part, numbers(part)) for part in parts if numbers(part) and not SOURCE.search(part)
        ]
    return found


def exemptions() -> list[tuple[str, re.Pattern[str]]]:
    """(page, pattern of the text) from lines `page | pattern | reason`."""
    kept = []
    for line in EXEMPT.read_text().splitlines():
        if line and not line.startswith("#"):
            page, pattern, reason = (part.strip() for part in line.split(" | "))
            assert len(reason.split()) >= 3, f"no reason: {line}"
            kept.append((page, re.compile(pattern)))
    return kept


def pages() -> list[Path]:
    docs = sorted(path for path in (ROOT / "docs").glob("**/*.md") if path.name not in {*GENERATED, JOURNAL})
    return [ROOT / "README.md", *docs]


def test_every_figure_has_an_origin() -> None:
    allowed, used, left = exemptions(), set(), []
    assert len(allowed) <= MOST_EXEMPTIONS
    for page in pages():
        for heading, block, figures in unsourced(page):
            matching = [
                rule for rule in allowed if rule[0] == page.name and rule[1].search(f"{heading}\n{block}")
            ]
            used.update(matching)
            if not matching:
                left.append(f"{page.name}, {heading}: {', '.join(figures)}: {block[:120]!r}")
    assert not left, "no origin:\n" + "\n".join(left)
    assert used == set(allowed), f"exempt nothing: {[rule for rule in allowed if rule not in used]}"


def test_the_finder_finds() -> None:
    """A planted figure in a sentence or a table is found; one in code, with a source or generated is not."""
    assert numbers("It takes 4.5 ms a token and 12 % of memory.") == ["4.5 ms", "12 %"]
    assert numbers("| serve | 35 | `64` |") == ["35"]
    assert numbers("Version 3 of `x = 5 ms` and GPT-2 124M") == []
    text = "# A\n\n```sh\nsleep 5 s\n```\n\n<!-- figures: made by `x` -->\n| 3 s |\n<!-- end of figures -->\n"
    text += "\n    indented 3 s\n"
    assert [numbers(block) for _, block in blocks(text) if numbers(block)] == []
    assert SOURCE.search("47 TFLOP/s (DeepSpeed, 2020)") and not SOURCE.search("47 TFLOP/s here")
