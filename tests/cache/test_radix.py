"""A radix tree finds the same prefixes as a linear search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.cache.prefix.radix import Node, RadixTree, common_length

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
SEQUENCES = st.lists(st.integers(0, 2), max_size=7)
# insert a sequence, or remove the one of that number
STEPS = st.lists(
    st.one_of(st.tuples(st.just("insert"), SEQUENCES), st.tuples(st.just("remove"), st.integers(0, 9))), max_size=25
)


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@QUICK
@given(a=SEQUENCES, b=SEQUENCES)
def test_common_length(a: list[int], b: list[int]):
    assert common_length(a, b) == common(a, b)


@QUICK
@given(steps=STEPS, queries=st.lists(SEQUENCES, min_size=1, max_size=4))
def test_a_tree_finds_what_a_linear_search_does(steps, queries):
    tree: RadixTree[int] = RadixTree()
    stored: list[tuple[Node[int], list[int], int]] = []
    for number, (action, what) in enumerate(steps):
        if action == "insert":
            stored.append((tree.insert(what, number), what, number))
        elif stored:
            node, _, value = stored.pop(what % len(stored))
            tree.remove(node, value)
        for query in queries:
            found = list(tree.find(query))
            lengths = [length for _, length in found]
            assert lengths == sorted(lengths, reverse=True)
            assert sorted(found) == sorted((value, common(query, ids)) for _, ids, value in stored)
    for node, _, value in stored:
        tree.remove(node, value)
    assert not tree._root.children
    assert not tree._root.values


def test_empty_branches_are_removed():
    tree: RadixTree[str] = RadixTree()
    long, short = tree.insert([1, 2, 3, 4], "long"), tree.insert([1, 2, 9], "short")
    assert sorted(map(len, (long.edge, short.edge))) == [1, 2]
    tree.remove(short, "short")
    assert long.edge == [1, 2, 3, 4]
    assert long.parent is tree._root
