"""The prefixes cached by a cell's workers, as known from its KV events; routers use them to choose between cells.

The index may be inaccurate at any time: events arrive late, and other routers may use the cell too. This costs cache
hits, but never changes output.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from midstream.kv_hashes import chain_hash, chain_seed
from protos import stats_pb2

# Maximum number of a prompt's blocks to look up; looking up more would cost more time than it saves.
_MAX_BLOCKS = 1024


class KvIndex:
    """Hashes of the cached blocks of a cell's worker groups."""

    def __init__(self) -> None:
        # Both are keyed by worker group; block sizes may differ between groups.
        self._stored: dict[str, set[int]] = {}
        self._tokens_per_block: dict[str, int] = {}
        self._next = 0

    def apply(self, batch: stats_pb2.KvEventBatch) -> bool:
        """Apply events; return False if some were lost or out of order, so that a snapshot is needed.

        Events that were already applied are ignored.
        """
        if batch.is_snapshot:
            self._stored.clear()
        for event in batch.events:
            number = event.sequence_number
            if batch.is_snapshot:
                self._next = number + 1
            elif number < self._next:
                continue
            elif number > self._next:
                return False
            else:
                self._next = number + 1
            self._apply(event)
        return True

    def _apply(self, event: stats_pb2.KvEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "stored":
            self._tokens_per_block[event.group_id] = event.stored.tokens_per_block
            self._stored.setdefault(event.group_id, set()).update(event.stored.block_hashes)
        elif kind == "updated":
            if event.updated.cache_level:  # it can still be fetched; in a snapshot, it has not been named before
                self._stored.setdefault(event.group_id, set()).update(event.updated.block_hashes)
        elif kind == "removed":
            self._stored.get(event.group_id, set()).difference_update(event.removed.block_hashes)
        elif event.group_id:
            self._stored.pop(event.group_id, None)
        else:
            self._stored.clear()

    def num_cached(self, prompt: PromptBlocks) -> int:
        """Return the number of tokens at the beginning of a prompt that at least one worker group has cached."""
        longest = 0
        for group_id, stored in self._stored.items():
            tokens_per_block = self._tokens_per_block[group_id]
            hashes = prompt.hashes(tokens_per_block)
            matched = next((place for place, value in enumerate(hashes) if value not in stored), len(hashes))
            longest = max(longest, matched * tokens_per_block)
        return longest


class PromptBlocks:
    """The hashes of a prompt's blocks, computed once for all cells."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str) -> None:
        self._token_ids, self._cache_salt = token_ids, cache_salt
        self._hashes: dict[int, list[int]] = {}

    def hashes(self, tokens_per_block: int) -> list[int]:
        """Return the hash chain of the full blocks. The last token is excluded, since it is always computed."""
        if tokens_per_block not in self._hashes:
            num_blocks = min((len(self._token_ids) - 1) // tokens_per_block, _MAX_BLOCKS)
            tokens = array("I", self._token_ids[: num_blocks * tokens_per_block])
            value, chain = chain_seed((self._cache_salt, "", "", "")), list[int]()
            for start in range(0, len(tokens), tokens_per_block):
                value = chain_hash(value, tokens[start : start + tokens_per_block])
                chain.append(value)
            self._hashes[tokens_per_block] = chain
        return self._hashes[tokens_per_block]
