"""Artifacts appear whole or not at all, name what they were made from, and notice any changed byte."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from throughline.core import artifact
from throughline.core.artifact import (
    Input,
    chain,
    create_artifact,
    input_record,
    read_manifest,
    verify_artifact,
)
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.core.files import sha256_file, write_atomic
from throughline.core.workspace import Workspace, read_records


def make(path: Path, kind: str = "tokens", inputs: tuple = (), text: str = "hello") -> Path:
    with create_artifact(path, kind, inputs=inputs) as draft:
        (draft.path / "sub").mkdir()
        (draft.path / "sub" / "a.txt").write_text(text)
        draft.facts["n"] = 3
    return path


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_round_trip_and_identity(tmp_path: Path) -> None:
    """The hash depends on content and facts, not on place or time."""
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    c = make(tmp_path / "c", text="other")
    assert read_manifest(a, "tokens").facts == {"n": 3}
    assert verify_artifact(a).files[0].name == "sub/a.txt"
    assert read_manifest(a).hash == read_manifest(b).hash != read_manifest(c).hash
    assert not leftovers(tmp_path)


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), create_artifact(tmp_path / "x", "tokens") as draft:
        (draft.path / "half").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_any_damage_is_refused_by_name(tmp_path: Path, harm: str) -> None:
    file = make(tmp_path / "a") / "sub" / "a.txt"
    data = bytearray(file.read_bytes())
    data[2] ^= 1
    {
        "flip": lambda: file.write_bytes(data),
        "cut": lambda: file.write_bytes(data[:2]),
        "remove": file.unlink,
    }[harm]()
    with pytest.raises(Refused) as caught:
        verify_artifact(tmp_path / "a")
    assert "a.txt" in caught.value.where and caught.value.fix


def test_taken_output_kept_unless_overwrite(tmp_path: Path) -> None:
    make(tmp_path / "a", text="first")
    with pytest.raises(WrongUse, match="already exists"):
        make(tmp_path / "a")
    with create_artifact(tmp_path / "a", "tokens", overwrite=True) as draft:
        (draft.path / "b").write_text("second")
    assert [f.name for f in verify_artifact(tmp_path / "a").files] == ["b"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "keep").write_text("x")
    with (
        pytest.raises(WrongUse, match="no artifact"),
        create_artifact(tmp_path / "mine", "tokens", overwrite=True),
    ):
        pass
    assert (tmp_path / "mine" / "keep").exists()


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name in ("real", "absent"):
        link = tmp_path / f"link to {name}"
        link.symlink_to(name)
        make(link)
        assert link.is_symlink() and verify_artifact(tmp_path / name).facts == {"n": 3}
    assert not leftovers(tmp_path)


def test_a_directory_that_cannot_be_renamed_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the work: a rename over a mount point fails, one over the current directory leaves the
    shell in nothing.
    """
    monkeypatch.chdir(tmp_path)
    for path, words in (
        (Path("."), "current directory"),
        (tmp_path, "current directory"),
        (Path("/"), "mount point"),
    ):
        with pytest.raises(WrongUse) as caught, create_artifact(path, "tokens"):
            pytest.fail("the work began")
        assert words in caught.value.why


@pytest.mark.parametrize(
    ("started", "name"),
    [("/x/throughline/cli/main.py", "throughline"), ("/usr/bin/throughline", "throughline"), ("", "python")],
)
def test_the_command_is_what_a_person_types(monkeypatch: pytest.MonkeyPatch, started: str, name: str) -> None:
    """Also where `python -m` started it, as the demo and the launcher do."""
    from throughline.core.artifact import command_line

    monkeypatch.setattr("sys.argv", [started, "train", "a b"])
    assert command_line() == f"{name} train 'a b'"


def test_wrong_kind_and_foreign_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(WrongUse, match="expected checkpoint, found tokens"):
        read_manifest(tmp_path / "a", "checkpoint")
    (tmp_path / "plain").mkdir()
    with pytest.raises(WrongUse, match="not a Throughline artifact"):
        read_manifest(tmp_path / "plain")
    with pytest.raises(WrongUse, match="no such path"):
        read_manifest(tmp_path / "nowhere")


