"""On a CUDA device a training step does what it does on the CPU, in every precision, and a checkpoint
continues it there.

Needs torch, numpy and safetensors only (make gpu-check runs on a bare machine).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build
from throughline.train.checkpoints.checkpoint import CheckpointWriter, load_model, restore
from throughline.train.engine import Engine
from throughline.train.objective import StepBatch, prepare
from throughline.train.step import LossScaler, Trainer, train_step

pytestmark = pytest.mark.gpu
ROWS, LENGTH, VOCABULARY = 8, 64, 256
SHAPE = {"vocab_size": VOCABULARY, "sequence_length": LENGTH, "layers": 2, "width": 64, "heads": 4}
# of the loss of a fresh model, relative: rounding of 24, 8 and 11 bits in a few dozen products
LOSS_BOUND = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


def make_trainer(family: str, device: str, precision: str = "fp32", dropout: float = 0.0) -> Trainer:
    config = (GPTConfig if family == "gpt" else BERTConfig)(**SHAPE, dropout=dropout)
    torch.manual_seed(1)
    engine = Engine.holding(build(config, 1, device).train(), precision, torch.device(device))
    optimizer = torch.optim.AdamW(
        [{"params": [value for _, value in engine.named_parameters()], "base_lr": 1e-3}], lr=1e-3, fused=True
    )
    return Trainer(engine, optimizer, LossScaler.of(precision), precision, 1.0)


def batch_of(family: str, device: str, seed: int = 0) -> StepBatch:
    draw = np.random.default_rng(seed)
    ids = draw.integers(5, VOCABULARY, (ROWS, LENGTH + 1))
    rows = {"input_ids": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}
    if family == "bert":
        rows["targets"][draw.random((ROWS, LENGTH)) > 0.15] = -100
        rows["token_types"] = np.zeros((ROWS, LENGTH), np.int64)
        rows["attention_mask"] = np.arange(LENGTH)[None] < draw.integers(LENGTH // 2, LENGTH, (ROWS, 1))
        rows["nsp_targets"] = draw.integers(0, 2, ROWS)
    return prepare(rows, family, ROWS // 2, torch.device(device), 0.15)


@pytest.mark.parametrize("precision", LOSS_BOUND)
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_step_equals_the_cpu(family: str, precision: str) -> None:
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this card has no bf16")
    expected = train_step(make_trainer(family, "cpu"), batch_of(family, "cpu"), 1.0)
    trainer = make_trainer(family, "cuda", precision)
    while (
        found := train_step(trainer, batch_of(family, "cuda"), 1.0)
    ).skipped:  # the fp16 scale finds its place
        assert trainer.skipped < 12
    assert found.loss == pytest.approx(expected.loss, rel=LOSS_BOUND[precision])
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * LOSS_BOUND[precision])


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_checkpoint_continues_with_the_same_dropout(family: str, tmp_path: Path) -> None:
    """CUDA's atomic sums are not bitwise repeatable; another dropout mask would move the loss a thousand
    times more.
    """
    whole = make_trainer(family, "cuda", dropout=0.2)
    writer = CheckpointWriter(tmp_path, 0)
    losses = []
    for step in range(6):
        if step == 3:
            writer.save(whole)
        losses.append(train_step(whole, batch_of(family, "cuda", step), 1.0).loss)
    writer.close()
    again = make_trainer(family, "cuda", dropout=0.2)
    restore(tmp_path / "step-00000003", again)
    assert again.samples == 3 * ROWS
    resumed = [train_step(again, batch_of(family, "cuda", step), 1.0).loss for step in range(3, 6)]
    assert resumed == pytest.approx(losses[3:], rel=1e-5)
    model, _ = load_model(tmp_path / "step-00000003", device="cuda")
    assert next(model.parameters()).is_cuda
