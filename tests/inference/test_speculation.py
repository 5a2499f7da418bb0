"""Guessing ahead, by what a text had before or by a smaller model: no token changes, and fewer steps are taken."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import CPU, Counting, ids_of, nothing, run
from throughline.core.backend import ALL, BackendOptions, CausalBackend, Span
from throughline.core.errors import WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.sampling import Sampling, choose
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.inference.serving import slots
from throughline.inference.serving.channel import Open
from throughline.inference.serving.generation import Job, look_up
from throughline.inference.serving.slots import SlotBatch
from throughline.inference.serving.worker import open_draft


def drafting(gpt_dir: Path, noise: float) -> CausalBackend:
    """The model itself with a shorter context and weights that are off by so many of their deviations."""
    draft = open_backend(gpt_dir, BackendOptions("cpu", runtime="torch", context=90)).causal
    assert isinstance(draft, TorchCausal)
    with torch.no_grad():
        for number, parameter in enumerate(draft.model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


@pytest.mark.parametrize("seed", range(6))
def test_guessing_ahead_changes_no_token(
    backend: CausalBackend, gpt_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of every kind side by side, to prompts that repeat themselves: tokens, texts and ends are those of single
    steps, and what is kept of a finished answer serves the next one. The text so far guesses, or a model that is right
    always, at times or hardly ever.
    """
    monkeypatch.setattr(slots, "GUESSING_ROWS", 4)
    draw = np.random.default_rng(seed)

    def prompt() -> np.ndarray:
        part = draw.integers(1, 300, draw.integers(2, 9))
        return np.concatenate([draw.integers(1, 300, 3), np.tile(part, draw.integers(1, 5))])

    end = int(draw.integers(1, 300))
    kinds: list[dict] = [{}, {}, {}, {"stop": ("e",)}, {"stop_ids": (end,), "min_tokens": 9}]
    kinds += [
        {"sampling": Sampling(temperature=0.8, seed=7)},
        {"sampling": Sampling(0, frequency_penalty=0.5)},
    ]
    jobs = [Job(prompt(), int(draw.integers(1, 60)), **kind) for kind in kinds]
    jobs += [Job(np.concatenate([jobs[0].prompt_ids, jobs[0].prompt_ids]), 20), Job(prompt(), 30, logprobs=1)]

    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def answers(speculate: int, draft: CausalBackend | None = None) -> tuple[list, int, float]:
        counting = Counting(backend)
        batch = SlotBatch(counting, decode, 4, end_ids=(0,), speculate=speculate, draft=draft)
        found = run(batch, *jobs) + run(batch, *jobs[::-1])
        assert not batch.failed
        told = [
            (ids_of(deltas), "".join(delta.text for delta in deltas), deltas[-1].finish, len(deltas))
            for deltas in found
        ]
        return told, counting.calls, batch.right / max(batch.guessed, 1)

    plain, steps, _ = answers(0)
    for speculate in (1, 8):
        told, fewer, _ = answers(speculate)
        assert told == plain and fewer <= steps
    noise = (0.0, 0.02, 5.0)[seed % 3]
    told, fewer, right = answers(4, drafting(gpt_dir, noise))
    assert told == plain and fewer <= steps - (noise < 1)
    # Greedy guesses at drawn tokens are wrong at times, and the last guesses of a text that ends count as wrong.
    assert right > 0.5 if noise == 0 else right < 0.9


def test_guesses_that_nobody_checked_are_another_text(
    backend: CausalBackend, gpt_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault that the test above would see."""
    job = Job(np.arange(5), 40)
    plain = ids_of(run(SlotBatch(backend, nothing, 1), job)[0])
    batch = SlotBatch(backend, nothing, 1, prefix_bytes=0, speculate=4, draft=drafting(gpt_dir, 5.0))
    assert ids_of(run(batch, job)[0]) == plain and 0 <= batch.right < batch.guessed

    def unchecked(logits_NV: np.ndarray, choosers: list) -> np.ndarray:
        ids_N = choose(logits_NV, choosers)
        guesses = batch._live[0].guesses
        ids_N[: len(guesses)] = guesses
        return ids_N

    monkeypatch.setattr(slots, "choose", unchecked)
    assert ids_of(run(batch, job)[0]) != plain


@pytest.mark.parametrize("has_draft", [True, False])
def test_guessing_that_fails_ends_by_its_name(
    has_draft: bool,
    backend: CausalBackend,
    gpt_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault of the draft model or of the look-up is told once, as what it is, and costs no token."""
    draft = drafting(gpt_dir, 0.0) if has_draft else None
    calls = iter([[7, 7], MemoryError("no room"), MemoryError("no room")])  # a wrong guess first

    def failing(_: Any, most: int) -> list[int]:
        if isinstance(found := next(calls) if most else [], Exception):
            raise found
        return found

    if draft is not None:
        draft.step = Counts  # takes no spans
    else:
        monkeypatch.setattr(slots, "look_up", failing)
    batch = SlotBatch(backend, nothing, 1, speculate=4, draft=draft)
    (deltas,) = run(batch, Job(np.arange(5), 9))
    assert ids_of(deltas) == ids_of(run(SlotBatch(backend, nothing, 1), Job(np.arange(5), 9))[0])
    told = capsys.readouterr().err
    assert told.count("nothing is guessed ahead from here on") == 1
    assert ("the draft model failed" in told) == has_draft == ("the look-up failed" not in told)


def test_a_server_counts_what_its_draft_model_guesses(
    gpt_onnx: Path, gpt_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    async def body(found) -> None:
        texts.append((await found.complete(prompt="The quick", max_tokens=20))["choices"][0]["text"])
        totals = found.remote().totals
        assert (totals.guessed > 0) == (totals.right > 0) == (len(texts) == 2)
        page = (await found.client.get("/metrics")).text
        assert f'throughline_spec_decode_accepted_tokens_total{{model="gpt"}} {float(totals.right)}' in page

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body)
    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, speculate=4, draft=gpt_dir)
    assert texts[0] == texts[1]


