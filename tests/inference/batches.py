"""What the tests of batching and of guessing ahead share: a batch run to its end, and a backend that counts."""

from throughline.core.backend import BackendOptions, CausalBackend, Span
from throughline.inference.serving.generation import Guide, Job, TextDelta
from throughline.inference.serving.slots import SlotBatch

CPU = BackendOptions(device="cpu", threads=1)


class Counting:
    """A backend that counts the tokens it reads."""

    def __init__(self, backend: CausalBackend) -> None:
        self._backend, self.tokens, self.widest, self.calls = backend, 0, 0, 0

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def step(self, spans: list[Span], cache):
        self.calls += 1
        self.tokens += sum(len(span.ids) for span in spans)
        self.widest = max([self.widest, *(len(span.ids) for span in spans)])
        return self._backend.step(spans, cache)


def run(batch: SlotBatch, *requests: Job, guide: Guide | None = None) -> list[list[TextDelta]]:
    """All answers, as deltas; `guide` is the first one's."""
    answers: list[list[TextDelta]] = [[] for _ in requests]
    for number, request in enumerate(requests):
        batch.add(request, guide if number == 0 else None).owner = number
    while batch.busy:
        for sequence, delta in batch.step():
            answers[sequence.owner].append(delta)
    return answers


def ids_of(deltas: list[TextDelta]) -> list[int]:
    return [delta.token.id for delta in deltas if delta.token]


def nothing(ids: list[int]) -> str:
    return ""
