"""Tracks which rows have an adapter or virtual tokens, and builds the corresponding inputs of a forward pass."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.batch.step import Fork, IntArray, NewSequence
from gpu_worker.lora.cache import AdapterCache
from gpu_worker.lora.inputs import AdapterTokens, VirtualTokens
from midstream.errors import InvalidArgumentError, MidstreamError

P = TypeVar("P")


class RowAdapters(Generic[P]):
    """The LoRA adapter (pinned) and the table of virtual tokens of each row in `Rows` that has them."""

    def __init__(self, cache: AdapterCache[P], vocab_size: int, hidden_size: int) -> None:
        self._cache = cache
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self._placed: dict[int, tuple[str, P]] = {}
        self._tables: dict[int, Tensor] = {}

    def take(self, new: NewSequence) -> NewSequence:
        """Acquire a sequence's adapter and table; on failure, return the sequence with its error set."""
        self._release(new.row)
        if new.error is not None or (new.lora is None and new.prompt is None and new.prompt_table is None):
            return new
        try:
            table = self._table(new)
            if new.lora is not None:
                self._placed[new.row] = (new.lora.fingerprint, self._cache.acquire(new.lora))
        except MidstreamError as error:
            return replace(new, error=error)
        if table is None:
            return new
        self._tables[new.row] = table
        return replace(new, num_virtual_tokens=len(table))

    def fork(self, forks: tuple[Fork, ...]) -> None:
        """Copy adapters and tables from rows to their forks."""
        if not self._placed and not self._tables:
            return
        for fork in forks:
            self._release(fork.to_row)
            if fork.from_row in self._placed:
                self._placed[fork.to_row] = self._placed[fork.from_row]
                self._cache.hold(self._placed[fork.from_row][0])
            if fork.from_row in self._tables:
                self._tables[fork.to_row] = self._tables[fork.from_row]

    def release(self, rows: IntArray) -> None:
        if self._placed or self._tables:
            for row in rows.tolist():
                self._release(row)

    def clear(self) -> None:
        for row in [*self._placed, *self._tables]:
            self._release(row)

    def adapters(self, token_rows: IntArray) -> AdapterTokens[P] | None:
        """Return the adapters of flattened tokens, given each token's row; None if no row has an adapter."""
        if not self._placed:
            return None
        rows = [row for row in np.unique(token_rows).tolist() if row in self._placed]
        if not rows:
            return None
        # Sort by key, so that the order of the adapters does not depend on which rows use them.
        found = dict(sorted((self._placed[row] for row in rows), key=itemgetter(0)))
        places = {fingerprint: i for i, fingerprint in enumerate(found)}
        of_row = np.full(int(token_rows.max()) + 1, -1, dtype=np.int32)
        of_row[rows] = [places[self._placed[row][0]] for row in rows]
        return AdapterTokens(tuple(found), tuple(found.values()), torch.from_numpy(of_row[token_rows]))

    def embeddings(self, token_ids: IntArray, token_rows: IntArray) -> tuple[IntArray, VirtualTokens | None]:
        """Return flattened token ids with virtual tokens set to 0, and the embeddings to use for the virtual tokens."""
        if not self._tables:
            return token_ids, None
        places = np.flatnonzero(token_ids >= self._vocab_size)
        if not len(places):
            return token_ids, None
        values = torch.empty(len(places), self._hidden_size)
        for row in np.unique(token_rows[places]).tolist():
            own = np.flatnonzero(token_rows[places] == row)
            indices = token_ids[places[own]].astype(np.int64) - self._vocab_size
            values[torch.from_numpy(own)] = self._tables[row][torch.from_numpy(indices)]
        return np.where(token_ids >= self._vocab_size, 0, token_ids), VirtualTokens(torch.from_numpy(places), values)

    def _table(self, new: NewSequence) -> Tensor | None:
        if new.prompt is not None:
            table = self._cache.get(new.prompt).prompt_table
            if table is None:
                raise InvalidArgumentError(f"{new.prompt.name!r} is not a prompt adapter", field="prompt_tuning.name")
            return table
        if new.prompt_table is None:
            return None
        shape = new.prompt_table.shape
        if len(shape) != 2 or shape[1] != self._hidden_size:
            message = f"is {list(shape)}, expected [num_virtual_tokens, {self._hidden_size}]"
            raise InvalidArgumentError(message, field="prompt_tuning.table")
        return torch.from_numpy(_writable(new.prompt_table))

    def _release(self, row: int) -> None:
        placed = self._placed.pop(row, None)
        if placed is not None:
            self._cache.release(placed[0])
        self._tables.pop(row, None)


def _writable(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values if values.flags.writeable else values.copy()
