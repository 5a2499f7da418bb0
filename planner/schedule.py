"""When the work of a pipeline is done: an event simulation of the action lists.

The lists are those of `actions.py`, which are also those that run. An action starts when its process is free and
what it needs has arrived: a forward needs the stage before, a backward the stage after. A send takes `hop` seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .actions import Action, pipeline_actions
from .layout import Layout


@dataclass(frozen=True)
class Event:
    """One action with its times in seconds."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    layout: Layout, micro_batches: int, forward: Sequence[float], backward: Sequence[float], hop: float = 0.0
) -> list[Event]:
    """The events of one step, in the order in which they start on each process. `forward` and `backward` are the
    seconds of each stage; a backward split in two halves takes half of its time in each.
    """
    lists = pipeline_actions(layout, micro_batches)
    ended: dict[tuple[str, int, int], float] = {}
    free, done, events = [0.0] * len(lists), [0] * len(lists), []
    last, left = layout.stages - 1, sum(map(len, lists))
    place = {stage: rank for rank in range(len(lists)) for stage in layout.stages_of(rank)}

    def ready(rank: int, action: Action) -> float | None:
        """When what an action needs is there; None while it is not known."""
        stage, index = action.stage, action.micro_batch
        if action.kind == "F":
            needs = [] if stage == 0 else [("F", stage - 1, index)]
        elif action.kind == "W":
            needs = [("B", stage, index)]
        else:
            needs = [("F", stage, index)] if stage == last else [("B", stage + 1, index), ("F", stage, index)]
        if any(need not in ended for need in needs):
            return None
        return max([ended[need] + hop * (place[need[1]] != rank) for need in needs], default=0.0)

    while left:
        before = left
        for rank, actions in enumerate(lists):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                at = ready(rank, action)
                if at is None:
                    break
                time = {"F": forward, "B": backward}.get(action.kind, backward)[action.stage]
                start = max(free[rank], at)
                end = start + (time if action.kind in "FB" else time / 2)
                free[rank] = end
                ended["B" if action.kind == "I" else action.kind, action.stage, action.micro_batch] = end
                events.append(Event(rank, action, start, end))
                done[rank] += 1
                left -= 1
        assert left < before, "the lists wait for one another in a circle"
    return events


def given_bubble(
    layout: Layout, layer: float, ends: tuple[float, float], micro_batches: int, forward: float
) -> float:
    """Seconds that the slowest process waits in one step of a given split, by simulating the lists that run: closed
    forms are for equal stages. `layer` seconds of a layer for a micro-batch, `ends` of the tables and the head;
    `forward` is the forward's share of them.
    """
    last = layout.stages - 1
    stages = [
        layers * layer + (stage == 0) * ends[0] + (stage == last) * ends[1]
        for stage, layers in enumerate(layout.layers_per_stage)
    ]
    events = simulate(
        layout, micro_batches, [forward * time for time in stages], [(1 - forward) * time for time in stages]
    )
    held = (sum(stages[stage] for stage in layout.stages_of(rank)) for rank in range(layout.pipeline))
    return max(event.end for event in events) - micro_batches * max(held)
