"""Finds blocks by their contents, using a hash chain over full blocks of tokens.

A block's hash covers its tokens and all tokens before them, so that equal hashes mean equal keys and values. The chain
starts with a seed computed from the cache salt, adapter and embeddings: requests that differ in one of these never
share blocks.

A block becomes findable when it is allocated for known tokens, before its contents exist; until the step that computes
it is planned it is *pending*. A request that finds a pending block holds it and waits for its writer, so a prefix that
many requests share is computed once even if they arrive together. Steps run strictly in order, so a block can be
treated as computed once its step is planned.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from midstream import kv_hashes
from midstream.record import record
from scheduler.core.adoption import Adoption
from scheduler.core.request import Sequence
from scheduler.core.request_spec import RequestSpec

# Limit on kept lookups. A turn considers fewer waiting requests.
_MAX_LOOKUPS = 64


# not frozen, since one is created for each block that becomes full, and frozen ones take twice as long to create
@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of one hash chain became findable. `token_ids` are the tokens of all these blocks in order; if
    there are none, the blocks may belong to different chains, and their tokens and adapters are unknown. `priorities`
    are their retention priorities, empty if all have the default.
    """

    parent_hash: int
    block_hashes: tuple[int, ...]
    token_ids: array[int]
    lora_name: str
    tokens_per_block: int
    priorities: tuple[int, ...] = ()


@record
class BlocksRemoved:
    """Blocks are no longer findable."""

    block_hashes: tuple[int, ...]


@record
class BlocksUpdated:
    """Blocks have left the pool for the tiers below it, which are cache level 1, or have another retention priority."""

    block_hashes: tuple[int, ...]
    cache_level: int | None = None
    priority: int | None = None


@record
class CacheCleared:
    """The group's whole cache was dropped."""


KvChange = BlocksStored | BlocksRemoved | BlocksUpdated | CacheCleared

_BELOW_POOL = 1  # cache level


def chain_seed(spec: RequestSpec) -> int:
    """Return the seed of a request's hash chain; 0 without cache salt, adapter or virtual tokens."""
    return kv_hashes.chain_seed((spec.cache_salt, spec.lora_name, spec.lora_key, spec.prompt_key))


def extend_hashes(sequence: Sequence, num_blocks: int, tokens_per_block: int) -> list[int]:
    """Extend the sequence's hash chain to at least `num_blocks` blocks, whose tokens must be known, and return it."""
    hashes = sequence.block_hashes(tokens_per_block)
    while len(hashes) < num_blocks:
        start = len(hashes) * tokens_per_block
        parent = hashes[-1] if hashes else chain_seed(sequence.request.spec)
        hashes.append(kv_hashes.chain_hash(parent, sequence.tokens_between(start, start + tokens_per_block)))
    return hashes


@record
class Hits:
    """The longest findable prefix of a sequence's known tokens.

    Attributes:
        num_blocks: Number of its blocks.
        num_cached: Number of its blocks that no live sequence holds.
    """

    num_blocks: int = 0
    num_cached: int = 0


class Lookups:
    """Results of prefix lookups, kept until one of them may have changed.

    A turn looks up the prefixes of the same waiting requests as the turn before. A result changes only if one of its
    blocks is withdrawn, is held again or is no longer held, or if the block that would follow becomes findable.
    """

    def __init__(self) -> None:
        self._hits: dict[Hashable, Hits] = {}
        self._blocks = set[int]()
        self._next_hashes = set[int]()

    def get(self, key: Hashable) -> Hits | None:
        """Return a kept result."""
        return self._hits.get(key)

    def keep(self, key: Hashable, hits: Hits, blocks: Iterable[int], next_hash: int | None) -> None:
        """Keep a result: the blocks found, and the hash at which the lookup ended, None if all blocks were found."""
        if len(self._hits) >= _MAX_LOOKUPS:
            self._forget()
        self._hits[key] = hits
        self._blocks.update(blocks)
        if next_hash is not None:
            self._next_hashes.add(next_hash)

    def note_block(self, block: int) -> None:
        """Record that a block is withdrawn, is held again, or is no longer held."""
        if block in self._blocks:
            self._forget()

    def note_hash(self, value: int) -> None:
        """Record that a block with this hash becomes findable."""
        if value in self._next_hashes:
            self._forget()

    def _forget(self) -> None:
        self._hits, self._blocks, self._next_hashes = {}, set(), set()


# The writer of a block: a sequence that computes it, or an adoption that may find it.
Writer = Sequence | Adoption


