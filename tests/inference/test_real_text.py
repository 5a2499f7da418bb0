"""Precision judged on text: the rows, the calibration, the bounds; and on weights that were trained."""

import json
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.core.artifact import Input, read_manifest, verify_artifact
from throughline.core.backend import Limits, Span
from throughline.core.errors import Refused, WrongUse
from throughline.inference.exports.export import Judging, export_onnx
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.onnx_writer import INT8_MAX
from throughline.inference.graphs.parity import BOUNDS, Bounds
from throughline.inference.graphs.real_text import (
    allowed_disagreements,
    best_clip,
    calibrate,
    compare_on_text,
    read_calibration,
    read_rows,
    write_calibration,
)
from throughline.inference.runtimes.backends import Loaded, open_backend
from throughline.inference.runtimes.source import open_model

SHAKESPEARE = Path(__file__).parents[2] / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
# the fixtures' weights are random: numbers, not bounds, are looked at
LOOSE = Bounds(1e9, 0.0, 1e9, 0.0, 1e9)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SHAKESPEARE.read_text()[:40_000])
    return path


def test_rows_are_framed_and_halved(bert_dir: Path, gpt_dir: Path, text: Path) -> None:
    rows = read_rows(text, bert_dir / "tokenizer.json", 64)
    assert rows.ids_RS.shape[1] == 64 and rows.mask_id == 4
    assert (rows.ids_RS[:, 0] == 2).all() and (rows.ids_RS[:, -1] == 3).all()  # [CLS] and [SEP]
    assert len(rows.calibration) + len(rows.judging) == len(rows.ids_RS)
    plain = read_rows(text, gpt_dir / "tokenizer.json", 160)
    assert plain.ids_RS.shape == (256, 128) and plain.mask_id is None


