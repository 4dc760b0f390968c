"""Finds blocks by what they hold: a hash chain over full blocks of tokens.

A block's hash covers its tokens and everything before them, so that equal hashes mean equal keys and values. The chain
begins with a seed made of cache salt, adapter and embeddings: requests that differ in one of them never share.

A block is published when it is allocated for known tokens, before its contents exist; until the step that computes it
is planned it is *pending*. A request that finds a pending block holds it and waits for its writer, so a prefix that
many requests share is computed once even when they arrive together. Steps run strictly in order, so a block whose step
is planned is as good as computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.adoption import Adoption
from scheduler.core.request import Sequence
from scheduler.core.request_spec import RequestSpec


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became findable: a run of one chain. `token_ids` are those of all its blocks in order."""

    parent_hash: int
    block_hashes: tuple[int, ...]
    token_ids: tuple[int, ...]
    lora_name: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are not findable any more."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Everything that was cached on the group is gone."""


KvChange = BlocksStored | BlocksRemoved | CacheCleared


def chain_seed(spec: RequestSpec) -> int:
    """Where a request's hash chain begins; 0 without salt, adapter and virtual tokens."""
    parts = (spec.cache_salt, spec.lora_name, spec.lora_key, spec.prompt_key)
    if not any(parts):
        return 0
    text = b"".join(len(part).to_bytes(4, "little") + part for part in map(str.encode, parts))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"chain seed").digest(), "little")


def chain_hash(parent: int, tokens: array[int]) -> int:
    """Hash of a full block after its parent's; 64 bits of BLAKE2b, so nobody can aim at another's block."""
    data = parent.to_bytes(8, "little") + tokens.tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def extend_hashes(sequence: Sequence, num_blocks: int, tokens_per_block: int) -> list[int]:
    """The sequence's chain, made at least `num_blocks` long; its tokens up to there must be known."""
    hashes = sequence.block_hashes
    while len(hashes) < num_blocks:
        start = len(hashes) * tokens_per_block
        parent = hashes[-1] if hashes else chain_seed(sequence.request.spec)
        hashes.append(chain_hash(parent, sequence.tokens_between(start, start + tokens_per_block)))
    return hashes


# Who brings about a block's contents: a sequence that computes them, or an adoption that may find them.
Writer = Sequence | Adoption


class PrefixCache:
    """Which block of one worker group holds which hash, and which are still to be computed."""

    def __init__(self) -> None:
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        # Blocks that no planned step computes yet, with their writers; None: the next one that needs the block.
        self._pending: dict[int, Writer | None] = {}
        self._changes: list[KvChange] = []
        self._news: list[tuple[int, int]] = []

    def find(self, hashes: list[int]) -> list[int]:
        """Blocks that hold the longest published beginning of the chain."""
        blocks: list[int] = []
        block_of = self._block_of
        for value in hashes:
            block = block_of.get(value)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, value: int) -> bool:
        """Makes a block findable; False when another block has the same contents already."""
        if value in self._block_of:
            return False
        self._block_of[value] = block
        self._hash_of[block] = value
        return True

    @property
    def num_pending(self) -> int:
        """Blocks that no planned step computes yet."""
        return len(self._pending)

    def is_pending(self, block: int) -> bool:
        """Whether no planned step computes the block yet."""
        return block in self._pending

    def claim(self, blocks: Iterable[int], writer: Writer) -> None:
        """Note that `writer` is to bring about the contents of these blocks; until then others wait for them."""
        for block in blocks:
            self._pending[block] = writer

    def is_claimed(self, block: int, writer: Writer) -> bool:
        """Whether `writer` is still to bring about the block's contents."""
        return self._pending.get(block) is writer

    def abandon(self, blocks: Iterable[int], writer: Writer) -> None:
        """Leave those of the blocks that `writer` has claimed to the next one that needs them."""
        for block in blocks:
            if self._pending.get(block) is writer:
                self._pending[block] = None

    def wait_for(self, block: int, sequence: Sequence) -> Writer | None:
        """Return whom a sequence that needs the block waits for; None: the block is computed.

        It is the sequence itself where it has claimed the block, or claims it now because nobody else has.
        """
        if block not in self._pending:
            return None
        writer = self._pending[block]
        if writer is None:
            self._pending[block] = writer = sequence
        return writer

    def settle(self, block: int) -> bool:
        """Note that a planned step computes the block, so that nobody has to wait for it any more.

        Returns:
            Whether it can be found from now on.
        """
        return self._pending.pop(block, self) is not self and block in self._hash_of

    def withdraw(self, block: int) -> None:
        """Makes a block unfindable, before its contents change."""
        was_pending = self._pending.pop(block, self) is not self
        value = self._hash_of.pop(block, None)
        if value is None:
            return
        del self._block_of[value]
        if not was_pending:
            self._changes.append(BlocksRemoved((value,)))
            self._news.append((block, 0))

    def contains(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._hash_of

    def note_stored(self, sequence: Sequence, first_block: int, num_blocks: int, tokens_per_block: int) -> None:
        """Tells the worker and readers of KV events that a run of the sequence's blocks was stored."""
        hashes, end_block = sequence.block_hashes, first_block + num_blocks
        self._news += zip(sequence.table[first_block:end_block], hashes[first_block:end_block], strict=True)
        tokens = sequence.tokens_between(first_block * tokens_per_block, end_block * tokens_per_block)
        self._changes.append(
            BlocksStored(
                parent_hash=hashes[first_block - 1] if first_block else 0,
                block_hashes=tuple(hashes[first_block:end_block]),
                token_ids=tuple(tokens),
                lora_name=sequence.request.spec.lora_name,
            )
        )

    def take_changes(self) -> list[KvChange]:
        """Changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def take_news(self) -> list[tuple[int, int]]:
        """What the worker has not been told: a block, and the hash of what it holds; 0 where that may change."""
        news, self._news = self._news, []
        return news

    def note_dropped(self, blocks: Iterable[int]) -> None:
        """Tell the worker of those blocks that it kept and that cannot be found here: their contents may change."""
        self._news += [(block, 0) for block in blocks if block not in self._hash_of]
