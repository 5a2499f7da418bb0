"""Directories of sentence-transformers are embedded as their files say, or refused: by `embed`, files, the server's
model, exports and back.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from throughline.core.backend import BackendOptions
from throughline.core.errors import Refused, WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.eval.opening import open_scorer
from throughline.inference.exports.export import Judging, export_onnx
from throughline.inference.exports.handover import export_huggingface
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.runtimes.backends import open_backend, open_text_model
from throughline.inference.serving.offline import embed_file, embed_texts
from throughline.models.sentence import Sentence, read_sentence
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CPU = BackendOptions(device="cpu", threads=1)
QUIET = Judging(bench=False)
TEXT = "The lazy dog jumps again."
KIND = "sentence_transformers.models."
QUERY = "Which dog is lazy?"
DOCUMENTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A model reads.",
    "café, naïve, ½ and 東京 again",
]


@pytest.fixture
def sentence_dir(bert_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A directory as sentence-transformers writes it, with other contents of some files."""

    def make(pooling: dict, **files: dict | list) -> Path:
        folder = shutil.copytree(bert_dir, tmp_path / "sentence")
        modules = [
            {"path": "", "type": f"{KIND}Transformer"},
            {"path": "1_Pooling", "type": f"{KIND}Pooling"},
        ]
        (folder / "1_Pooling").mkdir()
        written = {"1_Pooling/config": pooling, "modules": modules} | files
        for name, content in written.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return make


def vector(folder: Path, text: str, pooling: str = "mean", length: int = 64) -> np.ndarray:
    """By hand: the tokens of a text in [CLS] and [SEP], the model's states, their pooling, length 1."""
    tokenizer, loaded = Tokenizer.load(folder), open_backend(folder, CPU)
    ids = np.array([[tokenizer.cls_id, *tokenizer.encode(text)[: length - 2], tokenizer.sep_id]], np.int64)
    outputs = loaded.backend.forward(ids, np.zeros_like(ids), np.ones(ids.shape, bool), ids[:, :0])
    states = outputs["last_hidden_state"][0]
    found = states[0] if pooling == "cls" else states.mean(0)
    return found / np.linalg.norm(found)


MODES = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (MODES | {"pooling_mode_cls_token": True}, "cls"),
        (MODES | {"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({}, "mean"),
    ],
)
def test_the_pooling_is_the_directorys(sentence_dir, tmp_path: Path, modes: dict, pooling: str) -> None:
    folder = sentence_dir(modes)
    wanted, other = (vector(folder, TEXT, name) for name in (pooling, "mean" if pooling == "cls" else "cls"))
    [found] = embed_texts(folder, [TEXT], CPU)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(found - other).max() > 0.01
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": TEXT}) + "\n")
    embed_file(folder, source, tmp_path / "out.jsonl", CPU)
    written = json.loads((tmp_path / "out.jsonl").read_text())["embedding"]
    np.testing.assert_allclose(written, wanted, atol=1e-5)


def test_length_case_and_prompt_are_the_directorys(sentence_dir) -> None:
    folder = sentence_dir(
        {"pooling_mode_mean_tokens": True},
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Again: "}, "default_prompt_name": "query"},
    )
    assert read_sentence(folder) == Sentence(
        longest=12, lowercase=True, prompt="Again: ", prompts={"query": "Again: "}
    )
    long = "Over the Dog " * 20
    with pytest.raises(WrongUse, match="longer than the model's context") as refused:
        embed_texts(folder, [long], CPU)
    assert "> 12" in refused.value.why
    [found] = embed_texts(folder, [long], CPU, truncate=True)
    np.testing.assert_allclose(found, vector(folder, f"again: {long.lower()}", length=12), atol=1e-5)