def test_texts_that_cannot_serve_are_refused(gpt_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    for path, words in ((tmp_path / "short.txt", "too short"), (tmp_path / "absent.txt", "no such text")):
        with pytest.raises(WrongUse, match=words):
            read_rows(path, gpt_dir / "tokenizer.json", 160)
    with pytest.raises(WrongUse, match="no tokenizer"):
        read_rows(tmp_path / "short.txt", None, 160)


def test_the_best_clip_leaves_outliers_out() -> None:
    """A million values below 1 and three near 100: step^2 / 12 for each of the many against what is cut of the
    few, whose least sum is at 300 / (1e6 / (12 x 127^2) + 3).
    """
    counts = np.zeros(2048, np.int64)
    counts[:20] = 50_000  # |x| below 0.98
    counts[-1] = 3
    assert best_clip(counts, 100.0) == pytest.approx(300 / (1e6 / (12 * 127**2) + 3), abs=100 / 128)
    evenly = np.full(2048, 100)
    assert best_clip(evenly, 2.0) > 1.9  # nothing to cut


def test_a_calibration_knows_every_layer(gpt_dir: Path, bert_dir: Path, text: Path, tmp_path: Path) -> None:
    for path, names in ((gpt_dir, {"blocks.1.mlp.down"}), (bert_dir, {"pooler", "nsp", "mlm_transform"})):
        opened = open_model(path)
        rows = read_rows(text, opened.tokenizer, opened.model.config.sequence_length)
        ranges = calibrate(opened.model, rows)
        assert names | {"blocks.0.attention.qkv", "blocks.0.attention.out"} <= ranges.keys()
    seen = []
    layer = opened.model.blocks["0"].attention.qkv
    hook = layer.register_forward_hook(lambda _m, given, _o: seen.append(given[0].abs().max().item()))
    with torch.inference_mode():
        opened.model.hidden(torch.from_numpy(rows.calibration))
    hook.remove()
    assert 0.1 * seen[0] < ranges["blocks.0.attention.qkv"] <= seen[0] * 1.0001
    write_calibration(bert_dir, tmp_path / "calibration", text)
    assert verify_artifact(tmp_path / "calibration").kind == "calibration"
    assert read_calibration(tmp_path / "calibration", opened.input) == pytest.approx(ranges)
    with pytest.raises(Refused, match="made from another model"):
        read_calibration(tmp_path / "calibration", open_model(gpt_dir).input)


def test_int8_by_a_calibration_artifact(bert_dir: Path, text: Path, tmp_path: Path) -> None:
    write_calibration(bert_dir, tmp_path / "calibration", text)
    judging = Judging(text=text, calibration=tmp_path / "calibration", bench=False, bounds=LOOSE)
    report = export_onnx(bert_dir, tmp_path / "out", GraphOptions("portable", "int8"), judging=judging)
    manifest = read_manifest(tmp_path / "out")
    assert {item.kind for item in manifest.inputs} == {"foreign", "calibration"}
    assert manifest.facts["precision"] == "int8" and 0 < manifest.facts["text_kl"] < 1
    assert report["text"]["predictions"] == len(read_rows(text, bert_dir / "tokenizer.json", 64).judging) * 9
    assert open_backend(tmp_path / "out").encoder is not None
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["layers"][1]["max_abs"] > 0


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_without_text_rounded_weights_are_not_written(precision, gpt_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="judged on real text"):
        export_onnx(gpt_dir, tmp_path / "out", GraphOptions("onnxruntime", precision))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_says_other_things_is_refused(gpt_dir: Path, text: Path, tmp_path: Path) -> None:
    """4 bits of a random model with enlarged weights are far off: the bound on text stops it."""
    judging = Judging(text=text, bench=False)
    with pytest.raises(Refused, match="says other things than the torch model on real text") as caught:
        export_onnx(gpt_dir, tmp_path / "out", GraphOptions("onnxruntime", "int4"), judging=judging)
    assert "mean KL" in caught.value.why and list(tmp_path.iterdir()) == []


def test_a_score_that_falls_is_refused(gpt_dir: Path, tmp_path: Path) -> None:
    def score(loaded: Loaded) -> dict[str, float]:
        return {"task acc": 0.5 if loaded.causal.name == "torch" else 0.4}

    with pytest.raises(Refused, match="scores lower") as caught:
        export_onnx(gpt_dir, tmp_path / "out", judging=Judging(score=score, bench=False))
    assert "0.5000 became 0.4000" in caught.value.why
    report = export_onnx(
        gpt_dir, tmp_path / "out", judging=Judging(score=lambda _: {"acc": 0.5}, bench=False)
    )
    assert report["scores"]["difference"] == {"acc": 0.0}


def test_numbers_of_the_text_report(gpt_dir: Path, text: Path) -> None:
    """KL and agreement against plain formulas, on logits that are known."""
    opened = open_model(gpt_dir)
    rows = read_rows(text, opened.tokenizer, 160)

    class Fixed:
        name, vocab_size, context, limits = "fixed", 304, 160, Limits()

        def __init__(self, shift: float) -> None:
            self.shift = shift

        def new_cache(self, rows: int) -> None:
            return None

        def step(self, spans, cache):
            ids = np.concatenate([span.ids for span in spans])
            found = np.random.default_rng(int(ids.sum())).normal(size=(len(ids), 304)).astype(np.float32)
            found[..., 7] += self.shift
            return found

    both = [Loaded(opened.model.config, None, Input("", "", ""), Fixed(s)) for s in (0.0, 0.5)]
    report = compare_on_text(*both, rows, BOUNDS["int8"])
    ids = rows.judging
    spans = [Span(row, 0, line, len(line)) for row, line in enumerate(ids)]
    logits = (torch.tensor(b.causal.step(spans, None)).unflatten(0, (len(ids), -1)) for b in both)
    one, two = (each[:, :-1].log_softmax(-1).flatten(0, 1) for each in logits)
    expected = torch.nn.functional.kl_div(two, one, log_target=True, reduction="batchmean")
    assert report["kl"] == pytest.approx(float(expected), rel=1e-4)  # float32 against float32
    assert report["top1_agreement"] == float((one.argmax(-1) == two.argmax(-1)).double().mean())
    loss = torch.nn.functional.nll_loss(one, torch.tensor(ids[:, 1:]).flatten())
    assert report["torch_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert compare_on_text(both[0], both[0], rows, BOUNDS["fp32"])["kl"] == pytest.approx(0, abs=1e-7)
    assert report["predictions"] == rows.judging.shape[0] * 127


def test_disagreements_that_show_nothing_are_allowed() -> None:
    """Against a sum of the binomial distribution in whole numbers; a bound of 0 allows all, of 1 a single tie."""
    for predictions, bound in ((118, 0.98), (1163, 0.999), (400, 0.95), (50, 0.9999)):
        allowed = allowed_disagreements(predictions, bound)
        wrong = Fraction(1) - Fraction(str(bound))
        chances = [
            comb(predictions, k) * wrong**k * (1 - wrong) ** (predictions - k) for k in range(allowed + 1)
        ]
        assert sum(chances) >= Fraction(99, 100)
        assert allowed == 1 or sum(chances[:-1]) < Fraction(99, 100)
    assert allowed_disagreements(1163, 0.999) == 4
    assert allowed_disagreements(10, 0.0) == 10
    assert allowed_disagreements(10, 1.0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_trained_weights_keep_their_answers(family: str, tmp_path: Path) -> None:
    """All precisions within their bounds on held-out text, on a small model trained here for half a minute."""
    model_dir = trained(family, tmp_path)
    held_out = tmp_path / "held-out.txt"
    held_out.write_text(SHAKESPEARE.read_text()[-110_000:])
    forms = [("portable", "fp16"), ("onnxruntime", "int8"), ("portable", "int8"), ("tensorrt", "int8")]
    for form in forms + [("onnxruntime", "int4")] * (family == "gpt"):
        judging = Judging(text=held_out, bench=False)
        report = export_onnx(
            model_dir, tmp_path / "out", GraphOptions(*form), judging=judging, overwrite=True
        )["text"]
        assert report["contested_predictions"] > 50
        assert abs(report["exported_loss"] - report["torch_loss"]) < 0.01
        print(form, report)


def trained(family: str, path: Path) -> Path:
    """A model of 2 layers and width 64 that knows the common words of Shakespeare."""
    import tokenizers
    from safetensors.torch import save_file
    from throughline.models.config import BERTConfig, GPTConfig
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build

    words = SHAKESPEARE.read_text()[:-110_000]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if family == "bert" else ["<|endoftext|>"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(unk_token=special[-1] if family == "gpt" else "[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(words.splitlines(), trainer)
    tokenizer.add_special_tokens(special)
    ids = np.array(tokenizer.encode(words).ids)
    kind = GPTConfig if family == "gpt" else BERTConfig
    more = {} if family == "gpt" else {"nsp": False}
    config = kind(
        vocab_size=tokenizer.get_vocab_size(), sequence_length=130, layers=2, width=64, heads=4, **more
    )
    model = build(config, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rng = np.random.default_rng(0)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / 200)
        rows = torch.tensor(np.stack([ids[at : at + 129] for at in rng.integers(0, len(ids) - 129, 16)]))
        if family == "gpt":
            logits, targets = model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
        else:
            hidden_ones = torch.tensor(rng.random(rows.shape) < 0.15)
            hidden = model.hidden(rows.masked_fill(hidden_ones, 4))
            logits, targets = model.mlm_head(hidden[hidden_ones]), rows[hidden_ones]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
    directory = path / family
    directory.mkdir()
    fields, state = to_huggingface(model)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_scales_reach_the_graph(gpt_dir: Path, text: Path, tmp_path: Path) -> None:
    """The scale of a layer's input is its range / 127, in the type of the graph."""
    import onnx

    judging = Judging(text=text, bench=False, bounds=LOOSE)
    export_onnx(gpt_dir, tmp_path / "out", GraphOptions("tensorrt", "int8"), judging=judging)
    opened = open_model(gpt_dir)
    ranges = calibrate(opened.model, read_rows(text, opened.tokenizer, 160))
    stored = {tensor.name: tensor for tensor in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer}
    scale = onnx.numpy_helper.to_array(stored["blocks.0.mlp.up.input_scale"])
    assert scale.dtype == np.float16 and scale == pytest.approx(
        ranges["blocks.0.mlp.up"] / INT8_MAX, rel=1e-3
    )


def test_rows_of_a_decoder_begin_with_its_bos(sentencepiece_dir: Path, text: Path) -> None:
    rows = read_rows(text, sentencepiece_dir / "tokenizer.json", 64)
    assert (rows.ids_RS[:, 0] == 1).all() and rows.ids_RS.shape[1] <= 64 and (rows.ids_RS[:, 1:] != 1).all()
