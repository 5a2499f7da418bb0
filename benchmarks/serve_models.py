"""The models of `serve.py`, written once: random weights, because speed does not depend on them."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from throughline.inference.serving.load import COMMON


def write_models(folder: Path, quick: bool) -> None:
    """A GPT of 27M parameters (quick: 2.5M) and a BERT like it, random, with tokenizers that have no end of text;
    as ONNX graphs in fp32 and int8, the GPT as GGUF too.
    """
    from safetensors.torch import save_file
    from throughline.inference.exports.export import Judging, export_onnx
    from throughline.inference.exports.gguf_export import export_gguf
    from throughline.inference.graphs.graph_options import GraphOptions
    from throughline.models.config import BERTConfig, GPTConfig
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build

    width, layers = (128, 2) if quick else (512, 6)
    shape: dict[str, Any] = {"sequence_length": 640, "layers": layers, "width": width, "heads": width // 64}
    configs = {
        "gpt": GPTConfig(vocab_size=16384, **shape),
        "bert": BERTConfig(vocab_size=16384, token_types=2, **shape),
    }
    folder.mkdir(parents=True)
    text = folder / "text.txt"  # int8 is judged on text
    words = np.random.default_rng(0).choice(COMMON.split(), 4000)
    text.write_text(" ".join(words))
    for kind, config in configs.items():
        directory = folder / kind
        directory.mkdir()
        fields, state = to_huggingface(build(config, 1))
        save_file({name: t.contiguous() for name, t in state.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(fields))
        tokenizer = gpt_tokenizer() if kind == "gpt" else bert_tokenizer()
        tokenizer.save(str(directory / "tokenizer.json"))
        for precision in ("fp32", "int8"):
            judging = Judging(text=text if precision == "int8" else None, bench=False)
            options = GraphOptions("onnxruntime", precision)
            export_onnx(directory, folder / f"{kind}-{precision}", options, judging=judging)
    if find_spec("gguf") and find_spec("llama_cpp"):
        export_gguf(folder / "gpt", folder / "gpt-q8_0", "q8_0", judging=Judging(bench=False))


def gpt_tokenizer() -> Any:
    """Byte-level BPE in which each of the common words is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([COMMON] * 50, trainer)
    return tokenizer


def bert_tokenizer() -> Any:
    """A token for each of the common words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *COMMON.split()]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer
