"""Container files are linted: by hadolint where it is installed, always by the rules below, which need no network."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from throughline.inference.serving import listen
from throughline.inference.serving.accounts import ServerLimits

ROOT = Path(__file__).resolve().parents[1]
yaml = pytest.importorskip("yaml")

INSTRUCTIONS = re.compile(
    "FROM|RUN|CMD|LABEL|EXPOSE|ENV|ADD|COPY|ENTRYPOINT|VOLUME|USER|WORKDIR|ARG|ONBUILD|STOPSIGNAL|HEALTHCHECK|SHELL"
)
# a tag says which, a digest that it stays the same
PINNED = re.compile(r".+:v?\d[\w.-]*@sha256:[0-9a-f]{64}")
Stage = list[tuple[str, str]]


def stages(text: str) -> dict[str, Stage]:
    """The instructions of each stage by its name, those of the stage that it begins with before its own."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M))
    found: dict[str, Stage] = {}
    current: Stage = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        assert INSTRUCTIONS.fullmatch(word), f"no instruction: {line}"
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            current = found[name or str(len(found))] = [*found.get(image.split()[-1], [("FROM", image)])]
        else:
            current.append((word, rest.strip()))
    return found


def problems(text: str) -> list[str]:
    """What is wrong with a Dockerfile, one sentence each."""
    said = []
    for name, stage in stages(text).items():
        base = stage[0][1].split()[-1]
        if not PINNED.fullmatch(base):
            said.append(f"{name}: {base} is not pinned")
        for word, rest in stage:
            if word == "ADD":
                said.append(f"{name}: COPY does what ADD does here, and nothing else")
            if word in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
                said.append(f"{name}: {word} in shell form does not pass signals on")
            if word in ("CMD", "ENTRYPOINT") and rest.startswith("["):
                json.loads(rest)
            for command in re.split(r"&&|;", rest) if word == "RUN" else ():
                said += [f"{name}: {fault}" for fault in faults(shlex.split(command))]
        users = [rest for word, rest in stage if word == "USER"]
        if any(word == "ENTRYPOINT" for word, _ in stage) and (not users or users[-1] in ("root", "0")):
            said.append(f"{name}: runs as root")
    return list(dict.fromkeys(said))


def faults(words: list[str]) -> list[str]:
    """What is wrong with one shell command of a RUN."""
    if words[:2] == ["pip", "install"]:
        held = any(word in words for word in ("-c", "-r", "--require-hashes", "--no-deps"))
        named = [word for word in words[2:] if not word.startswith("-") and not word.startswith("http")]
        if not held and any("==" not in word for word in named):
            return [f"pip install without versions: {' '.join(words)}"]
    if "apt-get" in words and "install" in words and "--no-install-recommends" not in words:
        return ["apt-get install without --no-install-recommends"]
    return ["sudo in a container"] if "sudo" in words else []


def dockerfiles() -> list[Path]:
    return sorted([*ROOT.glob("Dockerfile*"), *(ROOT / "containers").glob("*Dockerfile*")])


@pytest.mark.parametrize("path", dockerfiles(), ids=lambda path: path.name)
def test_dockerfiles_are_clean(path: Path) -> None:
    assert problems(path.read_text()) == []
    if hadolint := shutil.which("hadolint"):
        done = subprocess.run(
            [hadolint, "--failure-threshold", "warning", path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_images_for_use_and_a_health_check_for_serving() -> None:
    found = stages((ROOT / "Dockerfile").read_text())
    assert {"cpu", "cuda", "serve"} <= set(found)
    # a model that loads for minutes is healthy and not ready
    assert "/health'" in dict(found["serve"])["HEALTHCHECK"]
    assert "llguidance" in (ROOT / "containers" / "serve.txt").read_text().split()
    assert dict(found["serve"])["EXPOSE"] == "8000"


def test_copied_and_installed_files_exist() -> None:
    """Everything that COPY and `pip -c`/`-r` name is in the repository."""
    for path in dockerfiles():
        for stage in stages(path.read_text()).values():
            for word, rest in stage:
                words = shlex.split(rest) if word in ("COPY", "RUN") else []
                named = (
                    [w for w in words[:-1] if not w.startswith("-")]
                    if word == "COPY" and "--from" not in rest
                    else []
                )
                named += [
                    words[i + 1] for i, w in enumerate(words[:-1]) if w in ("-c", "-r") and word == "RUN"
                ]
                for name in named:
                    assert (ROOT / name).exists() or list(ROOT.glob(name)), f"{path.name}: {rest}"


def test_compose_serves_and_watches() -> None:
    """The endpoint and Prometheus: pinned, no new privileges, ports on this machine alone, mounts that exist."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {"serve", "prometheus"} <= set(services)
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if "build" in service:
            least_s = ServerLimits.drain_s + listen.ANSWER_S + 10  # and the end of the processes
            assert int(service["stop_grace_period"].removesuffix("s")) >= least_s, name
            assert service["build"]["target"] in stages((ROOT / "Dockerfile").read_text()), name
            assert "no-new-privileges:true" in service["security_opt"] and service["cap_drop"] == ["ALL"], (
                name
            )
        else:
            assert PINNED.fullmatch(service["image"]), f"{name} is not pinned"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("${") or (ROOT / source).exists(), f"{name}: {source}"
    scraped = yaml.safe_load((ROOT / "containers" / "prometheus.yml").read_text())
    targets = [
        t for job in scraped["scrape_configs"] for config in job["static_configs"] for t in config["targets"]
    ]
    assert "serve:8000" in targets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM python\n", "not pinned"),
        ("FROM python:3.11.13-slim\n", "not pinned"),
        ("FROM a:1\nRUN pip install torch\n", "without versions"),
        ('FROM a:1\nENTRYPOINT ["x"]\n', "runs as root"),
        ("FROM a:1\nUSER me\nCMD x y\n", "does not pass signals"),
        ("FROM a:1\nRUN apt-get update && apt-get install -y curl\n", "no-install-recommends"),
    ],
)
def test_the_rules_find_mistakes(text: str, said: str) -> None:
    assert any(said in problem for problem in problems(text))
    with pytest.raises(AssertionError, match="no instruction"):
        stages("FORM a:1\n")