@pytest.mark.parametrize(
    ("modes", "files", "why"),
    [
        (MODES | {"pooling_mode_max_tokens": True}, {}, "max_tokens"),
        (
            MODES | {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            {},
            "cls_token and max_tokens",
        ),
        ({"pooling_mode": "weightedmean"}, {}, "weightedmean"),
        ({}, {"modules": [{"path": "2_Dense", "type": f"{KIND}Dense"}]}, "Dense"),
        ({}, {"modules": [{"path": "0_BERT", "type": f"{KIND}Transformer"}]}, "0_BERT"),
        (
            {"include_prompt": False},
            {"config_sentence_transformers": {"prompts": {"q": "q: "}, "default_prompt_name": "q"}},
            "prompt",
        ),
    ],
)
def test_what_is_not_here_is_refused_by_name(sentence_dir, modes: dict, files: dict, why: str) -> None:
    with pytest.raises(Refused, match="embeds in a way that is not here") as refused:
        embed_texts(sentence_dir(modes, **files), [TEXT], CPU)
    assert why in refused.value.why


@pytest.mark.parametrize("pooling", ["mean", "cls", "cls-normalised"])
def test_an_export_comes_back_as_what_it_is(bert_dir: Path, tmp_path: Path, pooling: str) -> None:
    """Both forms of one model: the same vectors, by the pooling asked for; and a graph of the directory keeps it."""
    export_huggingface(bert_dir, tmp_path / "hf", judging=QUIET, pooling=pooling)
    export_onnx(bert_dir, tmp_path / "onnx", GraphOptions(pooling=pooling), judging=QUIET)
    export_onnx(tmp_path / "hf", tmp_path / "again", judging=QUIET)
    wanted = vector(bert_dir, TEXT, pooling.partition("-")[0])
    for name in ("hf", "onnx", "again"):
        np.testing.assert_allclose(
            embed_texts(tmp_path / name, [TEXT], CPU)[0], wanted, atol=1e-4, err_msg=name
        )


def test_a_graph_that_pools_itself_gives_no_other_pooling(bert_dir: Path, tmp_path: Path) -> None:
    """`"pooling": "mean"` asked of it would be answered with [CLS]."""
    export_onnx(bert_dir, tmp_path / "cls", GraphOptions(pooling="cls"), judging=QUIET)
    sentence = open_backend(tmp_path / "cls", CPU).sentence
    assert sentence.output() == sentence.output("cls") == "sentence_embedding"
    with pytest.raises(WrongUse, match=r"pools \[CLS\] itself"):
        sentence.output("mean")


PROMPTS = {"prompts": {"query": "Instruct: find\nQuery:", "document": ""}, "default_prompt_name": None}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def decoder_dir(request: pytest.FixtureRequest, sentence_dir, gpt_dir: Path) -> Path:
    """As Qwen3-Embedding is published: no output matrix, no prefix, an end-of-text token behind every text."""
    transformers = pytest.importorskip("transformers")
    folder = sentence_dir(MODES | {"pooling_mode_lasttoken": True}, config_sentence_transformers=PROMPTS)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "vocab_size": 304}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**shape, tie_word_embeddings=request.param))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(number))
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(gpt_dir / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_decoder_embeds_by_its_last_token(
    decoder_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Texts of several lengths together, by `embed`, the server and a directory written back, as transformers has the
    last token of each alone; and it neither generates nor becomes a graph, which would embed otherwise.
    """
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3Model.from_pretrained(decoder_dir).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(decoder_dir / "tokenizer.json"))

    def wanted(text: str) -> np.ndarray:
        ids = tokenizer(text).input_ids
        assert ids[-1] == 0
        with torch.inference_mode():
            vector = theirs(torch.tensor([[*ids[:63], 0] if len(ids) > 64 else ids])).last_hidden_state[0, -1]
        return (vector / vector.norm()).numpy()

    texts = ["A model reads", "text", "The quick brown fox jumps over the lazy dog"]
    close = partial(np.testing.assert_allclose, atol=2e-6)
    close(embed_texts(decoder_dir, texts, CPU), [wanted(text) for text in texts])
    query = "Instruct: find\nQuery:text"
    close(embed_texts(decoder_dir, ["text"], CPU, prompt="query")[0], wanted(query))
    close(embed_texts(decoder_dir, ["dog " * 99], CPU, truncate=True)[0], wanted("dog " * 99))
    export_huggingface(decoder_dir, tmp_path / "hf", judging=QUIET)
    close(embed_texts(tmp_path / "hf", texts, CPU, prompt="query")[1], wanted(query))

    async def body(found) -> None:
        request = {"model": "decoder", "input": texts[:2], "prompt_name": "query"}
        answer = (await found.client.post("/v1/embeddings", json=request)).json()
        close(answer["data"][1]["embedding"], wanted(query))
        endpoints = (await found.client.get("/v1/models")).json()["data"][0]["endpoints"]
        assert "/v1/embeddings" in endpoints and "/v1/completions" not in endpoints

    in_thread.run_with(monkeypatch, [f"decoder={decoder_dir}"], body)
    with pytest.raises(WrongUse, match="generating needs a GPT"):
        open_text_model(decoder_dir, "gpt", CPU)
    with pytest.raises(Refused, match="in torch alone"):
        export_onnx(decoder_dir, tmp_path / "onnx", judging=QUIET)


@pytest.fixture
def bare_dir(bert_dir: Path, tmp_path: Path) -> Path:
    """As `BertModel.save_pretrained` and sentence-transformers write an encoder: no heads, no prefix, and a pooler."""
    folder = shutil.copytree(bert_dir, tmp_path / "bare")
    fields = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(fields))
    state = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("bert."): value for name, value in state.items() if name.startswith("bert.")}
    assert len(kept) < len(state) and "pooler.dense.weight" in kept
    save_file(kept, folder / "model.safetensors")
    return folder


def test_an_encoder_without_heads_opens_where_none_is_used(
    bare_dir: Path, bert_dir: Path, tmp_path: Path
) -> None:
    """Its vectors are those of the same encoder with heads, as they lie there, as graph, and written back."""
    transformers = pytest.importorskip("transformers")
    wanted = embed_texts(bert_dir, [TEXT], CPU)[0]
    export_onnx(bare_dir, tmp_path / "onnx", judging=QUIET)
    export_huggingface(bare_dir, tmp_path / "hf", judging=QUIET)
    for folder in (bare_dir, tmp_path / "onnx", tmp_path / "hf"):
        np.testing.assert_allclose(embed_texts(folder, [TEXT], CPU)[0], wanted, atol=1e-4)
    _, told = transformers.BertModel.from_pretrained(
        tmp_path / "hf", add_pooling_layer=False, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with pytest.raises(WrongUse, match="no masked-word head"):
        open_scorer(bare_dir)


@pytest.fixture
def reranker_dir(tmp_path: Path) -> Path:
    """As transformers writes a BGE reranker: XLM-RoBERTa with one label, pieces of a Unigram model, two separators."""
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(models.Unigram())
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([QUERY, *DOCUMENTS] * 9, trainer)
    pair = {"single": "<s> $A </s>", "pair": "<s> $A </s> </s> $B </s>"}
    made.post_processor = processors.TemplateProcessing(**pair, special_tokens=[("<s>", 0), ("</s>", 2)])
    roles = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    roles |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles).save_pretrained(tmp_path / "judge")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": made.get_vocab_size(), "max_position_embeddings": 66, "type_vocab_size": 1}
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**sizes, num_labels=1, layer_norm_eps=1e-5)
    model = transformers.XLMRobertaForSequenceClassification(config)
    for parameter in model.parameters():  # scores that differ
        if parameter.dim() > 1:
            parameter.data.mul_(6)
    model.classifier.out_proj.weight.data.mul_(9)
    model.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_a_reranker_scores_as_transformers_do(
    reranker_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sigmoid of the one label, at each endpoint that ranks; texts of several lengths go in one batch."""
    import transformers

    theirs = transformers.XLMRobertaForSequenceClassification.from_pretrained(reranker_dir).eval()
    read = transformers.AutoTokenizer.from_pretrained(reranker_dir)
    ids = read([QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = theirs(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).logits[:, 0]
    expected = logits.double().sigmoid().numpy()
    assert np.ptp(expected) > 2e-3  # of 1e-4 below

    async def body(found) -> None:
        async def ask(path: str, **fields) -> list[dict]:
            answer = await found.client.post(path, json={"model": "judge"} | fields)
            assert answer.status_code == 200, answer.text
            given = answer.json()
            return given if isinstance(given, list) else given.get("results", given.get("data"))

        ranked = await ask("/v1/rerank", query=QUERY, documents=DOCUMENTS)
        assert [one["index"] for one in ranked] == list(np.argsort(-expected))
        plain = await ask("/rerank", query=QUERY, texts=DOCUMENTS)
        scored = await ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        for rows, name in ((ranked, "relevance_score"), (plain, "score"), (scored, "score")):
            scores = {one["index"]: one[name] for one in rows}
            np.testing.assert_allclose([scores[i] for i in range(3)], expected, atol=1e-4)

    in_thread.run_with(monkeypatch, [f"judge={reranker_dir}"], body)
