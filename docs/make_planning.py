"""Run the commands of docs/planning.md again and put their output below them: python docs/make_planning.py [--check].

A block that begins with `$ throughline` holds a command and what it printed.
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("planning.md")
BLOCK = re.compile(r"```console\n\$ throughline ([^\n]*)\n.*?```", re.S)


def output(arguments: str) -> str:
    """What a command prints."""
    from click.testing import CliRunner
    from throughline.cli.main import main

    result = CliRunner().invoke(main, arguments.split())
    return result.output.rstrip()  # stderr is in it


def refreshed(text: str) -> str:
    """The page with every block's output made again."""
    return BLOCK.sub(lambda match: f"```console\n$ throughline {match[1]}\n{output(match[1])}\n```", text)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = refreshed(text)
    if "--check" in sys.argv:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