class PrefixCache:
    """Index of a worker group's blocks by hash, and of the blocks that have yet to be computed.

    Attributes:
        lookups: The results of recent lookups.
    """

    def __init__(
        self,
        priorities_of: Callable[[Iterable[int]], tuple[int, ...]] = lambda _: (),
        is_below: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Create an empty index.

        Args:
            priorities_of: Returns the retention priorities of blocks, empty if all have the default.
            is_below: Returns whether the block with a hash is in a tier below the pool.
        """
        self.lookups = Lookups()
        self._priorities_of, self._is_below = priorities_of, is_below
        self._below = set[int]()  # hashes of blocks that were reported as stored, and as moved below the pool
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        # Blocks that no planned step computes yet, and the writer of each; None means the next sequence that needs the
        # block.
        self._pending: dict[int, Writer | None] = {}
        self._changes: list[KvChange] = []
        self._news: list[tuple[int, int]] = []

    def find(self, hashes: list[int]) -> list[int]:
        """Return the blocks of the longest published prefix of the hash chain."""
        blocks: list[int] = []
        block_of = self._block_of
        for value in hashes:
            block = block_of.get(value)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, value: int) -> bool:
        """Add a block to the index; return False if another block already has the same contents."""
        if value in self._block_of:
            return False
        self._block_of[value] = block
        self._hash_of[block] = value
        self.lookups.note_hash(value)
        return True

    @property
    def num_pending(self) -> int:
        """Number of blocks that no planned step computes yet."""
        return len(self._pending)

    def is_pending(self, block: int) -> bool:
        """Return whether no planned step computes the block yet."""
        return block in self._pending

    def claim(self, blocks: Iterable[int], writer: Writer) -> None:
        """Mark `writer` as the one that fills these blocks; other sequences wait for it."""
        for block in blocks:
            self._pending[block] = writer

    def is_claimed(self, block: int, writer: Writer) -> bool:
        """Return whether `writer` has yet to fill the block."""
        return self._pending.get(block) is writer

    def abandon(self, blocks: Iterable[int], writer: Writer) -> None:
        """Release the claims of `writer` on these blocks; the next sequence that needs them claims them."""
        for block in blocks:
            if self._pending.get(block) is writer:
                self._pending[block] = None

    def wait_for(self, block: int, sequence: Sequence) -> Writer | None:
        """Return the writer that a sequence has to wait for if it needs the block; None if the block is computed.

        The writer is the sequence itself if it has claimed the block, or claims it now because nothing else has claimed
        it.
        """
        if block not in self._pending:
            return None
        writer = self._pending[block]
        if writer is None:
            self._pending[block] = writer = sequence
        return writer

    def settle(self, block: int) -> bool:
        """Record that a planned step computes the block, so that no sequence has to wait for it any longer.

        Returns:
            Whether the block is findable from now on.
        """
        return self._pending.pop(block, self) is not self and block in self._hash_of

    def withdraw(self, block: int) -> None:
        """Make a block unfindable, because its contents will change."""
        was_pending = self._pending.pop(block, self) is not self
        value = self._hash_of.pop(block, None)
        if value is None:
            return
        del self._block_of[value]
        self.lookups.note_block(block)
        if not was_pending:
            if self._is_below(value):
                self._below.add(value)
                self._changes.append(BlocksUpdated((value,), cache_level=_BELOW_POOL))
            else:
                self._changes.append(BlocksRemoved((value,)))
            self._news.append((block, 0))

    def note_gone_below(self, hashes: Iterable[int]) -> None:
        """Report which of these blocks, which are no longer in the tiers, were only there."""
        gone = tuple([value for value in hashes if value in self._below])
        if gone:
            self._below.difference_update(gone)
            self._changes.append(BlocksRemoved(gone))

    def note_priority(self, block: int, priority: int) -> None:
        """Report another retention priority of a block."""
        value = self._hash_of.get(block)
        if value is not None and block not in self._pending:
            self._changes.append(BlocksUpdated((value,), priority=priority))

    def contains(self, block: int) -> bool:
        """Return whether the block is findable."""
        return block in self._hash_of

    def hash_of(self, block: int) -> int | None:
        """Return the hash of a findable block; None for other blocks."""
        return self._hash_of.get(block)

    def contents(self, tokens_per_block: int) -> BlocksStored:
        """Return all blocks that are findable and computed."""
        hashes = tuple([value for block, value in self._hash_of.items() if block not in self._pending])
        return BlocksStored(0, hashes, array("I"), "", tokens_per_block)

    def contents_below(self) -> BlocksUpdated:
        """Return the blocks that have been stored and are only in the tiers now."""
        return BlocksUpdated(tuple(self._below), cache_level=_BELOW_POOL)

    def note_stored(self, sequence: Sequence, first_block: int, num_blocks: int, tokens_per_block: int) -> None:
        """Report consecutive stored blocks of the sequence to the worker and to subscribers of KV events."""
        hashes, end_block = sequence.block_hashes(tokens_per_block), first_block + num_blocks
        self._news += zip(sequence.table[first_block:end_block], hashes[first_block:end_block], strict=True)
        tokens = sequence.tokens_between(first_block * tokens_per_block, end_block * tokens_per_block)
        self._below.difference_update(hashes[first_block:end_block])
        self._changes.append(
            BlocksStored(
                parent_hash=hashes[first_block - 1] if first_block else 0,
                block_hashes=tuple(hashes[first_block:end_block]),
                token_ids=tokens,
                lora_name=sequence.request.spec.lora_name,
                tokens_per_block=tokens_per_block,
                priorities=self._priorities_of(sequence.table[first_block:end_block]),
            )
        )

    def take_changes(self) -> list[KvChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def take_news(self) -> list[tuple[int, int]]:
        """Return the (block, content hash) pairs that have not been sent to the worker; hash 0 means that the block's
        contents may change.
        """
        news, self._news = self._news, []
        return news

    def note_dropped(self, blocks: Iterable[int]) -> None:
        """Report blocks that the worker kept but that are not findable here, so that their contents may change."""
        self._news += [(block, 0) for block in blocks if block not in self._hash_of]
