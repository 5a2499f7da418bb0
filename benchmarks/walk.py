"""Run the commands of a page of the book, as a reader would: python benchmarks/walk.py PAGE... [--quick] [--into DIR]

Every `sh` block of docs/PAGE.md, in order, in one shell that ends at the first failure. What the commands write goes
into a scratch directory whose `recipes` is the repository's. A server stays until the page ends, and the next command
waits until it answers. A page that names `runs/first` comes after the README's road, which makes it. `--quick` trains a
few steps where the page trains for minutes: what is shown is that the commands fit together. Blocks marked `sh there`
are for another machine or files of one's own and are only parsed, by tests/cli/test_cli_docs.py.
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
STEPS = 20
QUICK = {r"train\.epochs=": 1, "--limit ": 10}  # at most
DRAINED_S = 20
HERE = re.compile(r"^(?:make .*|\. \.venv/.*)\n", re.M)  # installed already
SERVER = re.compile(r"^(throughline serve .*?)(?: &)?$", re.M)
SHORT = r"train\.steps=|gpt-shakespeare-fast|--show-layout| > "  # trainings that need no shortening
WHOLE = re.compile(rf"^(throughline (?:launch .*?)?train (?!.*(?:{SHORT})).*)$", re.M)
PRELUDE = """set -e
throughline() {{ {python} -m throughline.cli.main "$@"; }}
python() {{ {python} "$@"; }}
answers() {{
  for i in $(seq 120); do kill -0 $!; curl -sf http://127.0.0.1:$1/ready > /dev/null && return; sleep 1; done; false
}}
"""


def waited_for(server: re.Match[str]) -> str:
    """A server in the background, and its first answer."""
    port = re.search(r"--port (\d+)", server[1])
    return f"{server[1]} &\nanswers {port[1] if port else 8000}"


def shortened(steps: re.Match[str]) -> str:
    """Fewer steps, still more than a run has that is continued, and a warm-up that they reach the end of."""
    return f"train.steps={min(STEPS, 10 + int(steps[1]) // 20)} --set schedule.warmup_steps=5"


def file_of(page: str) -> Path:
    """README, or a page of the book."""
    return ROOT / ("README.md" if page == "README" else f"docs/{page}.md")


def script(page: Path, quick: bool) -> str:
    """The page's commands as one shell script, each printed before it runs."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.S | re.M)
    text = SERVER.sub(waited_for, HERE.sub("", "\n".join(blocks).replace("\\\n", "")))
    if quick:
        text = re.sub(r"train\.steps=(\d{2,})", shortened, WHOLE.sub(r"\1 --set train.steps=1000", text))
        for name, most in QUICK.items():
            text = re.sub(rf"(?<={name})\d+", lambda found, most=most: str(min(int(found[0]), most)), text)
    return PRELUDE.format(python=sys.executable) + "set -v\n" + text


def walk(page: str, place: Path, quick: bool) -> float:
    """Seconds that the page took. Raises SystemExit with the command that failed."""
    path = file_of(page)
    if "runs/first" in script(path, quick) and page != "README" and not (place / "runs/first").exists():
        walk("README", place, quick)
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
            for _ in range(DRAINED_S):  # the next page's server takes the same port
                os.killpg(shell.pid, 0)
                time.sleep(1)
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
