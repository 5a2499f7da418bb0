"""Plans of any size are made in seconds from file sizes, and a task that cannot be done ends the work with
one error.
"""

import os
import time
from itertools import pairwise
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
from throughline.core.errors import Failed
from throughline.data.ingest import executors
from throughline.data.ingest.inputs import Source
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.task_plan import PLAN, Task, TaskPlan, default_shard_bytes, read_plan, write_plan
from throughline.data.ingest.tasks import read_record


def test_a_plan_of_10_tb_takes_seconds(tmp_path: Path) -> None:
    """40 files of 250 GB: 40,000 shards, every byte in one of them, planned in well under 10 s; a work
    directory of kilobytes.
    """
    start = time.process_time()
    sources = tuple(Source(f"/data/{i:03d}.jsonl", 250 * 10**9 + i, 1, "jsonl") for i in range(40))
    total = sum(source.bytes for source in sources)
    plan = TaskPlan(sources, ReadOptions(), "f", True, False, default_shard_bytes(total))
    found = plan.tasks()
    write_plan(tmp_path / "work", plan)
    assert (
        not any(read_record(tmp_path / "work", task.index) for task in found)
        and read_plan(tmp_path / "work") == plan
    )
    assert time.process_time() - start < 10
    assert [file.name for file in (tmp_path / "work").iterdir()] == [PLAN] and (
        tmp_path / "work" / PLAN
    ).stat().st_size < 10_000
    assert sum(task.bytes for task in found) == total and 35_000 < len(found) < 50_000
    expected = [(number, 0) for number in range(len(sources))]
    assert [(span.source, span.start) for task in found for span in task.spans if span.start == 0] == expected
    spans = [span for task in found for span in task.spans]
    assert all(b.start == a.stop for a, b in pairwise(spans) if b.source == a.source)


def test_a_task_that_always_kills_its_worker_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice and no more: the message names the task and says that finished work is kept."""
    # called with wrong arguments: the process ends at once
    monkeypatch.setattr(executors, "_worker", os._exit)
    with pytest.raises(Failed, match=r"worker of task 7 died(.|\n)*2 times(.|\n)*are kept"):
        executors.run_processes(tmp_path, [Task(7, (), 0)], 1, "tokenizers", lambda _: None)


def test_a_worker_that_is_gone_before_its_task_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken pipe is no error by itself: the death is counted and the task tried again."""
    monkeypatch.setattr(executors, "_worker", os._exit)
    real = SpawnProcess.start

    def start(self: SpawnProcess) -> None:
        real(self)
        self.join()

    monkeypatch.setattr(SpawnProcess, "start", start)
    with pytest.raises(Failed, match=r"worker of task 7 died(.|\n)*2 times"):
        executors.run_processes(tmp_path, [Task(7, (), 0)], 1, "tokenizers", lambda _: None)
