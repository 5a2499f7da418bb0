"""Fine-tuned heads: logits of transformers' classes, weights exact in both directions, and the files that are
refused.
"""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from throughline.core.errors import Failed, Refused
from throughline.models.bert import BERT, KINDS, SPAN_LABELS, BERTWithHead, Head
from throughline.models.config import BERTConfig
from throughline.models.huggingface import load_huggingface, to_huggingface
from throughline.models.init import build, build_with_head

CONFIG = BERTConfig(vocab_size=96, sequence_length=24, layers=3, width=48, heads=4)
LABELS = ("negative", "neutral", "positive")


def scattered(kind, **changes):
    """Every parameter random, biases too: with zeros and ones a wrong one could hide."""
    head = Head(kind, {"question-answering": SPAN_LABELS, "embedding": ()}.get(kind, LABELS))
    model = build_with_head(build(dataclasses.replace(CONFIG, **changes)), head)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write(fields, state, directory):
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def their_logits(model, **inputs):
    outputs = model(**inputs)
    if hasattr(outputs, "start_logits"):
        return torch.stack((outputs.start_logits, outputs.end_logits), -1)
    return getattr(outputs, "logits", outputs.last_hidden_state if "last_hidden_state" in outputs else None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_their_head_in_both_directions(kind, tmp_path):
    """Padded pairs of sentences. 1e-4 is the bound of exports; rounding alone is 1e-6."""
    model = scattered(kind)
    write(*to_huggingface(model), tmp_path)
    (their_class,) = to_huggingface(model)[0]["architectures"]
    theirs, report = getattr(transformers, their_class).from_pretrained(tmp_path, output_loading_info=True)
    bare = kind == "embedding"  # has no use for the layer that BertModel puts over [CLS]
    assert all(bare and name.startswith("pooler.") for name in report["missing_keys"])
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    ids = torch.randint(0, 96, (3, 20))
    types = (torch.arange(20) > 8).long().expand(3, 20)
    mask = torch.arange(20) < torch.tensor([20, 13, 5])[:, None]
    with torch.no_grad():
        ours = model(ids, types, mask)
        expected = their_logits(
            theirs.eval(), input_ids=ids, token_type_ids=types, attention_mask=mask.long()
        )
    real = mask if ours.dim() == 3 else slice(None)
    assert (ours[real] - expected[real]).abs().max() < 1e-4
    assert ours.abs().max() > 0.1, "logits near zero would agree by themselves"

    theirs.save_pretrained(tmp_path / "again")
    again = load_huggingface(tmp_path / "again")
    assert isinstance(again, BERTWithHead)
    assert again.head == model.head
    for (name, mine), (_, read) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(mine, read), name


def test_a_head_keeps_the_encoder_and_draws_the_rest():
    """The encoder's values are copied; a BERT without a pooler gets one, and the seed decides its values."""
    encoder = build(dataclasses.replace(CONFIG, nsp=False), seed=3)
    first, same, other = (build_with_head(encoder, Head(KINDS[0], LABELS), seed) for seed in (0, 0, 1))
    assert torch.equal(first.encoder.token_table.weight, encoder.token_table.weight)
    assert first.encoder.token_table.weight.data_ptr() != encoder.token_table.weight.data_ptr()
    assert torch.equal(first.encoder.pooler.weight, same.encoder.pooler.weight)
    assert not torch.equal(first.encoder.pooler.weight, other.encoder.pooler.weight)
    assert not any(name.startswith(("encoder.mlm", "encoder.nsp")) for name, _ in first.named_parameters())


def test_a_directory_without_a_head_is_read_as_before(tmp_path):
    write(*to_huggingface(build(CONFIG)), tmp_path)
    assert isinstance(load_huggingface(tmp_path), BERT)


@pytest.mark.parametrize(
    ("kind", "change", "error"),
    [
        ("sequence-classification", {"problem_type": "ranking"}, Refused),
        ("token-classification", {"problem_type": "regression"}, Refused),
        ("sequence-classification", {"id2label": {"1": "a", "2": "b", "3": "c"}}, Failed),
        ("sequence-classification", {"hidden_act": "mish"}, Refused),
    ],
)
def test_what_our_heads_cannot_express_is_refused(kind, change, error, tmp_path):
    fields, state = to_huggingface(scattered(kind))
    write(fields | change, state, tmp_path)
    with pytest.raises(error):
        load_huggingface(tmp_path)
