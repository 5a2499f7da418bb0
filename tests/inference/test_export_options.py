"""`throughline export`: every option of every target is used or refused, and what stands beside a model goes along."""

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from throughline.cli import export as cli
from throughline.cli.main import main
from throughline.core.artifact import read_manifest, verify_artifact
from throughline.core.errors import Refused
from throughline.data.chat import ChatTemplate
from throughline.data.model_settings import copy_chat
from throughline.data.tokenizer import Tokenizer
from throughline.inference.exports import export, export_engine, gguf_export, handover
from throughline.inference.graphs import real_text as calibration
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.source import find_model, open_model

VALUES = {
    "precision": "fp16",
    "variant": "cuda",
    "opset": "21",
    "names": "optimum",
    "pooling": "cls",
    "outputs": "embedding",
    "text": "my.txt",
    "calibration": "ranges",
    "capability": "8.9",
    "batches": "3",
    "lengths": "77",
    "timing_cache": "timings",
    "tasks": "lambada",
    "limit": "7",
    "bench": None,
    "device": "cuda:0",
}
LOSES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    "words",
    [
        "gpt --to onnx",
        "gpt --to onnx --names optimum",
        "gpt --to huggingface",
        "bert --to onnx",
        "bert --to onnx --names optimum",
        "bert --to onnx --outputs embedding",
        "bert --to huggingface",
        "bert --to triton",
    ],
)
def test_what_an_export_says_to_try_works(words: str, gpt_dir: Path, bert_dir: Path, tmp_path: Path) -> None:
    """The command parses and the server's first act on it, opening the model, is done; where there is none to try
    here, none is named.
    """
    family, *options = words.split()
    source, out = str({"gpt": gpt_dir, "bert": bert_dir}[family]), str(tmp_path / "out")
    done = CliRunner().invoke(main, ["export", source, *options, "--out", out, "--no-bench"])
    assert done.exit_code == 0, done.output
    lines = [line.partition("try it:")[2].split() for line in done.output.splitlines() if "try it:" in line]
    served = "triton" not in words and words != "gpt --to onnx --names optimum"
    assert bool(lines) == served
    for program, verb, *rest in lines:
        assert program == "throughline"
        command = main.get_command(None, verb)
        given = command.make_context(verb, rest).params
        assert open_backend(given["paths"][0]).family == family


