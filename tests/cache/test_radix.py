"""A tree of texts finds what a list of them would."""

from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.cache.radix import Node, RadixTree, common_length

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
TEXTS = st.lists(st.integers(0, 2), max_size=7)
# insert a text, or remove the one of that number
STEPS = st.lists(st.one_of(st.tuples(st.just("insert"), TEXTS), st.tuples(st.just("remove"), st.integers(0, 9))), max_size=25)


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@QUICK
@given(a=TEXTS, b=TEXTS)
def test_common_length(a: list[int], b: list[int]):
    assert common_length(a, b) == common(a, b)


@QUICK
@given(steps=STEPS, asked=st.lists(TEXTS, min_size=1, max_size=4))
def test_a_tree_finds_what_a_list_would(steps, asked):
    tree: RadixTree[int] = RadixTree()
    held: list[tuple[Node[int], list[int], int]] = []
    for number, (action, what) in enumerate(steps):
        if action == "insert":
            held.append((tree.insert(what, number), what, number))
        elif held:
            node, _, value = held.pop(what % len(held))
            tree.remove(node, value)
        for text in asked:
            found = list(tree.find(text))
            lengths = [length for _, length in found]
            assert lengths == sorted(lengths, reverse=True)
            assert sorted(found) == sorted((value, common(text, ids)) for _, ids, value in held)
    for node, _, value in held:
        tree.remove(node, value)
    assert not tree._root.children
    assert not tree._root.values


def test_branches_that_lead_nowhere_are_taken_away():
    tree: RadixTree[str] = RadixTree()
    long, short = tree.insert([1, 2, 3, 4], "long"), tree.insert([1, 2, 9], "short")
    assert sorted(map(len, (long.edge, short.edge))) == [1, 2]
    tree.remove(short, "short")
    assert long.edge == [1, 2, 3, 4]
    assert long.parent is tree._root
