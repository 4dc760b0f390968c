"""Merkle trees over digests, by SHA-256.

    node = SHA-256(0x01, left, right); a node without a right neighbor moves up unchanged

Leaves are made by the caller, with another prefix, so that a leaf cannot pass for a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

_NODE = b"\1"


@dataclass(frozen=True, slots=True)
class MerklePath:
    """The way from a leaf to the root.

    Attributes:
        siblings: From the leaf to the root.
        left_siblings: Bit i is set if siblings[i] is the left one of its pair.
    """

    siblings: tuple[bytes, ...] = ()
    left_siblings: int = 0

    def root(self, leaf: bytes) -> bytes:
        """Return the root of the tree in which `leaf` has this path."""
        for level, sibling in enumerate(self.siblings):
            is_left = self.left_siblings >> level & 1
            leaf = _node(sibling, leaf) if is_left else _node(leaf, sibling)
        return leaf


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over at least one leaf."""
    nodes = list(leaves)
    while len(nodes) > 1:
        nodes = _parents(nodes)
    return nodes[0]


def merkle_paths(leaves: Sequence[bytes]) -> tuple[bytes, list[MerklePath]]:
    """Return the root over at least one leaf, and each leaf's path."""
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        levels.append(_parents(levels[-1]))
    (root,) = levels.pop()
    return root, [_path(levels, index) for index in range(len(leaves))]


def _path(levels: list[list[bytes]], index: int) -> MerklePath:
    siblings: list[bytes] = []
    left_siblings = 0
    for nodes in levels:
        other = index ^ 1
        if other < len(nodes):
            if index & 1:
                left_siblings |= 1 << len(siblings)
            siblings.append(nodes[other])
        index >>= 1
    return MerklePath(tuple(siblings), left_siblings)


def _parents(nodes: list[bytes]) -> list[bytes]:
    pairs = zip(nodes[::2], nodes[1::2], strict=False)
    return [_node(left, right) for left, right in pairs] + nodes[len(nodes) & ~1 :]


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
