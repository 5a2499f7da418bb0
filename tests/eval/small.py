"""Small GPT-2s as Hugging Face directories, with random or briefly trained weights, that both evaluators
open.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

SHAPE = {"vocab_size": 2000, "n_layer": 2, "n_head": 2, "n_embd": 48, "n_positions": 512}
LLAMA = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
LLAMA |= {"n_embd": "hidden_size", "n_positions": "max_position_embeddings"}
BATCH = (16, 65)  # rows, tokens
LEARNED = (50, 0.92)  # from this step on the loss is below this share of the uniform guess's
SPREAD = 0.1  # standard deviation of what is added to the matrices of a BERT


def small_model(folder: Path, text: str, *, steps: int, llama: bool = False, **shape: int) -> Path:
    """A GPT-2, or a Llama of its sizes, with a vocabulary of its own on `text`, trained on it for a few steps or not
    at all.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = SHAPE | shape
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        text.splitlines(keepends=True),
        vocab_size=shape["vocab_size"],
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if llama:
        sizes = {LLAMA[name]: size for name, size in shape.items()}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **ends, intermediate_size=2 * shape["n_embd"]))
    else:
        model = GPT2LMHeadModel(GPT2Config(**shape, **ends))
    ids = torch.tensor(tokenizer.encode(text).ids)
    train(model, ids, steps)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer._tokenizer.to_str())
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    return folder


def small_bert(folder: Path, text: str, vocabulary: Path, *, steps: int) -> Path:
    """A BERT of 4 layers of 128 with this vocabulary, trained to name 15 % of the tokens behind masks.

    After so few steps a context decides by 1e-5 nats, less than programs differ by: its matrices are spread until it
    decides by tenths.
    """
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    tokenizer = BertTokenizerFast(vocab=str(vocabulary))
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    ids = torch.tensor(tokenizer(text[:400_000], add_special_tokens=False).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = ids[torch.randint(len(ids) - BATCH[1], (BATCH[0], 1)) + torch.arange(BATCH[1])]
        hidden = torch.rand(rows.shape) < 0.15
        loss = model(
            rows.masked_fill(hidden, tokenizer.mask_token_id), labels=rows.masked_fill(~hidden, -100)
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
            matrix.add_(torch.randn(matrix.shape), alpha=SPREAD)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Any, ids: torch.Tensor, steps: int) -> None:
    """Some steps of AdamW on random rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    uniform = torch.tensor(float(model.config.vocab_size)).log()
    for step in range(steps):
        rows = ids[torch.randint(len(ids) - BATCH[1], (BATCH[0], 1)) + torch.arange(BATCH[1])]
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step < LEARNED[0] or loss < LEARNED[1] * uniform, "the model did not learn"
