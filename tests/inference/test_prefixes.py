"""Prefix cache: what a prompt shares with stored sequences is found exactly, within its own tenant, at a cost that does
not grow with the number of sequences.
"""

import random
from typing import Any

import numpy as np
import pytest
from batches import nothing
from throughline.core.scorer import common
from throughline.inference.serving import prefixes
from throughline.inference.serving.generation import Job
from throughline.inference.serving.prefixes import LEAST_PREFIX, Node, Prefixes
from throughline.inference.serving.slots import SlotBatch


class Rows:
    """A backend whose saved rows are the ids themselves."""

    token_bytes = 1

    def save_row(self, cache: list[np.ndarray], row: int, tokens: int) -> list[int]:
        return cache[row][:tokens].tolist()


def stored_of(cache: Prefixes, tenant: str) -> list[list[int]]:
    """Every stored sequence of a tenant, by a walk over its whole tree."""
    found, nodes = [], [cache._roots.get(tenant, Node(np.zeros(0)))]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.saved is not None:
            found.append(node.saved)
    return found


def test_the_longest_shared_beginning_is_found_whatever_was_stored_and_dropped() -> None:
    """Against a comparison with every stored sequence; a sequence that another continues is stored once."""
    draw = random.Random(0)
    for _ in range(40):
        limit = draw.choice([60, 200, 1000])
        cache, seen = Prefixes(Rows(), limit), [[0]]
        for _ in range(40):
            tenant = draw.choice("ab")
            beginning = draw.choice(seen)[: draw.randint(0, 60)]
            ids = np.array(beginning + [draw.randint(0, 2) for _ in range(draw.randint(1, 40))])
            seen.append(ids.tolist())
            before = stored_of(cache, tenant)
            best = max((common((np.array(one), ids)) for one in before), default=0)
            shared, saved = cache.find(tenant, ids)
            assert shared == (best if best >= LEAST_PREFIX else 0)
            assert not shared or (saved in before and saved[:shared] == ids[:shared].tolist())
            cache.keep(tenant, ids, [ids], 0)
            after = stored_of(cache, tenant)
            if LEAST_PREFIX <= len(ids) <= limit:
                assert any(one[: len(ids)] == ids.tolist() for one in after)
            assert not any(one != other and other[: len(one)] == one for one in after for other in after)
            assert sum(map(len, stored_of(cache, "a") + stored_of(cache, "b"))) <= limit


def test_two_thousand_sequences_with_a_common_beginning_cost_what_one_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system prompt of 16 tokens before each: a look-up and a store compare along one path of the tree."""
    cache, compared = Prefixes(Rows(), 1 << 30), []
    monkeypatch.setattr(prefixes, "common", lambda rows: compared.append(1) or common(rows))
    rng = np.random.default_rng(0)
    system = rng.integers(0, 300, 16)
    for _ in range(2000):
        ids = np.concatenate((system, rng.integers(0, 300, 24)))
        compared.clear()
        cache.find("", ids)
        cache.keep("", ids, [ids], 0)
        assert len(compared) <= 12, "three walks of at most four nodes"
    assert len(stored_of(cache, "")) == 2000


def test_the_least_recently_used_sequence_is_dropped_first() -> None:
    """Room for two: the one that was used again stays, though it was stored first."""
    cache = Prefixes(Rows(), 40)
    first, second, third = (np.arange(start, start + 20) for start in (0, 100, 200))
    for ids in (first, second):
        cache.keep("", ids, [ids], 0)
    assert cache.find("", first)[0] == 20
    cache.keep("", third, [third], 0)
    assert [cache.find("", ids)[0] for ids in (first, second, third)] == [20, 0, 20]


def test_a_running_answer_lends_its_row_to_its_own_tenant_alone(backend: Any) -> None:
    """While the first tenant's answer runs, a second tenant sends the same prompt: it reads the prompt itself, at once
    and not after the first tenant; a second request of the first tenant copies the row.
    """
    prompt, cached = np.arange(1, 60), {}
    batch = SlotBatch(backend, nothing, 5)

    def step() -> None:
        for sequence, delta in batch.step():
            if delta.cached_tokens is not None:
                cached[sequence.owner] = delta.cached_tokens

    def send(owner: str, tenant: str) -> None:
        batch.add(Job(prompt, 40), tenant=tenant).owner = owner

    send("one", "one")
    send("two", "two")
    step()
    assert cached == {"one": 0, "two": 0}, "both have read the prompt, beside each other"
    send("two again", "two")
    send("one again", "one")
    send("three", "three")
    step()
    assert cached == {"one": 0, "two": 0, "two again": 58, "one again": 58, "three": 0}
