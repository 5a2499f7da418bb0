"""Chat templates of the published forms with their tokenizers.

`chat_forms/NAME.jinja` has each in words of our own: the structure is the documented one, the sentences of system
prompts are not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizer_fixtures import byte_level, sentencepiece
from tokenizers import AddedToken, decoders, normalizers, processors

TEMPLATES = Path(__file__).with_name("chat_forms")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place: <b>sun</b> & naïve \u96e8",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Ein Ort"}},
                "required": ["place"],
            },
        },
    }
]


@dataclass(frozen=True)
class ChatForm:
    """A template's form. `special` and `ordinary` are the added tokens that it writes, besides those of its base."""

    base: Callable[[], tokenizers.Tokenizer]
    bos: str
    eos: str
    turn_end: str  # the token behind an answer
    special: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = ()
    strips: bool = False  # its special tokens take the white space behind them
    system: bool = True
    tools: bool = False
    settings: tuple[dict[str, Any], ...] = field(default_factory=lambda: ({},))

    def library(self) -> tokenizers.Tokenizer:
        made = self.base()
        made.add_special_tokens(
            [AddedToken(name, normalized=False, rstrip=self.strips) for name in self.special]
        )
        made.add_tokens([AddedToken(name, normalized=False) for name in self.ordinary])
        return made

    def write(self, name: str, directory: Path) -> Path:
        """Tokenizer, its settings and the template as a model directory has them."""
        directory.mkdir(parents=True)
        library = self.library()
        library.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos}
        settings |= {"bos_token": self.bos} if self.bos else {}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (directory / "chat_template.jinja").write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
        return directory


def without_bos() -> tokenizers.Tokenizer:
    """Byte-level BPE that adds nothing to a text, as Qwen's."""
    made = byte_level()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def gemma() -> tokenizers.Tokenizer:
    """SentencePiece's BPE without a blank before the text; runs of line breaks and HTML are the user's tokens."""
    made = sentencepiece()
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in ("<bos>", "<eos>")])
    made.add_tokens([AddedToken(name, normalized=False) for name in ("\n", "\n\n\n", "<h1>", "</h1>")])
    bos = made.token_to_id("<bos>")
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", bos)])
    return made


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        "begin\u2581of\u2581sentence",
        "end\u2581of\u2581sentence",
        "tool\u2581calls\u2581begin",
        "tool\u2581calls\u2581end",
        "tool\u2581call\u2581begin",
        "tool\u2581call\u2581end",
        "tool\u2581sep",
        "tool\u2581output\u2581begin",
        "tool\u2581output\u2581end",
    )
)
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
THINKS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})

FORMS = {
    "llama-2": ChatForm(sentencepiece, "<s>", "</s>", "</s>"),
    "llama-3.1": ChatForm(
        byte_level,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        ("<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
        tools=True,
        settings=({}, {"date_string": "26 Jul 2024"}),
    ),
    "mistral": ChatForm(
        sentencepiece, "<s>", "</s>", "</s>", (*MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), tools=True
    ),
    "gemma": ChatForm(gemma, "<bos>", "<eos>", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "phi-3": ChatForm(sentencepiece, "<s>", "<|endoftext|>", "<|end|>", ("<|endoftext|>",)),
    "phi-4": ChatForm(without_bos, "", "<|im_end|>", "<|im_end|>", (*CHATML, "<|im_sep|>"), strips=True),
    "qwen-2.5": ChatForm(without_bos, "", "<|im_end|>", "<|im_end|>", CHATML, CALLS, tools=True),
    "qwen-3": ChatForm(
        without_bos, "", "<|im_end|>", "<|im_end|>", CHATML, ("<think>", *CALLS), tools=True, settings=THINKS
    ),
    "smollm3": ChatForm(
        without_bos,
        "",
        "<|im_end|>",
        "<|im_end|>",
        CHATML,
        ("<think>", *CALLS),
        settings=(*THINKS, {"xml_tools": TOOLS}),
    ),
    "deepseek-v3": ChatForm(
        byte_level,
        DEEPSEEK[0],
        DEEPSEEK[1],
        DEEPSEEK[1],
        DEEPSEEK,
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>"),
        tools=True,
        settings=({}, {"thinking": True}),
    ),
    "gpt-oss": ChatForm(
        without_bos,
        "",
        "<|return|>",
        "<|return|>",
        HARMONY,
        tools=True,
        settings=({}, {"reasoning_effort": "high"}),
    ),
    "hermes": ChatForm(without_bos, "", "<|im_end|>", "<|im_end|>", CHATML, CALLS, tools=True),
}
