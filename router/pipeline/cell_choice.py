"""Chooses the cell for a request: the one that has the least work to do for it, including the work queued ahead of it.

The router knows from KV events which prefixes each cell has cached (kv_index). If no cell has cached any of the prompt,
requests with the same beginning go to the same cell, unless it is clearly busier than the least busy one.

A call with an idempotency key instead goes to a home cell that its request id determines. A repeated call, through any
router, must find the request of the first call, regardless of which cells were busy or down then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from router.pipeline.kv_index import KvIndex, PromptBlocks

_PREFIX_TOKENS = 64
# Maximum load of the cell preferred for a prefix, relative to the load of the least busy cell.
_BUSY_FACTOR, _BUSY_MARGIN = 1.25, 8
# Load of one running request, expressed as a number of prompt tokens to compute.
_TOKENS_PER_REQUEST = 32


class CellState(Protocol):
    """The properties of a cell on which the choice depends.

    Attributes:
        name: Its name, which does not change while the cell exists.
        index: Its cached prefixes.
    """

    name: str
    load: int
    index: KvIndex


CellT = TypeVar("CellT", bound=CellState)


def choose_cell(cells: Sequence[CellT], token_ids: Sequence[int], cache_salt: str) -> CellT:
    """Return the cell for a prompt. Precondition: `cells` is not empty."""
    if len(cells) == 1:
        return cells[0]
    prompt = PromptBlocks(token_ids, cache_salt)
    cached = {cell.name: cell.index.num_cached(prompt) for cell in cells}
    if any(cached.values()):
        return max(cells, key=lambda cell: cached[cell.name] - _TOKENS_PER_REQUEST * cell.load)
    least = min(cells, key=lambda cell: cell.load)
    favourite = max(cells, key=lambda cell: _affinity(cell.name, token_ids[:_PREFIX_TOKENS], cache_salt))
    return favourite if favourite.load <= _BUSY_FACTOR * least.load + _BUSY_MARGIN else least


def choose_home(cells: Sequence[CellT], request_id: str) -> CellT:
    """Choose the cell of a request that may be submitted again, by its id alone. Precondition: `cells` is not empty."""
    return max(cells, key=lambda cell: hashlib.blake2b(f"{cell.name}\0{request_id}".encode(), digest_size=8).digest())


def _affinity(name: str, prefix: Sequence[int], cache_salt: str) -> bytes:
    """Return a rendezvous hash: when a cell is added or removed, only the prefixes assigned to that cell move."""
    return hashlib.blake2b(f"{name}\0{cache_salt}\0{list(prefix)}".encode(), digest_size=8).digest()