def test_a_draft_model_of_another_vocabulary_is_refused(
    gpt_dir: Path, chat_dir: Path, bert_dir: Path
) -> None:
    tokenizer = Tokenizer.load(gpt_dir)
    with pytest.raises(WrongUse, match=r"(?s)another vocabulary.*im_start.*same tokenizer"):
        open_draft(Open("gpt", str(gpt_dir), 1, CPU, 4, str(chat_dir)), tokenizer)
    with pytest.raises(WrongUse, match="needs a GPT"):
        open_draft(Open("gpt", str(gpt_dir), 1, CPU, 4, str(bert_dir)), tokenizer)


class Counts:
    """A model that counts to seven again and again."""

    device, vocab_size, context, token_bytes, limits = "cpu", 7, 1000, 0, ALL

    def new_cache(self, rows: int) -> None:
        self.calls = 0

    def step(self, spans: list[Span], cache: None) -> np.ndarray:
        self.calls += 1
        last = np.concatenate([span.ids[len(span.ids) - span.asked :] for span in spans])
        return np.eye(7, dtype=np.float32)[(last + 1) % 7]

    def free_row(self, cache: None, row: int) -> None:
        pass


def test_good_guesses_save_steps() -> None:
    """From the second round on all are right: the prompt's step, a single one, then nine tokens a step."""
    model = Counts()
    (deltas,) = run(SlotBatch(model, nothing, 1, speculate=8), Job(np.arange(7), 100))
    assert ids_of(deltas) == [i % 7 for i in range(100)]
    assert model.calls == 2 + math.ceil(98 / 9)


class Sums:
    """A model whose next token is the sum of all that its cache row holds."""

    device, vocab_size, context, token_bytes, limits = "cpu", 11, 200, 0, ALL

    def new_cache(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.context), np.int64)

    def step(self, spans: list[Span], cache: np.ndarray) -> np.ndarray:
        sums = []
        for span in spans:
            end = span.past + len(span.ids)
            cache[span.row, span.past : end] = span.ids
            sums += cache[span.row, :end].cumsum()[end - span.asked :].tolist()
        return np.eye(11, dtype=np.float32)[np.array(sums, np.int64) % 11]

    def copy_row(self, cache: np.ndarray, source: int, target: int, tokens: int) -> None:
        cache[target, :tokens] = cache[source, :tokens]

    def free_row(self, cache: np.ndarray, row: int) -> None:
        cache[row] = 0


def test_a_draft_model_keeps_up_with_rows_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is right at all times, of answers that end one after another: no guess is wrong."""
    monkeypatch.setattr(slots, "GUESSING_ROWS", 3)
    jobs = [Job(np.arange(1, 2 + size), size) for size in (4, 30, 9, 50, 17, 2, 33)]
    batch = SlotBatch(Sums(), nothing, 3, speculate=4, draft=Sums())
    answers = [ids_of(deltas) for deltas in run(batch, *jobs)]
    assert answers == [ids_of(deltas) for deltas in run(SlotBatch(Sums(), nothing, 3), *jobs)]
    assert batch.right == batch.guessed > 80


def test_a_guess_is_what_came_after_the_longest_known_end() -> None:
    assert look_up(np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 2) == [9, 2]
    assert look_up(np.array([5, 6, 7, 5, 6, 8, 5, 6]), 4) == [8, 5, 6, 8]
    assert look_up(np.array([1, 1, 1]), 3) == [1, 1, 1]
    assert look_up(np.array([1, 2, 3]), 3) == look_up(np.array([4]), 3) == []