def test_chain_reaches_foreign_text_and_sees_changes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words")
    make(tmp_path / "tokens", inputs=(input_record(text),))
    make(tmp_path / "run", "run", inputs=(input_record(tmp_path / "tokens"),))
    assert [(d, i.kind, same) for d, i, same in chain(tmp_path / "run")] == [
        (1, "tokens", True),
        (2, "foreign", True),
    ]
    text.write_text("other words")
    assert chain(tmp_path / "run")[1][2] is False
    text.unlink()
    assert chain(tmp_path / "run")[1][2] is None


def test_chain_does_not_hash_terabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the bound is not said to be the same, nor changed; an input that was never hashed
    neither.
    """
    for name, size in (("large", 9), ("a", 5), ("b", 6), ("c", 3)):
        (tmp_path / name).write_text("x" * size)
    inputs = [input_record(tmp_path / name) for name in ("large", "a", "b", "c")] + [
        Input(str(tmp_path / "c"), "foreign", "")
    ]
    make(tmp_path / "tokens", inputs=tuple(inputs))
    assert [same for *_, same in chain(tmp_path / "tokens")] == [True, True, True, True, None]
    monkeypatch.setattr(artifact, "CHECK_BYTES", 8)
    assert [same for *_, same in chain(tmp_path / "tokens")] == [None, True, None, True, None]


def test_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    """A real write beyond the file-size limit: our error, nothing left behind."""
    code = (
        "import signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from throughline.core.artifact import create_artifact\n"
        "from throughline.core.errors import Failed\n"
        "try:\n"
        "    with create_artifact(sys.argv[1], 'tokens') as d: (d.path / 'big').write_bytes(bytes(200_000))\n"
        "except Failed as e: print(e)\n"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # noqa: E731
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, preexec_fn=limit
    )
    assert "cannot write" in out.stdout and "file-size limit" in out.stdout, out.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_do_not_take_each_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two machines both may have the same process number: the second writes, whole, while the first is
    about to rename.
    """
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", real)
        write_atomic(tmp_path / "plan", "second")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "plan", "first")
    assert (tmp_path / "plan").read_text() == "first" and os.listdir(tmp_path) == ["plan"]


def test_workspace_lock_and_records(tmp_path: Path) -> None:
    """One owner at a time, the loser is told who; a line cut by a crash is dropped, damage before it is
    refused.
    """
    with Workspace(tmp_path / "w") as work:
        with pytest.raises(WrongUse, match="another process"), Workspace(tmp_path / "w"):
            pass
        work.append("log.jsonl", {"a": 1}, {"a": 2}, sync=True)
    file = tmp_path / "w" / "log.jsonl"
    with open(file, "a") as out:
        out.write('{"a": 3')
    assert [r["a"] for r in read_records(file)] == [1, 2]
    with Workspace(tmp_path / "w") as work:
        for number in (4, 5):
            work.append("log.jsonl", {"a": number})
    assert [r["a"] for r in read_records(file)] == [1, 2, 4, 5]
    file.write_text('{"a": 3')
    Workspace(tmp_path / "w").append("log.jsonl", {"a": 6})
    assert file.read_text() == '{"a": 6}\n'
    file.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(Refused, match="damaged line"):
        list(read_records(file))
    with Workspace(tmp_path / "w") as work:
        work.finish("run", (), None, {"steps": 5})
    assert verify_artifact(tmp_path / "w").facts == {"steps": 5}


def test_a_file_in_the_place_of_a_workspace_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(WrongUse, match="cannot write there"), Workspace(path):
            pass


def test_error_survives_pickling() -> None:
    """Errors cross process borders whole (spawned workers send them back)."""
    import pickle

    error = pickle.loads(pickle.dumps(Failed("what", where="here", why="because", fix="do")))
    assert (type(error), str(error)) == (Failed, str(Failed("what", where="here", why="because", fix="do")))


