"""Whether a model's process lives: a long step is told from a process that has stopped. The process is a thread and the
model a stand-in whose step waits for the test.
"""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from in_thread import ThreadProcess, until
from throughline.core.backend import BackendOptions
from throughline.core.errors import Failed
from throughline.inference.serving import remote, worker
from throughline.inference.serving.accounts import ServerLimits
from throughline.inference.serving.generation import Job
from throughline.inference.serving.remote import Remote


@pytest.fixture
def step_ends(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set by the test, or when the process is killed: until then the step that a request begins goes on."""
    ends = threading.Event()

    class LongStep:
        patience_ms = 5
        engine = SimpleNamespace(cache_usage=0.25)

        def __init__(self, *opening: Any) -> None:
            pass

        def describe(self) -> dict[str, Any]:
            return {}

        def take(self, message: Any) -> None:
            ends.wait(30)

        def turn(self) -> None:
            pass

    class Killed(ThreadProcess):
        def kill(self) -> None:
            ends.set()
            super().kill()

    monkeypatch.setattr(worker, "WorkerModel", LongStep)
    monkeypatch.setattr(remote, "spawn", Killed)
    monkeypatch.setattr(remote, "WATCH_S", 0.01)
    monkeypatch.setattr(worker, "BEAT_MS", 5)
    return ends


async def opened(**limits: float) -> tuple[Remote, list[Any]]:
    """A process that has begun a long step, and what the request that began it has heard."""
    model = Remote("model", "nowhere", BackendOptions(), ServerLimits(**limits))
    await model.open()
    model.watch()
    heard: list[Any] = []
    model.submit([Job(np.array([1]), 1)], heard.append)
    return model, heard


def test_a_process_within_a_long_step_is_alive(step_ends: threading.Event) -> None:
    """A step of many times the silence that is allowed: a first compilation, the build of an engine."""

    async def main() -> None:
        model, heard = await opened(hang_s=0.05)
        for _ in range(30):
            await asyncio.sleep(0.01)
            assert model.responsive
        assert model.totals.restarts == 0 and not heard and model.cache_usage == 0.25
        step_ends.set()
        await model.close()

    asyncio.run(main())


def test_a_process_without_a_heartbeat_is_replaced_and_is_not_ready_before(
    step_ends: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEAT_MS", 60_000)
    monkeypatch.setattr(remote, "QUIET_S", 0.02)

    async def main() -> None:
        model, heard = await opened(hang_s=0.2)
        await until(lambda: not model.responsive)
        assert model.ready and model.totals.restarts == 0
        await until(lambda: model.totals.restarts == 1)
        await until(lambda: model.responsive)
        ((place, error),) = heard
        assert place == 0 and isinstance(error, Failed)
        await model.close()

    asyncio.run(main())


def test_a_step_that_takes_longer_than_a_model_may_load_counts_as_hung(step_ends: threading.Event) -> None:
    async def main() -> None:
        model, heard = await opened()
        model.limits = replace(model.limits, load_s=0.05)
        await until(lambda: model.totals.restarts == 1)
        assert len(heard) == 1
        await model.close()

    asyncio.run(main())


def test_an_error_of_any_kind_at_a_restart_does_not_end_the_watching(
    step_ends: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt follows; the model then answers again."""
    usual, attempts = Remote.open, []

    async def failing(self: Remote) -> dict[str, Any]:
        attempts.append(1)
        if len(attempts) == 2:
            raise RuntimeError("too many open files")
        return await usual(self)

    monkeypatch.setattr(Remote, "open", failing)

    async def main() -> None:
        model, _ = await opened()
        model._process.kill()
        await until(lambda: len(attempts) == 3 and model.ready)
        await model.close()

    asyncio.run(main())