@pytest.mark.parametrize("target", cli.USED)
def test_every_option_is_used_or_refused(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each option is given alone: what the writer of the target is called with changes, or the command ends with 2."""
    calls: list[Any] = []
    for module, name in (
        (export, "export_onnx"),
        (handover, "export_huggingface"),
        (gguf_export, "export_gguf"),
        (export_engine, "export_engine"),
        (handover, "export_triton"),
        (calibration, "write_calibration"),
    ):
        note = lambda *given, **more: calls.append(repr((given, more))) or {"layers": 1, "tokens": 1}  # noqa: E731
        monkeypatch.setattr(module, name, note)
    monkeypatch.setattr(cli, "_lines", lambda report: [])
    monkeypatch.setattr("throughline.eval.opening.task_scorer", lambda *given: given)

    def run(*words: str) -> int:
        given = ["export", "model", "--to", *target.split(), "--out", str(tmp_path / "out"), *words]
        return CliRunner().invoke(main, given).exit_code

    base = {"calibration": ("--text", "t"), "limit": ("--tasks", "t")}
    options = {str(one.name): one for one in cli.command.params}
    assert VALUES.keys() == options.keys() - {
        "path",
        "target",
        "out",
        "overwrite",
        "json_output",
        "debug",
        "quiet",
    }
    for name, value in VALUES.items():
        if name == "precision" and "tensorrt" in target:
            value = "fp32"  # fp16 is what it makes by itself
        first = base.get(name if name == "limit" else target, ())
        words = [options[name].secondary_opts[0]] if value is None else [options[name].opts[0], value]
        used = name in cli.USED[target].split()
        calls.clear()
        assert not used or run(*first) == 0
        code = run(*first, *words)
        if not used:
            assert code == 2 and len(calls) == 0, name
        elif name == "device" and target in ("calibration", "gguf"):
            assert code == 2, "they run on the CPU, and say so"
        else:
            assert code == 0 and calls[0] != calls[1], name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpt --to onnx --pooling cls", "a GPT has no embedding"),
        ("gpt --to onnx --outputs embedding", "a GPT has no embedding"),
        ("gpt --to huggingface --pooling cls", "this model has no embedding"),
        ("gpt --to onnx --limit 3", "--limit is for the records of tasks"),
        ("gpt --to onnx --calibration nowhere", "nothing here is calibrated"),
        ("bert --to onnx --precision fp16 --calibration nowhere", "fp16 for portable has no fixed scales"),
    ],
)
def test_an_option_that_could_change_nothing_is_refused(
    words: str, said: str, gpt_dir: Path, bert_dir: Path, tmp_path: Path
) -> None:
    """Of a target that uses it, for a model or beside options that leave nothing for it to do."""
    family, *options = words.split()
    source, out = str({"gpt": gpt_dir, "bert": bert_dir}[family]), tmp_path / "out"
    done = CliRunner().invoke(main, ["export", source, *options, "--out", str(out), "--no-bench"])
    assert done.exit_code == 2 and said in done.output and not out.exists()


@pytest.fixture
def chatting(gpt_dir: Path, tmp_path: Path) -> Path:
    """A model with a chat template and defaults of generation."""
    handover.export_huggingface(gpt_dir, tmp_path / "chatting", judging=export.Judging(bench=False))
    (tmp_path / "chatting" / "chat_template.jinja").write_text(LOSES)
    defaults = tmp_path / "chatting" / "generation_config.json"
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | {"temperature": 0.6}))
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in (tmp_path / "chatting").iterdir():
        if file.is_file() and file.name not in ("manifest.json", "parity.json"):
            (plain / file.name).write_bytes(file.read_bytes())
    return plain


@pytest.mark.parametrize("to", ["onnx", "huggingface", "gguf"])
def test_a_chat_template_goes_with_the_model(to: str, chatting: Path, tmp_path: Path) -> None:
    quiet = export.Judging(bench=False)
    if to == "gguf":
        gguf = pytest.importorskip("gguf")
    writers = {
        "onnx": export.export_onnx,
        "huggingface": handover.export_huggingface,
        "gguf": gguf_export.export_gguf,
    }
    writers[to](chatting, tmp_path / "out", judging=quiet)  # type: ignore[operator]
    found = ChatTemplate.find(tmp_path / "out", Tokenizer.load(tmp_path / "out"))
    assert found is not None
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.6
    if to == "gguf":
        fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
        assert fields["tokenizer.chat_template"].contents() == LOSES


def test_a_chat_template_stays_with_a_fine_tuned_model(chatting: Path, tmp_path: Path) -> None:
    from throughline.train.finetune.run import write_model

    (tmp_path / "tuned").mkdir()
    text, tokenizer = (chatting / "tokenizer.json").read_bytes(), Tokenizer.load(chatting)
    write_model(open_model(chatting).model, tokenizer, text, tmp_path / "tuned", chatting)
    assert ChatTemplate.find(tmp_path / "tuned", Tokenizer.load(tmp_path / "tuned")) is not None
    assert json.loads((tmp_path / "tuned" / "generation_config.json").read_text())["temperature"] == 0.6


def test_a_chat_template_in_a_config_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LOSES}]
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    copy_chat(tmp_path / "a", tmp_path / "b")
    assert [file.name for file in (tmp_path / "b").iterdir()] == ["chat_template.jinja"]
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == LOSES


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_leave_in_sixteen_bits(precision: str, gpt_dir: Path, tmp_path: Path) -> None:
    """Half the bytes, readable by everybody that may read the folder, and stored as they are told to be."""
    handover.export_huggingface(
        gpt_dir, tmp_path / "whole", judging=export.Judging(bench=False), precision="fp32"
    )
    handover.export_huggingface(
        gpt_dir, tmp_path / "half", judging=export.Judging(bench=False), precision=precision
    )
    whole, half = (tmp_path / name / "model.safetensors" for name in ("whole", "half"))
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    assert find_model(tmp_path / "half").stored_dtype("cpu") == precision
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"].endswith("float16")
    folder = stat.S_IMODE((tmp_path / "half").stat().st_mode)
    assert stat.S_IMODE(half.stat().st_mode) & 0o444 == folder & 0o444
    assert read_manifest(tmp_path / "half").facts["precision"] == precision


def test_a_large_model_leaves_in_several_files(
    gpt_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's own cut, here at 20 kB instead of 5 GB; it is read back before it may exist, and opens again."""
    import huggingface_hub

    real = huggingface_hub.save_torch_state_dict
    small = lambda *given, **named: real(*given, **named, max_shard_size="20KB")  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", small)
    handover.export_huggingface(gpt_dir, tmp_path / "out", judging=export.Judging(bench=False))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert open_model(tmp_path / "out").model.config == open_model(gpt_dir).model.config


def test_tokenizers_that_llama_cpp_reads_otherwise(bert_dir: Path, tmp_path: Path) -> None:
    """Case is lost there, so a cased WordPiece is refused; before, ids of text differed and nothing said so."""
    pytest.importorskip("gguf")
    from throughline.data.gguf import to_gguf

    tokenizer = Tokenizer.load(bert_dir / "tokenizer.json")
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
    }
    cased = json.loads(tokenizer.to_json()) | {"normalizer": normalizer | {"lowercase": False}}
    with pytest.raises(Refused, match="a WordPiece with upper case"):
        to_gguf(Tokenizer(json.dumps(cased)), tmp_path)
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    with pytest.raises(Refused, match="does not read this WordLevel tokenizer"):
        to_gguf(Tokenizer(json.dumps(cased | {"model": words, "added_tokens": []})), tmp_path)


