"""The special tokens that a tokenizer.json puts around a text: its post-processor."""

from typing import Any


def steps_of(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer.json: none, one, or those of a sequence, which has them under `key`."""
    if step is None:
        return []
    return list(step[key]) if step["type"] == "Sequence" else [step]


def framing_of(post_processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids that a post-processor of a tokenizer.json puts before one text and behind it."""
    before, behind = list[int](), list[int]()
    for step in steps_of(post_processor, "processors"):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            before, behind = [step["cls"][1], *before], [*behind, step["sep"][1]]
        elif step["type"] == "TemplateProcessing":
            first, last = _around(step)
            before, behind = first + before, behind + last
    return before, behind


def _around(template: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The special ids of a template for one text, before the text and behind it."""
    before, behind = list[int](), list[int]()
    ids = before
    for piece in template["single"]:
        if special := piece.get("SpecialToken"):
            ids += template["special_tokens"][special["id"]]["ids"]
        else:
            ids = behind
    return before, behind


def template_of(before: dict[str, int], behind: dict[str, int]) -> Any:
    """The library's post-processor that puts these tokens, by name, before a text and behind it."""
    from tokenizers import processors

    single = [*before, "$A", *behind]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=[*(before | behind).items()]
    )
