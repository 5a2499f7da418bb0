"""The order of work in a pipeline as data, and when it is done: what each process does, micro-batch by micro-batch.

A plan simulates these lists, and a test compares them with the schedules of torch that run. F is a forward, B a whole
backward; zero-bubble schedules split it into I (gradients of inputs) and W (of weights). An action starts when what it
needs is there. Sources: 1F1B and interleaving, Narayanan et al. 2021 (section 2.2); zero bubble, Qi et al. 2023
(sections 3 and 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .layout import Layout

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One piece of work; printed as torch prints it: 3F0 is the forward of micro-batch 0 on stage 3."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def pipeline_actions(layout: Layout, micro_batches: int) -> list[list[Action]]:
    """The actions of every pipeline rank, in order; layout and micro-batches must be legal (`layout_problems`)."""
    make = _interleaved if layout.schedule.startswith("interleaved") else _one_stage
    make = _zero_bubble_v if layout.schedule == "zero-bubble-v" else make
    return [make(layout, micro_batches, rank) for rank in range(layout.pipeline)]


def _one_stage(layout: Layout, micro_batches: int, rank: int) -> list[Action]:
    """gpipe: all forwards, all backwards. 1f1b: as many forwards first as stages from here on, then one of each."""
    ahead = micro_batches if layout.schedule == "gpipe" else min(micro_batches, layout.pipeline - rank)
    actions = [Action(rank, "F", i) for i in range(ahead)]
    for done in range(micro_batches):
        actions.append(Action(rank, "B", done))
        if ahead + done < micro_batches:
            actions.append(Action(rank, "F", ahead + done))
    return actions


def _interleaved(layout: Layout, micro_batches: int, rank: int) -> list[Action]:
    """Rounds of about as many micro-batches as processes: each goes through one stage of the process, then the next.
    Zero bubble runs ahead half as far and takes the gradients of weights `rank` backwards later.
    """
    pipeline, chunks = layout.pipeline, layout.stages_per_process
    split = layout.schedule == "interleaved-zero-bubble"
    in_round = micro_batches // max(1, micro_batches // pipeline)
    total = chunks * micro_batches

    def place(index: int, backwards: bool) -> tuple[int, int]:
        """Stage and micro-batch of the index-th forward, or backward, of this process."""
        chunk, within = divmod(index, in_round)
        turn = chunks - 1 - chunk % chunks if backwards else chunk % chunks
        return turn * pipeline + rank, chunk // chunks * in_round + within

    def make(kind: Kind, index: int) -> Action:
        stage, micro_batch = place(index, kind != "F")
        return Action(stage, kind, micro_batch)

    ahead = min((chunks - 1) * in_round + (1 if split else 2) * (pipeline - 1 - rank), total)
    actions = [make("F", index) for index in range(ahead)]
    for done in range(total):
        if ahead + done < total:
            actions.append(make("F", ahead + done))
        actions.append(make("I" if split else "B", done))
        if split and done >= rank:
            actions.append(make("W", done - rank))
    return actions + ([make("W", index) for index in range(max(total - rank, 0), total)] if split else [])


def _zero_bubble_v(layout: Layout, micro_batches: int, rank: int) -> list[Action]:
    """The V: a process alternates between the stage `rank` on the way down and its mirror on the way up. Made for at
    least 2 x pipeline - 1 micro-batches; of fewer, the others are left out.
    """
    pipeline, down = layout.pipeline, rank
    up, enough = 2 * pipeline - 1 - rank, max(2 * pipeline - 1, micro_batches)
    actions: list[Action] = []
    count = {(stage, kind): 0 for stage in (down, up) for kind in ("F", "I", "W")}

    def add(stage: int, kinds: str) -> None:
        for kind in kinds:
            actions.append(Action(stage, kind, count[stage, kind]))  # type: ignore[arg-type]
            count[stage, kind] += 1

    add(down, "F" * (2 * (pipeline - rank) - 1))
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    for _ in range(pipeline - rank):
        add(up, "FIW")
    while count[up, "F"] < count[down, "F"] or count[down, "F"] < enough:
        add(down, "FIW" if count[down, "F"] < enough else "IW")
        add(up, "FIW")
    for _ in range(rank):
        add(down, "I")
        add(up, "I")
    add(down, "IW" * (pipeline - rank))
    for stage in (up, down):
        add(stage, "W" * (count[stage, "I"] - count[stage, "W"]))
    return [action for action in actions if action.micro_batch < micro_batches]


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
    """The events of one step, by `forward` and `backward` seconds of each stage; each half of a backward takes half."""
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
    """Seconds that the slowest process waits in a step of a given split, by simulation: of a `layer` and of both `ends`
    with a micro-batch, of which `forward` is the forward's share.
    """
    last = layout.stages - 1
    stages = [
        layers * layer + (stage == 0) * ends[0] + (stage == last) * ends[1]
        for stage, layers in enumerate(layout.layers_per_stage)
    ]
    forwards, backwards = ([share * time for time in stages] for share in (forward, 1 - forward))
    events = simulate(layout, micro_batches, forwards, backwards)
    held = (sum(stages[stage] for stage in layout.stages_of(rank)) for rank in range(layout.pipeline))
    return max(event.end for event in events) - micro_batches * max(held)
