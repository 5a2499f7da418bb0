"""What a newcomer types wrong: a path with a typo, a directory for a file, an empty file, bytes that are no text, a
file that may not be read. Every command answers with the path and what to do, and never with a traceback.
"""

import builtins
import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from throughline.cli.main import main

# PATH stands for the wrong one; tokens, tok and text.txt are there
COMMANDS = [
    "data tokenizer PATH --out new",
    "data tokenizer PATH --type import --out new",
    "data tokenize PATH --tokenizer tok --out new",
    "data tokenize text.txt --tokenizer PATH --out new",
    "data inspect PATH",
    "data export PATH --to nanogpt --out new",
    "data dedup PATH --dry-run",
    "plan PATH --gpus 1 --on t4",
    "plan explain PATH --gpus 1 --on t4",
    "plan serve PATH --on t4",
    "train PATH --dry-run",
    "train gpt-shakespeare --set data.train=PATH --dry-run",
    "train gpt-shakespeare --set data.train=text.txt --set data.tokenizer=PATH --dry-run",
    "train gpt-shakespeare --set data.train=tokens --set data.validation=PATH --dry-run",
    "finetune PATH",
    "finetune finetune-classification --init-from PATH --set data.train=text.txt",
    "study PATH",
    "prove PATH",
    "eval PATH",
    "eval PATH --tasks blimp",
    "export PATH --to onnx --out new",
    "generate PATH --prompt x",
    "generate model PATH --out new.jsonl",
    "embed PATH text.txt",
    "embed model PATH",
    "search PATH",
    "serve PATH",
    "serve name=PATH",
    "bench latency PATH",
    "launch -- train PATH",
    "show PATH",
    "verify PATH",
    "report PATH",
    "compare PATH PATH",
    "recipe show PATH",
    "recipe check PATH",
    "recipe new --from PATH --machine cpu --data tokens --out new.toml",
]
# where a bare text is what is asked for, or the other argument is judged first
TEXT_IS_FINE = ("data tokenizer PATH --out", "data dedup", "recipe show")
MODEL_FIRST = ("generate model", "embed model")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths with 空格 😀")
    (folder / "text.txt").write_text("Some words that are said again.\n\n" * 400)
    tokenizer = ["tokenizer", str(folder / "text.txt"), "--vocab-size", "270", "--out", str(folder / "tok")]
    tokens = [
        "tokenize",
        str(folder / "text.txt"),
        "--tokenizer",
        str(folder / "tok"),
        "--out",
        str(folder / "tokens"),
    ]
    for words in (tokenizer, tokens):
        done = CliRunner().invoke(main, ["data", *words])
        assert done.exit_code == 0, done.output
    return folder


def type_it(command: str, path: str) -> Result:
    return CliRunner().invoke(main, [word.replace("PATH", path) for word in command.split()])


def check_answer(command: str, path: str, done: Result) -> None:
    said = done.output
    assert done.exit_code in (1, 2, 3), f"{command}: exit code {done.exit_code}: {said}"
    assert "Traceback" not in said and "a fault in throughline" not in said, f"{command}: {said}"
    assert path in said, f"{command} does not name the path: {said}"
    assert "fix:" in said or "Error:" in said, f"{command}: no way out: {said}"


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("missing", ""),
        ("missing", ".toml"),
        ("directory", ""),
        ("empty", ".jsonl"),
        ("empty", ""),
        ("binary", ".toml"),
    ],
)
def test_a_wrong_path_is_named_with_a_way_out(
    kind: str, suffix: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has spaces, Chinese and an emoji, as the folder has."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "tok", "tokens"):
        (tmp_path / name).symlink_to(place / name)
    name = f"我的 notes 😀{suffix}"
    path = tmp_path / name
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(bytes(range(256)) * 40 if kind == "binary" else b"")
    for command in COMMANDS:
        if kind == "empty" and command.startswith(TEXT_IS_FINE):
            continue
        if kind in ("empty", "binary") and command.startswith(MODEL_FIRST):
            continue
        check_answer(command, name, type_it(command, name))
        assert not Path("new").exists() and not Path("new.toml").exists(), command


@pytest.mark.parametrize(
    "command",
    [
        "data tokenizer PATH --out new",
        "data tokenize text.txt --tokenizer PATH --out new",
        "train PATH --dry-run",
        "recipe check PATH",
        "recipe show PATH",
        "plan PATH --gpus 1 --on t4",
        "finetune PATH",
    ],
)
def test_a_file_that_may_not_be_read_is_named(
    command: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's refusal, which root would not get from the file's mode, is given by the opening of that file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").symlink_to(place / "text.txt")
    suffix = ".toml" if command.startswith(("recipe", "plan", "finetune")) else ".txt"
    suffix = ".json" if "--tokenizer" in command else suffix
    secret = tmp_path / f"secret 秘密{suffix}"
    secret.write_text("version = 1")
    real = builtins.open

    def refusing(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith(secret.name):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refusing)
    monkeypatch.setattr(io, "open", refusing)
    done = type_it(command, str(secret))
    check_answer(command, secret.name, done)
    assert "ermission denied" in done.output


def test_a_typo_is_answered_with_the_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sentences.txt", "recipe.toml"):
        (tmp_path / name).write_text("x")
    for command, name in (
        ("embed model sentnces.txt", "sentences.txt"),
        ("generate model sentnces.txt --out a", "sentences.txt"),
        ("train recpie.toml", "recipe.toml"),
        ("recipe check recpie.toml", "recipe.toml"),
    ):
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 2 and f"did you mean {name}?" in done.stderr, done.output


def test_a_name_of_the_hub_is_recognised_by_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf download` is advised for what it can download, and not for a path with spaces."""
    monkeypatch.chdir(tmp_path)
    for name, hub in (
        ("google-bert/bert-base-uncased", True),
        ("gpt2", True),
        ("my model", False),
        ("模型", False),
    ):
        done = CliRunner().invoke(main, ["generate", name, "--prompt", "x"])
        assert ("hf download" in done.stderr) == hub, done.stderr
