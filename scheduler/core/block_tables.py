"""Block tables of a worker group's sequences; a table is filled when its sequence starts, grows as the sequence
generates, and is released at its end.

Sequences with the same tokens share blocks. Others can find the blocks that a sequence will compute as soon as it
starts (prefix_cache describes how they wait for them); blocks of generated tokens can be found once they are full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from scheduler.core.adoption import AdoptedBlock, Adoption, Adoptions
from scheduler.core.block_manager import BlockManager, Retention
from scheduler.core.config import CoreConfig
from scheduler.core.prefix_cache import Hits, extend_hashes
from scheduler.core.request import NO_RESULTS, Request, Sequence
from scheduler.core.request_spec import DEFAULT_RETENTION_PRIORITY, RequestSpec
from scheduler.core.timers import Clock


class BlockTables:
    """The block tables of one group.

    Attributes:
        has_window: Whether blocks that left the attention window are released, except those of sink tokens.
        num_reserved_blocks: Number of blocks that sequences with tables may still allocate; with a window, that they
            may hold in total.
    """

    def __init__(
        self,
        config: CoreConfig,
        blocks: BlockManager,
        tokens_per_block: int,
        clock: Clock,
        attention_window: int,
        *,
        reuses: bool,
    ) -> None:
        """Create tables over `blocks`. No layer attends further back than `attention_window` tokens; 0 means no
        limit. `reuses` means that sequences may share cached blocks.
        """
        self.blocks = blocks
        self.tokens_per_block = tokens_per_block
        self.has_window = attention_window > 0
        self.num_reserved_blocks = 0
        self._prefix_cache = blocks.prefix_cache
        self._clock = clock
        self._enable_reuse = reuses
        self._window = attention_window
        self._num_sink_blocks = self.blocks_of(config.sink_token_length)
        self._window_blocks = self._num_sink_blocks + self.blocks_of(self._window) + 2

    @property
    def num_blocks_to_reserve(self) -> int:
        """Number of blocks that are neither held nor reserved for running sequences."""
        blocks = self.blocks.num_blocks if self.has_window else self.blocks.num_available
        return blocks - self.num_reserved_blocks

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks that this many tokens need."""
        return -(-num_tokens // self.tokens_per_block)

    def max_blocks(self, max_num_tokens: int, num_known: int) -> int:
        """Return the maximum number of blocks that a sequence of this length holds at one time."""
        most = self.blocks_of(max_num_tokens)
        if self.has_window:
            most = min(most, self._window_blocks)
        return max(most, self.blocks_of(num_known))

    def find(self, sequence: Sequence) -> list[int]:
        """Return cached blocks for the sequence's prefix; the last known token is excluded, since it is always
        computed.
        """
        if not self.reuses(sequence.request):
            return []
        num_blocks = (sequence.num_tokens - 1) // self.tokens_per_block
        return self._prefix_cache.find(extend_hashes(sequence, num_blocks, self.tokens_per_block)[:num_blocks])

    def hits(self, sequence: Sequence) -> Hits:
        """Return the number of blocks that `find` finds. Results are cached, so that this may be called for each
        waiting sequence in each turn.
        """
        request, lookups = sequence.request, self._prefix_cache.lookups
        if not self.reuses(request):
            return Hits()
        key = request.ordinal, sequence.index, sequence.num_tokens
        known = lookups.get(key)
        if known is not None:
            return known
        blocks = self.find(sequence)
        num_blocks = (sequence.num_tokens - 1) // self.tokens_per_block
        following = sequence.block_hashes(self.tokens_per_block)[len(blocks) : num_blocks]
        found = Hits(len(blocks), self.blocks.num_cached_of(blocks))
        lookups.keep(key, found, blocks, following[0] if following else None)
        return found

    def reuses(self, request: Request) -> bool:
        """Return whether the request may reuse cached blocks, and other requests may share its blocks."""
        return self._enable_reuse and request.spec.is_cacheable

    def fill(
        self,
        sequence: Sequence,
        leader: Sequence | None,
        adoptions: Adoptions | None = None,
        is_stored: Callable[[int], bool] | None = None,
    ) -> int:
        """Allocate blocks for all known tokens of a sequence.

        Precondition: they are available.

        Args:
            sequence: A sequence without a table.
            leader: Another sequence of its request that has a table; they share the prompt's full blocks.
            adoptions: Queue for full blocks that a dead worker or tiers may hold; None if there are none.
            is_stored: Function that returns whether the block with a given hash can be adopted. Adoption stops at the
                first block for which it returns False. None means that all blocks can be adopted.

        Returns:
            The number of leading blocks that other sequences compute or have computed.
        """
        spec, block_size = sequence.request.spec, self.tokens_per_block
        known = sequence.num_tokens
        shared = self.find(sequence)
        num_prompt_shared = (len(spec.prompt) - 1) // block_size
        if leader is not None:  # the tiers may hold copies of the found blocks, which would be counted twice
            shared = leader.table[:num_prompt_shared] + shared[num_prompt_shared:]
        self.blocks.share(shared, self._clock.now_ns)
        for index in range(len(shared)):
            self._raise_retention(sequence, index, shared[index])
        num_own = self.blocks_of(known) - len(shared)
        table = shared + self.blocks.allocate(num_own, self._clock.now_ns)
        # With a window, a released block may stay held by other sequences that share it, so reserve all blocks that the
        # sequence may hold.
        most = self.max_blocks(spec.max_num_tokens, known)
        sequence.hold(table, len(shared), most if self.has_window else most - len(table))
        self.num_reserved_blocks += sequence.num_reserved
        self._promise(sequence, len(shared), known // block_size)
        if adoptions is not None and self.reuses(sequence.request):
            self._adopt(sequence, adoptions, is_stored)
        if leader is None:
            self.blocks.counts.missed += max(0, num_prompt_shared - len(shared)) if self.reuses(sequence.request) else 0
        return len(shared)

    def num_to_reserve(self, spec: RequestSpec, num_known: int) -> int:
        """Return the number of blocks to reserve for a spare lane of a beam search with `num_known` known tokens per
        lane.
        """
        most = self.max_blocks(spec.max_num_tokens, num_known)
        return most if self.has_window else most - num_known // self.tokens_per_block

    def reserve(self, lane: Sequence, num_known: int) -> None:
        lane.reserve(self.num_to_reserve(lane.request.spec, num_known))
        self.num_reserved_blocks += lane.num_reserved
        lane.publish_at(NO_RESULTS)

    def num_missing_for_forks(self, forks: Iterable[tuple[Sequence, Sequence]]) -> int:
        """Return the number of blocks that the forks allocate, minus the number that they release."""
        num_missing = 0
        for source, target in forks:
            num_missing += source.num_computed % self.tokens_per_block > 0
            num_missing -= sum(1 for block in target.held_blocks if self.blocks.num_owners(block) == 1)
        return num_missing

    def fork(self, forks: Iterable[tuple[Sequence, Sequence]]) -> list[tuple[int, int]]:
        """Replace each target's table by a copy of its source's; a partly filled block is copied.

        Precondition: no source is a target, and `num_missing_for_forks` blocks are available.

        Returns:
            The blocks to copy, as (from, to).
        """
        dropped: list[int] = []
        for source, target in forks:
            dropped += target.held_blocks
            target.fork_from(source, source.num_computed // self.tokens_per_block)
            self.blocks.share(target.held_blocks, self._clock.now_ns)
        self.blocks.release(reversed(dropped), self._clock.now_ns)
        copies: list[tuple[int, int]] = []
        for source, target in forks:
            if source.num_computed % self.tokens_per_block:
                (block,) = self.blocks.allocate(1, self._clock.now_ns)
                copies.append((source.table[len(target.table)], block))
                target.table.append(block)
            self._set_reserved(target, len(target.table))
        return copies

    def empty(self, lane: Sequence) -> None:
        """Release the blocks of a lane that currently has no beam; the lane may get a beam again later."""
        self.blocks.release(reversed(lane.held_blocks), self._clock.now_ns)
        lane.drop_blocks()
        self._set_reserved(lane, lane.num_computed // self.tokens_per_block)

    def _set_reserved(self, lane: Sequence, num_held: int) -> None:
        """Reserve the blocks that a lane may still allocate: all except those it holds or will share with its beam."""
        if not self.has_window:
            num_reserved = self.blocks_of(lane.request.spec.max_num_tokens) - num_held
            self.num_reserved_blocks += num_reserved - lane.num_reserved
            lane.reserve(num_reserved)

    def _promise(self, sequence: Sequence, first: int, end: int) -> None:
        """Make the blocks [first, end), which the sequence will compute, findable, and mark them as pending."""
        cache = self._prefix_cache
        if self.reuses(sequence.request):
            extend_hashes(sequence, end, self.tokens_per_block)
            for index in range(first, end):
                block = sequence.table[index]
                self._publish(sequence, index)
                cache.claim([block], sequence)
            # A block of generated tokens is full, and its last token computed, once the next token is known.
            sequence.publish_at((end + 1) * self.tokens_per_block - len(sequence.request.spec.prompt) + 1)
        else:
            cache.claim(sequence.table[first:end], sequence)
            sequence.publish_at(NO_RESULTS)

    def _adopt(self, sequence: Sequence, adoptions: Adoptions, is_stored: Callable[[int], bool] | None) -> None:
        """Queue for adoption the blocks that the sequence would otherwise compute; its last known token is still
        computed.
        """
        end = (sequence.num_tokens - 1) // self.tokens_per_block
        hashes = sequence.block_hashes(self.tokens_per_block)
        for index in range(sequence.num_hit_blocks, end):
            block, value = sequence.table[index], hashes[index]
            if is_stored is not None and not is_stored(value):
                return
            self._prefix_cache.claim([block], adoptions.add(AdoptedBlock(sequence, index, block, value)))
            sequence.limit_hits(index + 1)

    def still_wants(self, adoption: Adoption, entry: AdoptedBlock) -> bool:
        """Return whether a block queued for adoption still belongs to its sequence; if not, the next sequence that
        needs the block computes it.
        """
        if not self._prefix_cache.is_claimed(entry.block, adoption):
            return False
        if not entry.is_held:
            self._prefix_cache.abandon([entry.block], adoption)
        return entry.is_held

    def settle(self, adoption: Adoption, missing: Collection[int]) -> None:
        """Apply the result of an adoption: found blocks count as computed, and their sequences compute the missing
        ones.
        """
        cache = self._prefix_cache
        for entry in adoption.entries:
            if not cache.is_claimed(entry.block, adoption):
                continue  # the block was released, and may belong to another sequence
            if not entry.is_held:
                cache.abandon([entry.block], adoption)
            elif entry.block in missing:
                cache.claim([entry.block], entry.sequence)
                entry.sequence.limit_hits(min(entry.sequence.num_hit_blocks, entry.index))
            elif cache.settle(entry.block):
                cache.note_stored(entry.sequence, entry.index, 1, self.tokens_per_block)

    def grow(self, sequences: list[Sequence]) -> list[int]:
        """Append a block to each sequence's table; return the blocks. Precondition: enough blocks are available."""
        if not self.has_window:
            for sequence in sequences:
                sequence.reserve(sequence.num_reserved - 1)
            self.num_reserved_blocks -= len(sequences)
        blocks = self.blocks.allocate(len(sequences), self._clock.now_ns)
        for sequence, block in zip(sequences, blocks, strict=True):
            sequence.table.append(block)
        return blocks

    def free_behind_windows(self, sequences: Iterable[Sequence]) -> None:
        """Release the blocks that have left the attention windows of the sequences."""
        if not self.has_window:
            return
        for sequence in sequences:
            # The next query attends to positions above num_computed - window.
            num_behind = max(0, sequence.num_computed - self._window + 1) // self.tokens_per_block
            first = max(sequence.num_freed, self._num_sink_blocks)
            if num_behind > first:
                self.blocks.release(reversed(sequence.table[first:num_behind]), self._clock.now_ns)
                sequence.free_before(num_behind, self._num_sink_blocks)

    def publish_generated(self, sequence: Sequence) -> None:
        """Publish the block of generated tokens that has just become full."""
        sequence.publish_at(sequence.next_publish + self.tokens_per_block)
        index = (sequence.num_tokens - 1) // self.tokens_per_block - 1
        if index < sequence.num_freed:
            return
        extend_hashes(sequence, index + 1, self.tokens_per_block)
        if self._publish(sequence, index):
            self._prefix_cache.note_stored(sequence, index, 1, self.tokens_per_block)

    def _publish(self, sequence: Sequence, index: int) -> bool:
        """Make a block findable, with the retention of its request; return False if another block has the same
        contents.
        """
        block, value = sequence.table[index], sequence.block_hashes(self.tokens_per_block)[index]
        if not self._prefix_cache.publish(block, value):
            self._raise_retention(sequence, index, self._prefix_cache.find([value])[0])
            return False
        retention = self._retention_asked(sequence, index)
        if retention is not None:
            self.blocks.retain(block, retention)
        return True

    def _raise_retention(self, sequence: Sequence, index: int, block: int) -> None:
        retention = self._retention_asked(sequence, index)
        if retention is not None:
            self.blocks.raise_retention(block, retention, self._clock.now_ns)

    def _retention_asked(self, sequence: Sequence, index: int) -> Retention | None:
        """Return the retention that the request sets for a block, or None."""
        spec, start = sequence.request.spec, index * self.tokens_per_block
        retention: Retention | None = None
        if start >= len(spec.prompt):
            if spec.decode_priority != DEFAULT_RETENTION_PRIORITY or spec.decode_duration_ns is not None:
                retention = Retention(spec.decode_priority, spec.decode_duration_ns)
        else:
            for item in spec.retention:
                if item.start <= start and (item.end is None or start < item.end):
                    retention = Retention(item.priority, item.duration_ns)
        return retention

    def break_promises(self, sequence: Sequence) -> None:
        """Release the claims of a sequence in its context phase on shared blocks; other sequences that hold the blocks
        compute them.
        """
        self._prefix_cache.abandon(sequence.held_blocks, sequence)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's blocks. The caller clears the sequence's table."""
        self.blocks.release(reversed(sequence.held_blocks), self._clock.now_ns)
        self.num_reserved_blocks -= sequence.num_reserved