def test_an_optimum_directory_has_its_config(bert_dir: Path, tmp_path: Path) -> None:
    from throughline.inference.graphs.graph_options import GraphOptions

    export.export_onnx(
        bert_dir, tmp_path / "out", GraphOptions(names="optimum"), judging=export.Judging(bench=False)
    )
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["model_type"] == "bert" and read_manifest(tmp_path / "out").facts["opset"] == 17
    assert np.isfinite(fields["layer_norm_eps"])


def test_chat_settings_are_the_owners(chatting: Path, gpt_dir: Path, tmp_path: Path) -> None:
    """Template and defaults of an artifact may change or be added; a run's own directory may hold them, and an answer
    ends where the defaults say.
    """
    handover.export_huggingface(chatting, tmp_path / "out", judging=export.Judging(bench=False))
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "out" / "generation_config.json").write_text('{"eos_token_id": [0], "top_p": 0.9}')
    verify_artifact(tmp_path / "out")
    export.export_onnx(tmp_path / "out", tmp_path / "onnx", judging=export.Judging(bench=False))
    assert "top_p" in (tmp_path / "onnx" / "generation_config.json").read_text()
    (tmp_path / "onnx" / "tokenizer_config.json").unlink()
    found = ChatTemplate.find(tmp_path / "onnx", Tokenizer.load(tmp_path / "onnx"))
    assert found is not None and found.end_ids == {0}
    (checkpoint := tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("chat_template.jinja", "generation_config.json"):
        (tmp_path / "run" / name).write_bytes((tmp_path / "out" / name).read_bytes())
    copy_chat(checkpoint, gone := checkpoint.parent)
    assert {file.name for file in gone.iterdir()} == {
        "step-1",
        "chat_template.jinja",
        "generation_config.json",
    }
