"""Beginnings of prompts that were read already: a tree whose nodes are chunks of tokens, with the keys and values that
reading each of them gave behind the chunks before it.

A hit copies a node's numbers into the sequence's own cache, so that nothing can change what is stored. Chunks begin at
multiples of one size, so that a sequence gets, bit for bit, what it would have computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor


class Node:
    """One chunk, behind the chunks of its parents."""

    def __init__(
        self, parent: Node | None, key: Hashable, parts: list[tuple[Tensor, ...]], hidden: Tensor | None
    ) -> None:
        self.parent, self.key = parent, key
        self.parts = parts
        """For each layer, what `KVCache.cut` gave."""
        self.hidden = hidden
        """[D], what the head reads behind the chunk's last token. None: the root, which is no chunk."""
        self.children: dict[Hashable, Node] = {}
        self.is_gone = False

    @property
    def nbytes(self) -> int:
        own = 0 if self.hidden is None else self.hidden.nbytes
        return own + sum(tensor.nbytes for part in self.parts for tensor in part)


class Prefixes:
    """The tree, and the order in which its nodes were last used."""

    def __init__(self) -> None:
        self.root = Node(None, None, [], None)
        self.nbytes = 0
        self._by_age: OrderedDict[Node, None] = OrderedDict()  # parents always after their children

    def __len__(self) -> int:
        return len(self._by_age)

    def find(self, node: Node, key: Hashable) -> Node | None:
        """The chunk that follows `node`, if it is known."""
        found = node.children.get(key)
        if found is not None:
            self._touch(found)
        return found

    def add(self, parent: Node, key: Hashable, parts: list[tuple[Tensor, ...]], hidden: Tensor) -> Node:
        node = parent.children[key] = Node(parent, key, parts, hidden)
        self.nbytes += node.nbytes
        self._touch(node)
        return node

    def drop_oldest(self, but: Node | None = None) -> bool:
        """Forget the chunk that was not used for longest. False: there is none but this one and those before it."""
        node = next(iter(self._by_age), None)
        if node is None or node is but:
            return False
        del self._by_age[node]
        assert node.parent is not None
        del node.parent.children[node.key]
        node.is_gone = True
        self.nbytes -= node.nbytes
        return True

    def _touch(self, node: Node) -> None:
        while node.parent is not None:
            self._by_age[node] = None
            self._by_age.move_to_end(node)
            node = node.parent
