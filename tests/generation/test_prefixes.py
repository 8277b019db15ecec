"""The tree of known beginnings: what is forgotten first, and that no chunk outlives those before it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from leftward.generation.prefixes import Node, Prefixes


def add(prefixes: Prefixes, parent: Node, key: int) -> Node:
    return prefixes.add(parent, key, [(torch.zeros(3), torch.zeros(3))], torch.zeros(2))  # 8 numbers of 4 bytes


def test_the_longest_unused_leaf_goes_first() -> None:
    prefixes = Prefixes()
    first = add(prefixes, prefixes.root, 1)
    old, new = add(prefixes, first, 2), add(prefixes, first, 3)
    assert (len(prefixes), prefixes.nbytes) == (3, 96)
    assert prefixes.find(first, 2) is old and prefixes.find(first, 4) is None
    assert prefixes.drop_oldest() and new.is_gone  # 2 was looked at later
    assert prefixes.drop_oldest() and old.is_gone and not first.is_gone
    assert not prefixes.drop_oldest(but=first)
    assert prefixes.drop_oldest() and not prefixes.drop_oldest()
    assert (len(prefixes), prefixes.nbytes, prefixes.root.children) == (0, 0, {})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.booleans()), max_size=60))
def test_no_chunk_outlives_those_before_it(moves: list[tuple[int, int, bool]]) -> None:
    prefixes = Prefixes()
    nodes = [prefixes.root]
    for place, key, drops in moves:
        if drops:
            prefixes.drop_oldest()
            nodes = [node for node in nodes if not node.is_gone]
        else:
            parent = nodes[place % len(nodes)]
            found = prefixes.find(parent, key)
            if found is None:
                nodes.append(add(prefixes, parent, key))
            else:
                assert found in nodes
        reached, open_nodes = 0, [prefixes.root]
        while open_nodes:
            children = list(open_nodes.pop().children.values())
            reached += len(children)
            open_nodes += children
        assert reached == len(prefixes) == len(nodes) - 1
        assert prefixes.nbytes == 32 * reached
