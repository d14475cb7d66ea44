"""A radix tree over token sequences, for longest-prefix lookup."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    low, high = 0, min(len(a), len(b))
    if a[:1] != b[:1]:
        return 0
    if a[:high] == b[:high]:
        return high
    # binary search: comparing slices is much faster than comparing tokens
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class Node(Generic[Value]):
    """The tokens of one edge, and the values whose token sequence ends with them."""

    def __init__(self, edge: list[int], parent: "Node[Value] | None"):
        self.edge, self.parent = edge, parent
        self.children: dict[int, Node[Value]] = {}
        self.values: list[Value] = []

    def subtree(self) -> Iterator[Value]:
        """Yield all values of this node and its descendants."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield from node.values
            pending.extend(node.children.values())


class RadixTree(Generic[Value]):
    """Values by their token sequences; `find` yields those that share a prefix with another sequence."""

    def __init__(self) -> None:
        self._root: Node[Value] = Node([], None)

    def insert(self, ids: list[int], value: Value) -> Node[Value]:
        """Add a value; return its node, which `remove` needs."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                child = node.children[ids[at]] = Node(ids[at:], node)
            else:
                same = common_length(child.edge, ids[at : at + len(child.edge)])
                if same < len(child.edge):
                    child = self._split(child, same)
            node, at = child, at + len(child.edge)
        node.values.append(value)
        return node

    def remove(self, node: Node[Value], value: Value) -> None:
        """Remove a value, and the nodes that are empty without it."""
        node.values.remove(value)
        while node.parent is not None and not node.values and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent is not None and not node.values and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[0]] = child

    def find(self, ids: list[int]) -> Iterator[tuple[Value, int]]:
        """Yield values with the length of the prefix they share with `ids`, longest first."""
        path, node, at = [(self._root, 0)], self._root, 0
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            same = common_length(child.edge, ids[at : at + len(child.edge)])
            at += same
            path.append((child, at))
            if same < len(child.edge):
                break
            node = child
        below: Node[Value] | None = None
        for node, common in reversed(path):
            yield from ((value, common) for value in node.values)
            for child in node.children.values():
                if child is not below:
                    yield from ((value, common) for value in child.subtree())
            below = node

    def _split(self, node: Node[Value], length: int) -> Node[Value]:
        assert node.parent is not None
        upper: Node[Value] = Node(node.edge[:length], node.parent)
        node.parent.children[upper.edge[0]] = upper
        node.edge, node.parent = node.edge[length:], upper
        upper.children[node.edge[0]] = node
        return upper