def test_the_lock_is_held_until_the_manifest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes while a workspace is being finished is refused."""
    from throughline.core import workspace

    def entered(*args: object, **named: object) -> object:
        with pytest.raises(WrongUse, match="another process"), Workspace(tmp_path / "w"):
            pass
        return seal(*args, **named)  # type: ignore[arg-type]

    seal = workspace.seal
    monkeypatch.setattr(workspace, "seal", entered)
    with Workspace(tmp_path / "w") as work:
        work.append("log.jsonl", {"a": 1})
        manifest = work.finish("run", (), None, {})
    assert [file.name for file in manifest.files] == ["log.jsonl"]
    assert sorted(os.listdir(tmp_path / "w")) == ["log.jsonl", "manifest.json"]


def test_facts_on_how_it_was_made_are_no_part_of_the_hash(tmp_path: Path) -> None:
    for name, encoder, tokens in (("a", "one", 5), ("b", "two", 5), ("c", "one", 6)):
        with create_artifact(tmp_path / name, "tokens") as draft:
            draft.facts.update(tokens=tokens, made={"encoder": encoder})
    a, b, c = (read_manifest(tmp_path / name).hash for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_directory_never_leaves_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """The process is cut at every system call of the swap in turn: afterwards the old or the new is at its place,
    whole. Where names cannot be exchanged, a rename that fails puts the old one back.
    """
    from throughline.core import files

    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    real = {"rename": os.rename, "rmtree": shutil.rmtree, "sync": files.sync}
    for cut in range(8):
        calls = 0

        def counted(name: str, cut: int = cut) -> Callable[..., object]:
            def call(*args: object, **named: object) -> object:
                nonlocal calls
                calls += 1
                if calls == cut + 1:
                    raise OSError(errno.EIO, "cut")
                return real[name](*args, **named)  # type: ignore[operator]

            return call

        for name, text in (("out", "old"), ("new", "new")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text(text)
        with monkeypatch.context() as patch, suppress(OSError):
            patch.setattr(files, "sync", counted("sync"))
            patch.setattr(os, "rename", counted("rename"))
            patch.setattr(shutil, "rmtree", counted("rmtree"))
            files.swap_in(tmp_path / "new", tmp_path / "out")
        assert (tmp_path / "out" / "file").read_text() in ("old", "new")
        for left in tmp_path.iterdir():
            real["rmtree"](left)  # type: ignore[operator]


def test_every_file_is_flushed_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from throughline.core import files

    done: list[str] = []
    sync, swap = files.sync, files.swap_in
    monkeypatch.setattr(files, "sync", lambda path: (done.append(Path(path).name), sync(path)))
    monkeypatch.setattr(files, "swap_in", lambda *paths: (done.append("swap"), swap(*paths)))
    with files.written_aside(tmp_path / "out") as folder:
        for name in ("a", "sub/b"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(name)
    assert done[: done.index("swap")] == ["a", "b"] and "sub" in done and (tmp_path / "out/sub/b").is_file()


def test_a_large_foreign_file_is_hashed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache serves what opens a model; what checks for a change reads every byte. A damaged entry, a file that was
    written a moment ago and a cache that cannot be written are hashed again.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(artifact, "CACHED_BYTES", 10)
    hashed: list[str] = []
    monkeypatch.setattr(
        artifact, "sha256_file", lambda path: hashed.append(Path(path).name) or sha256_file(path)
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "small").write_text("x")
    weights = model / "weights"
    weights.write_text("0123456789")

    def opened(remembered: bool = True) -> tuple[str, list[str]]:
        hashed.clear()
        return input_record(model, remembered=remembered).hash, hashed[:]

    first, files = opened()
    assert files == ["small", "weights"]
    assert opened() == (first, ["small", "weights"]), "it may change within the same tick of the clock"
    monkeypatch.setattr(artifact, "SETTLED_S", -1.0)
    opened()
    assert opened() == (first, ["small"])
    assert opened(remembered=False) == (first, ["small", "weights"])
    before = weights.stat()
    weights.write_text("9876543210")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and tar do
    changed, files = opened()
    assert changed != first and files == ["small", "weights"]
    for entry in (tmp_path / "cache" / "throughline" / "sha256").iterdir():
        entry.write_text("damaged")
    assert opened() == (changed, ["small", "weights"])
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert opened() == (changed, ["small", "weights"])


def test_a_hash_of_our_own_artifact_is_never_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for limit, value in (("CACHED_BYTES", 0), ("SETTLED_S", -1.0)):
        monkeypatch.setattr(artifact, limit, value)
    made = make(tmp_path / "model", "model")
    input_record(made, remembered=True)
    verify_artifact(made)
    assert not (tmp_path / "cache").exists()
