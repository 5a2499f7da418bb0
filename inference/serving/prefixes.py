"""Prefix cache: the keys and values of finished sequences, found by the ids that a later prompt begins with.

Each tenant (API key) has a radix tree of its own: the time of an answer would tell other tenants of its prompts.
Finding and storing a sequence compare each of its ids about once, however many sequences are stored.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.backend import CausalBackend
from ...core.scorer import common

LEAST_PREFIX = 16  # tokens below which looking up and copying saves nothing


@dataclass(eq=False)
class Node:
    """A node of a radix tree: the ids between its parent and it, and what is stored of the sequence that ends here."""

    edge: np.ndarray
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)  # by the first id of their edges
    depth: int = 0  # ids from the root to here
    saved: Any = None  # keys and values, as the backend saves a row; None: nothing ends here

    def walk(self, ids: np.ndarray) -> tuple["Node", int, int]:
        """The deepest node below this one whose path the ids share at least in part, the ids shared of its own edge,
        and of the whole path.
        """
        node, inside, shared = self, 0, 0
        while shared < len(ids) and (child := node.children.get(int(ids[shared]))):
            inside = common((child.edge, ids[shared:]))
            node, shared = child, shared + inside
            if inside < len(child.edge):
                break
        return node, inside, shared

    def stored(self) -> "Node":
        """A node at or below this one where a sequence ends; every leaf is one."""
        node = self
        while node.saved is None:
            node = next(iter(node.children.values()))
        return node

    def add(self, edge: np.ndarray) -> "Node":
        """A new child."""
        child = self.children[int(edge[0])] = Node(edge, self, depth=self.depth + len(edge))
        return child

    def grow(self, ids: np.ndarray) -> "Node":
        """A node below this one at the end of these ids, of which no path holds all."""
        node, inside, shared = self.walk(ids)
        if inside < len(node.edge):
            assert node.parent is not None
            upper = node.parent.add(node.edge[:inside])
            node.edge, node.parent = node.edge[inside:], upper
            upper.children[int(node.edge[0])] = node
            node = upper
        return node.add(ids[shared:])

    def prune(self) -> None:
        """Remove this node and those above it, as far as no sequence needs them."""
        node = self
        while node.parent is not None and node.saved is None and not node.children:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is not None and node.saved is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = np.concatenate((node.edge, child.edge)), node.parent
            node.parent.children[int(child.edge[0])] = child


class Prefixes:
    """Finished sequences whose keys and values are stored, the least recently used dropped first."""

    def __init__(self, backend: CausalBackend, limit_bytes: int) -> None:
        self._backend = backend
        self._limit = limit_bytes // backend.token_bytes if backend.token_bytes else 0  # tokens
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._roots: dict[str, Node] = {}  # of each tenant
        self._used: OrderedDict[Node, None] = OrderedDict()  # the least recently used first
        self._tokens = 0

    def find(self, tenant: str, prompt_ids: np.ndarray) -> tuple[int, Any]:
        """How many ids the prompt shares with a stored sequence of the tenant at most, and that row (its use is noted);
        0 for fewer than are worth a copy.
        """
        if tenant not in self._roots:
            return 0, None
        node, _, shared = self._roots[tenant].walk(prompt_ids)
        if shared < LEAST_PREFIX:
            return 0, None
        stored = node.stored()
        self._used.move_to_end(stored)
        return shared, stored.saved

    def keep(self, tenant: str, ids: np.ndarray, cache: Any, row: int) -> None:
        """Save a row, unless a stored sequence holds all of it already; those that it continues are dropped."""
        tokens = len(ids)
        if not LEAST_PREFIX <= tokens <= self._limit:
            return
        root = self._roots.setdefault(tenant, Node(np.zeros(0, np.int64)))
        node, _, shared = root.walk(ids)
        if shared == tokens:
            return
        while node.parent is not None:
            above = node.parent
            if node.saved is not None and node.depth <= shared:
                self._drop(node)
            node = above
        while self._tokens + tokens > self._limit:
            self._drop(next(iter(self._used)))
        saved = self._backend.save_row(cache, row, tokens)
        leaf = root.grow(np.array(ids, np.int64))
        leaf.saved = saved
        self._used[leaf] = None
        self._tokens += tokens

    def _drop(self, node: Node) -> None:
        """Drop what is stored at a node, and the nodes that it alone needs."""
        del self._used[node]
        self._tokens -= node.depth
        node.saved = None
        node.prune()
