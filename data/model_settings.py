"""What stands beside a tokenizer.json in a model directory: the chat template, the end tokens, the defaults
of sampling.
"""

import json
import re
from pathlib import Path
from typing import Any

from ..core.artifact import OPEN
from ..core.errors import Refused
from ..core.files import read_json
from .tokenizer import CONFIG, Tokenizer

CHAT, GENERATION = OPEN
MODEL_CONFIG = "config.json"
# The settings of sampling that generation_config.json may state, by their names there and in a request.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def beside_model(directory: Path, name: str) -> Path:
    """A file of settings of a model directory; of a checkpoint that has none, its run's."""
    own = directory / name
    return own if own.is_file() or directory.parent.name != "checkpoints" else directory.parents[1] / name


def settings_of(directory: Path, name: str) -> dict[str, Any]:
    """The content of a file of settings, empty where there is none. Raises Refused for what is no JSON
    object.
    """
    file = beside_model(directory, name)
    if not file.is_file():
        return {}
    stated = read_json(file)
    if not isinstance(stated, dict):
        raise Refused(f"not a {name}", where=file, why="it is no JSON object", fix="restore the file")
    return stated


def end_ids(directory: Path | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a text, in order: of generation_config.json, config.json and the tokenizer together.

    `directory`: the model's, None where there is none. A chat has the ends of its turns besides:
    `ChatTemplate.end_ids`.
    """
    ends = set() if directory is None else stated_ends(directory)
    if tokenizer.eos_id is not None:
        ends.add(tokenizer.eos_id)
    return tuple(sorted(ends))


def stated_ends(directory: Path) -> set[int]:
    """The end tokens that generation_config.json and config.json of a model directory name."""
    config = settings_of(directory, MODEL_CONFIG)
    text_config = config.get("text_config")  # of a model with vision
    ends = set[int]()
    for settings in (settings_of(directory, GENERATION), config, text_config):
        stated = settings.get("eos_token_id") if isinstance(settings, dict) else None
        several = stated if isinstance(stated, list) else [stated]
        ends.update(i for i in several if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    return ends


def sampling_defaults(directory: Path | None) -> dict[str, float]:
    """The sampling that generation_config.json asks for, by names of `SAMPLING`; only what it states.

    `"do_sample": false` is greedy: temperature 0. Raises Refused for a value that is no number.
    """
    if directory is None:
        return {}
    stated = settings_of(directory, GENERATION)
    defaults: dict[str, float] = {}
    for name in SAMPLING:
        value = stated.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            why = f"{name} is {value!r}"
            raise Refused("a setting is no number", where=directory / GENERATION, why=why, fix="correct it")
        defaults[name] = value
    if stated.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def chat_template(directory: Path) -> str | None:
    """The chat template of a model directory: its file, or the (default) one in tokenizer_config.json."""
    if (file := beside_model(directory, CHAT)).is_file():
        return file.read_text(encoding="utf-8")
    stated = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    source = stated.get("chat_template") if isinstance(stated, dict) else None
    if isinstance(source, list):  # several by name
        source = next((one["template"] for one in source if one.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def write_beside(target: Path, tokenizer: Tokenizer, source: Path | None, longest: int) -> None:
    """Write what stands beside a tokenizer.json to a directory: tokenizer_config.json, which names the
    special tokens, and of the directory `source` what `copy_chat` takes.
    """
    texts = {i: text for text, i in tokenizer.vocab.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    config |= {f"{role}_token": texts[i] for role, i in tokenizer.special.items()}
    (target / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    if source is not None:
        copy_chat(source, target)


def copy_chat(source: Path, target: Path) -> None:
    """Copy the chat template and the defaults of generation of a model directory, as far as it has them.

    End tokens that its config.json alone names are added to the defaults: the target's config.json is another.
    """
    if (template := chat_template(source)) is not None:
        (target / CHAT).write_text(template, encoding="utf-8")
    defaults, ends = settings_of(source, GENERATION), sorted(stated_ends(source))
    named = defaults.get("eos_token_id")
    known = named if isinstance(named, list) else [named]
    if any(i not in known for i in ends):
        defaults["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        (target / GENERATION).write_text(json.dumps(defaults, indent=1) + "\n")
    elif (file := beside_model(source, GENERATION)).is_file():
        (target / GENERATION).write_bytes(file.read_bytes())


def no_end(tokenizer: Tokenizer) -> str:
    """A sentence for a tokenizer whose end-of-text token is unknown: how to name the token."""
    texts = [token.content for token in tokenizer.added_tokens.values()]
    likely = [text for text in texts if re.search("end|eos|eot|</s>|stop", text, re.IGNORECASE)]
    name = f'"eos_token": "{(likely or ["TOKEN"])[0]}"'
    what = "no end-of-text token is known of the tokenizer"
    file = Path(tokenizer.where).parent / CONFIG
    if file.is_file():
        return f"{what}; add {name} to {file}"
    return f"{what}; name it: echo '{{{name}}}' > {file}"
