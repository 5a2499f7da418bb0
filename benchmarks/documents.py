"""Documents that share a row: attention by their bounds, against a dense mask and against padding.

python benchmarks/documents.py [--quick]

`docs-*`: forward and backward of one layer's causal attention (12 heads of 64) over a row of 1,024 tokens that
holds several documents, against torch's fused kernel under the dense mask. `bert-unpadded-*`: forward and backward of
the 4 layers of a BERT over texts of 16 to 256 tokens, ours with the padding left out, against transformers'
BertModel of the same shape on the padded rows with its attention mask, each with its own matrix products. CPU
seconds of one thread, in turn.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from common import claim, finish, paired, parser
from throughline.models.attention import Documents
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig
from throughline.models.init import initialise
from throughline.train.objective import prepare
from torch import Tensor
from torch.nn import functional as F

HEADS, HEAD_SIZE, LENGTH = 12, 64, 1024
PACKED = {"docs-8-equal": [128] * 8, "docs-9-unequal": [300, 17, 210, 96, 5, 150, 64, 120, 62]}
GOAL_DOCUMENTS, GOAL_PADDING = 2.0, 1.0
ROWS, ROW = 16, 256
SHAPE = {"vocab_size": 8192, "sequence_length": ROW, "layers": 4, "width": 256, "heads": 4}


def cpu_seconds(work: Callable[[], None]) -> Callable[[], float]:
    """A measurement of `work`, warmed up."""
    work()

    def measure() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return measure


def attention(lengths: list[int], dtype: torch.dtype) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward over the packed row: by bounds, and under the dense mask, made once."""
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    documents = Documents(torch.from_numpy(bounds).int(), max(lengths))
    mask = documents.mask(1, LENGTH, is_causal=True)
    qkv = torch.randn(1, LENGTH, HEADS, 3, HEAD_SIZE).to(dtype).requires_grad_()

    def run(attend: Callable[..., Tensor]) -> Callable[[], None]:
        def work() -> None:
            q, k, v = (x.transpose(1, 2) for x in qkv.unbind(3))
            torch.autograd.grad(attend(q, k, v).sum(), qkv)

        return work

    return (
        run(lambda q, k, v: documents.attend(q, k, v, True)),
        run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
    )


def bert(precision: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward on the same rows, with gradients from the masked places: ours, transformers'."""
    from transformers import BertConfig, BertModel

    generator = np.random.default_rng(0)
    real = np.arange(ROW) < generator.integers(16, ROW + 1, (ROWS, 1))
    ids = generator.integers(1, SHAPE["vocab_size"], (ROWS, ROW))
    masked = real & (generator.random(real.shape) < 0.15)
    rows = {"input_ids": ids, "targets": np.where(masked, ids, -100), "attention_mask": real}
    model = BERT(BERTConfig.from_dict(SHAPE | {"nsp": False}))
    initialise(model)
    device = torch.device("cpu")
    (micro_batch,) = prepare(rows, "bert", ROWS, device, unpad=True).micro_batches
    peer = BertModel(
        BertConfig(
            vocab_size=SHAPE["vocab_size"],
            hidden_size=SHAPE["width"],
            num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"],
            intermediate_size=4 * SHAPE["width"],
            max_position_embeddings=ROW,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    inputs = {name: torch.from_numpy(rows[name]) for name in ("input_ids", "attention_mask")}
    places = torch.from_numpy(masked.reshape(-1).nonzero()[0])
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    given = ("token_types", "positions", "document_bounds")
    known = {name: micro_batch[name] for name in given if name in micro_batch}

    def ours() -> None:
        with autocast:
            hidden = model.hidden(micro_batch["input_ids"], **known).flatten(0, 1)
            loss = hidden.index_select(0, micro_batch["predicted"]).square().sum()
        loss.backward()

    def theirs() -> None:
        with autocast:
            loss = peer(**inputs).last_hidden_state.flatten(0, 1).index_select(0, places).square().sum()
        loss.backward()

    return ours, theirs


def main() -> int:
    chosen = parser(__doc__ or "").parse_args()
    pairs, claims = 3 if chosen.quick else 9, []
    cases = [
        (f"{name}-{str(dtype)[6:]}", attention(lengths, dtype), "fused kernel, dense mask", GOAL_DOCUMENTS)
        for name, lengths in PACKED.items()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    cases += [
        (f"bert-unpadded-{precision}", bert(precision), "transformers, padded rows", GOAL_PADDING)
        for precision in ("fp32", "bf16")
    ]
    for name, both, peer, goal in cases:
        ours, theirs = map(cpu_seconds, both)
        measured = paired(ours, theirs, pairs)
        claims.append(claim(name, *measured, peer=peer, unit="CPU s", better="lower", goal=goal))
    finish("documents", claims, packages=("transformers",), threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
