"""Draw the text that a command printed as a terminal.

Usage: throughline demo --out runs/demo | python docs/make_picture.py docs/demo.svg
"""

import html
import sys
from pathlib import Path

COLUMN, LINE, MARGIN = 7.83, 19, 16  # px of a 13 px monospaced letter, as browsers draw it

STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #24292f; white-space: pre }
rect { fill: #f6f8fa; stroke: #d0d7de }
.command { font-weight: 700 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #161b22; stroke: #30363d } }
"""


def picture(lines: list[str]) -> str:
    """SVG with one text element a line; light or dark as the reader's system is."""
    width = MARGIN * 2 + COLUMN * max(map(len, lines))
    height = MARGIN * 2 + LINE * len(lines)
    rows = []
    for number, line in enumerate(lines):
        kind = ' class="command"' if line.startswith("$") else ""
        at = f'x="{MARGIN}" y="{MARGIN + LINE * (number + 0.75):g}"'
        rows.append(f'<text {at}{kind} xml:space="preserve">{html.escape(line)}</text>')
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    box = f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", box, *rows, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(sys.stdin.read().rstrip().expandtabs().splitlines()))
