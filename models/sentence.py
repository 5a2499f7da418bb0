"""How a directory makes the vector of a text, in the files of sentence-transformers: read, obeyed and written.

| file | what is read of it |
|---|---|
| modules.json | Transformer, Pooling and Normalize in this order; with anything else the directory is refused |
| 1_Pooling/config.json | the mean over the tokens, the first ([CLS]) or the last; no other pooling is here |
| sentence_bert_config.json | `max_seq_length`, special tokens included, and `do_lower_case` |
| config_sentence_transformers.json | the text that stands before every text (`prompts`, `default_prompt_name`) |

A BERT's directory without modules.json has the mean; a decoder embeds only where there is one (Qwen3-Embedding), and
generates elsewhere. `embed` and the server scale every vector to length 1.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from ..core.errors import Refused, WrongUse
from ..core.files import read_json

Pooling = Literal["mean", "cls", "mean-normalised", "cls-normalised"]
POOLINGS: dict[str, Literal["mean", "cls", "last"]]
POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"


@dataclass(frozen=True)
class Sentence:
    """What becomes of a text before the model, and of the model's vectors behind it."""

    pooling: Literal["mean", "cls", "last"] = "mean"
    normalised: bool = False
    longest: int | None = None  # tokens of a text with the special ones; None: the model's context
    lowercase: bool = False
    prompt: str = ""
    prompts: dict[str, str] = field(default_factory=dict)  # by name, as "query" and "document"
    inside: bool = False  # in a graph, whose `sentence_embedding` is of this pooling and of no other

    @property
    def name(self) -> Pooling:
        """The pooling as `export --pooling` calls it."""
        return cast(Pooling, self.pooling + "-normalised" * self.normalised)

    def pooled(self, name: Pooling | None) -> "Sentence":
        """The same with a pooling as `export --pooling` calls it; None is its own."""
        pooling: Any
        pooling, _, normalised = (name or self.name).partition("-")
        return replace(self, pooling=pooling, normalised=bool(normalised))

    def prompted(self, asked: str | None, named: bool = False) -> "Sentence":
        """The same with one of its prompts, or a text before every text. Raises WrongUse where it must be `named`."""
        if named and asked and asked not in self.prompts:
            known = ", ".join(self.prompts) or "none: put it before your texts"
            raise WrongUse(f"no prompt {asked!r}", where="prompt_name", fix=f"the model's: {known}")
        return self if asked is None else replace(self, prompt=self.prompts.get(asked, asked))

    def output(self, asked: str | None = None) -> str:
        """The encoder's output by this pooling or the one asked for. Raises WrongUse where a graph has it not."""
        wanted = asked or self.pooling
        if wanted == (self.pooling if self.inside else "mean"):
            return "sentence_embedding"
        if wanted != "mean":
            return f"{wanted}_embedding"
        fix = f"leave it out, or export the model again with --pooling {wanted}"
        raise WrongUse("the graph of this model pools [CLS] itself", where="pooling", fix=fix)

    def text(self, text: str) -> str:
        """The text as the tokenizer gets it. The prompt is lowered too, as in sentence-transformers."""
        prompted = self.prompt + text
        return prompted.lower() if self.lowercase else prompted

    def context(self, tokens: int) -> int:
        """The tokens of the longest text, for a model of so many."""
        return min(tokens, self.longest or tokens)

    def write(self, folder: Path, width: int, context: int) -> None:
        """The files, as sentence-transformers, TEI and vLLM read them too."""
        places = ["", "1_Pooling", "2_Normalize"][: 2 + self.normalised]
        kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Normalize")]
        tokens = ("cls_token", "mean_tokens", "lasttoken")
        modes = {f"pooling_mode_{mode}": POOLINGS[mode] == self.pooling for mode in tokens}
        texts = {"max_seq_length": self.context(context), "do_lower_case": self.lowercase}
        chosen = next((name for name, text in self.prompts.items() if text == self.prompt), "default")
        prompts = self.prompts | ({chosen: self.prompt} if self.prompt else {})
        files: dict[str, Any] = {
            MODULES: [
                {"idx": i, "name": str(i), "path": place, "type": kind}
                for i, (place, kind) in enumerate(zip(places, kinds))
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": width} | modes,
            "sentence_bert_config.json": texts,
            PROMPTS: {"prompts": prompts, "default_prompt_name": chosen if self.prompt else None},
        }
        for place in places:
            (folder / place).mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


MEAN = Sentence()


def embeds(folder: Path) -> bool:
    """Whether a directory says how its model embeds: a decoder there reads texts, and writes none."""
    return (folder / MODULES).is_file()


def read_sentence(folder: Path) -> Sentence:
    """How the model in a directory embeds. Raises Refused for a way that is not here."""
    if not embeds(folder):
        return MEAN
    where = folder / MODULES
    places = {module["type"].rpartition(".")[2]: module["path"] for module in read_json(where)}
    if odd := [kind for kind in places if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise _lacking(where, f"its texts or vectors go through {', '.join(odd)}")
    if places.get("Transformer"):
        raise _lacking(where, f"its model lies in the directory {places['Transformer']}")
    settings = [read_json(file) for file in folder.glob("sentence_*_config.json")]
    given = settings[0] if settings else {}
    named = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    prompts, chosen = named.get("prompts") or {}, named.get("default_prompt_name")
    prompt = prompts.get(chosen) or ""
    pooling = folder / places.get("Pooling", "1_Pooling") / "config.json"
    modes = read_json(pooling)
    if prompt and not modes.get("include_prompt", True):
        raise _lacking(pooling, "the prompt's tokens are left out of its mean")
    longest, lowercase = given.get("max_seq_length"), bool(given.get("do_lower_case"))
    return Sentence(_pooling(modes, pooling), "Normalize" in places, longest, lowercase, prompt, prompts)


def _pooling(modes: dict[str, Any], where: Path) -> Literal["mean", "cls", "last"]:
    switches = [name for name, on in modes.items() if name.startswith("pooling_mode_") and on is True]
    named = [name.removeprefix("pooling_mode_") for name in switches] or [modes.get("pooling_mode", "mean")]
    if named[1:] or named[0] not in POOLINGS:
        raise _lacking(where, f"it pools by {' and '.join(named)}")
    return POOLINGS[named[0]]


def _lacking(where: Path, why: str) -> Refused:
    fix = "here a text's vector is the mean over its tokens, or that of the first or last; use sentence-transformers"
    return Refused("this directory embeds in a way that is not here", where=where, why=why, fix=fix)
