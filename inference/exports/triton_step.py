"""The model.py of a Triton repository's tokenizer: texts become the ids that the model beside it takes.

It runs in Triton's Python back end, without this package: `settings.json` and `tokenizer.json` stand beside it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from tokenizers import Tokenizer


class TritonPythonModel:
    """What Triton's Python back end looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(__file__).parent
        self.settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True  # a text that has [SEP] in it has these five characters

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer for each request; what is wrong with one is its own error."""
        answers = []
        for request in requests:
            try:
                answers.append(triton.InferenceResponse(output_tensors=self._tensors(request)))
            except ValueError as error:  # what `_ids` refuses, and text that is not UTF-8
                refused = triton.TritonError(str(error))
                answers.append(triton.InferenceResponse(output_tensors=[], error=refused))
        return answers

    def _tensors(self, request: Any) -> list[Any]:
        """The inputs of the model for the texts of a request (batch, 1), each (batch, tokens)."""
        texts = triton.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        rows = [self._row(place, text, len(texts)) for place, text in enumerate(texts)]
        step, context = self.settings["step"], self.settings["context"]
        longest = -(-max(map(len, rows)) // step) * step
        ids = np.zeros((len(rows), min(longest, context)), np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, 1
        made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return [triton.Tensor(name, made[name]) for name in self.settings["outputs"]]

    def _row(self, place: int, text: bytes, count: int) -> list[int]:
        """The ids of one text of a request. Raises ValueError that names its place among several."""
        try:
            return self._ids(text.decode())
        except ValueError as error:
            raise ValueError(f"text {place} of {count}: {error}" if count > 1 else str(error)) from error

    def _ids(self, text: str) -> list[int]:
        """A text with the special tokens around it. Raises ValueError for one that the model cannot read."""
        settings = self.settings
        whole = settings["prompt"] + (text.lower() if settings["lowercase"] else text)
        own = self.tokenizer.encode(whole, add_special_tokens=False).ids
        if not own:
            raise ValueError("the text is empty")
        ids = [*settings["before"], *own, *settings["behind"]]
        if len(ids) > settings["context"]:
            raise ValueError(f"the text has {len(ids)} tokens, the model reads {settings['context']}")
        return ids
