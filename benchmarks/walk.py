"""Run the commands of a page of the book, as a reader would: python benchmarks/walk.py PAGE... [--quick] [--into DIR]

Every `sh` block of docs/PAGE.md, in order, in one shell that ends at the first failure. What the commands write goes
into a scratch directory whose `recipes` is the repository's. A command that ends with `&` (a server) stays until the
page ends. `--quick` trains a few steps where the page trains for minutes: what is shown is that the commands fit
together. Blocks marked `sh there` are for another machine and are only parsed, by tests/cli/test_cli_docs.py.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = {"train.steps=": 70, "train.epochs=": 1, "--limit ": 10}  # at most, above the recipes' warm-ups
PRELUDE = """set -e
throughline() {{ {python} -m throughline.cli.main "$@"; }}
python() {{ {python} "$@"; }}
"""


def script(page: Path, quick: bool) -> str:
    """The page's commands as one shell script, each printed before it runs."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.S | re.M)
    text = "\n".join(blocks)
    for name, most in QUICK.items() if quick else ():
        text = re.sub(
            rf"(?<={re.escape(name)})\d+", lambda found, most=most: str(min(int(found[0]), most)), text
        )
    return PRELUDE.format(python=sys.executable) + "set -v\n" + text


def walk(page: str, place: Path, quick: bool) -> float:
    """Seconds that the page took. Raises SystemExit with the command that failed."""
    path = ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
    if not (place / "recipes").exists():
        (place / "recipes").symlink_to(ROOT / "recipes")
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    shell = subprocess.Popen(
        ["bash", "-c", script(path, quick)],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = shell.wait()
    finally:
        with suppress(ProcessLookupError):  # nothing was left in the background
            os.killpg(shell.pid, signal.SIGTERM)
    if code:
        raise SystemExit(f"{path.name}: a command failed with exit code {code}")
    return time.monotonic() - start


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("pages", nargs="+", help="names in docs/ without .md")
    options.add_argument("--quick", action="store_true", help="a few steps where the page trains for minutes")
    options.add_argument(
        "--into", type=Path, help="directory that keeps what was made (default: none is kept)"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = (given.into or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        for page in given.pages:
            print(f"{page}: {walk(page, place, given.quick):.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
