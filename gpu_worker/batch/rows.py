"""The worker's state of all sequences, as dense arrays with one row per sequence.

The state depends only on the scheduler's messages and on the tokens generated since, so any worker can rebuild a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.batch.step import GREEDY, NOTHING, Fork, GuideState, IntArray, NewSequence, OutputParams, SamplingParams
from gpu_worker.features import features_of
from midstream.errors import ExecutionError, InvalidArgumentError, MidstreamError

_MAX_ROWS = 1 << 16
_VECTORS = (
    "lengths",
    "prompt_lengths",
    "num_given",
    "num_blocks",
    "sequence_indices",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seeds",
    "features",
    "is_active",
    "occupancies",
)


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Positions in `Rows.tokens` to fill in once the tokens are known, unless the row then holds another sequence."""

    rows: IntArray
    places: IntArray
    occupancies: IntArray


class Rows:
    """Sequence state; row i holds one sequence or is empty.

    Attributes:
        tokens: int32 [num_rows, max_sequence_length]; known tokens, prompt and output.
        lengths: int32 [num_rows]; number of known tokens of each row.
        prompt_lengths: int32 [num_rows].
        num_given: int32 [num_rows]; number of output tokens that the request gave.
        block_tables: int32 [num_rows, max blocks per sequence].
        num_blocks: int32 [num_rows]; entries in use of each block table.
        is_active: bool [num_rows]; whether the row holds a sequence.
        sampling, outputs, guides: Parameters of sampling, outputs and grammars, by row.
        post_processors: (name, client id, request id) of rows with a logits post-processor.
        temperature, top_k, top_p, min_p, seeds: Fields of `sampling` as vectors.
        sequence_indices: int32 [num_rows].
        occupancies: int32 [num_rows]; incremented whenever the row gets another sequence.
        banned: For each row with allowed tokens, whether each token is another one: [vocab_size].
        features: uint16 [num_rows]; the `Feature` bits that the row's parameters require.
        failed: Errors of rows that cannot run, by row.
    """

    def __init__(
        self, num_rows: int, max_sequence_length: int, tokens_per_block: int, num_blocks: int, vocab_size: int
    ) -> None:
        self.max_sequence_length = max_sequence_length
        self._pool_size = num_blocks
        self._vocab_size = vocab_size
        self.failed: dict[int, MidstreamError] = {}
        self.sampling: list[SamplingParams] = []
        self.outputs: list[OutputParams] = []
        self.guides: list[GuideState | None] = []
        self.post_processors: dict[int, tuple[str, str, str]] = {}
        self.banned: dict[int, NDArray[np.bool_]] = {}
        self.tokens = np.zeros((0, max_sequence_length), dtype=np.int32)
        self.block_tables = np.zeros((0, -(-max_sequence_length // tokens_per_block)), dtype=np.int32)
        self.lengths, self.prompt_lengths, self.num_given, self.num_blocks = _ints(), _ints(), _ints(), _ints()
        self.sequence_indices, self.top_k, self.occupancies = _ints(), _ints(), _ints()
        self.temperature, self.top_p, self.min_p = _floats(), _floats(), _floats()
        self.seeds = np.zeros(0, dtype=np.uint64)
        self.features = np.zeros(0, dtype=np.uint16)
        self.is_active = np.zeros(0, dtype=np.bool_)
        self._resize(num_rows)

    @property
    def num_rows(self) -> int:
        """Maximum number of rows."""
        return len(self.lengths)

    def add(self, new: NewSequence) -> None:
        """Place a sequence in a row; if the sequence cannot run here, mark the row as failed."""
        if new.row >= self.num_rows:
            self._grow(new.row)
        row = new.row
        self.is_active[row] = True
        self.occupancies[row] += 1
        self.lengths[row], self.num_blocks[row], self.features[row] = len(new.token_ids), 0, 0
        self.failed.pop(row, None)
        error = new.error or self._fault(new)
        if error is not None:
            self.failed[row] = error
            return
        self.tokens[row, : len(new.token_ids)] = new.token_ids
        self.prompt_lengths[row], self.num_given[row] = new.num_prompt_tokens, new.num_given_tokens
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.num_blocks[row] = len(new.block_ids)
        sampling = new.sampling
        self.sampling[row] = sampling
        self.seeds[row], self.sequence_indices[row] = sampling.seed, new.sequence_index
        # A beam does not sample: its temperature only scales the log probabilities of the candidates.
        self.temperature[row] = sampling.temperature if sampling.beam_width == 1 else 0
        # top_k may exceed an int32; any value of at least the vocabulary size keeps all tokens.
        self.top_k[row] = min(sampling.top_k, self._vocab_size)
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.outputs[row] = new.outputs
        self.guides[row] = GuideState(new.guide) if new.guide is not None else None
        self.features[row] = features_of(new)
        self.banned.pop(row, None)
        if sampling.allowed_token_ids:
            self.banned[row] = np.ones(self._vocab_size, dtype=np.bool_)
            self.banned[row][list(sampling.allowed_token_ids)] = False
        if new.post_processor:
            self.post_processors[row] = (new.post_processor, new.client_id, new.request_id)

    def num_sampled(self, row: int) -> int:
        """Return the number of output tokens of a row that were sampled for its request."""
        return int(self.lengths[row] - self.prompt_lengths[row] - self.num_given[row])

    def release(self, rows: IntArray) -> None:
        self.is_active[rows] = False
        for row in rows.tolist() if self.failed else ():
            self.failed.pop(row, None)

    def fork(self, forks: tuple[Fork, ...]) -> None:
        """Copy rows to others, each with its own block table. No row may be both source and target."""
        for fork in forks:
            if fork.to_row >= self.num_rows:
                self._grow(fork.to_row)
            self.copy(fork.from_row, fork.to_row)
            self.is_active[fork.to_row] = True
            self.block_tables[fork.to_row, : len(fork.block_ids)] = fork.block_ids
            self.num_blocks[fork.to_row] = len(fork.block_ids)

    def copy(self, source: int, target: int) -> None:
        """Copy a row's tokens and parameters to another row, but not the block table and the active flag."""
        length = self.lengths[source]
        self.occupancies[target] += 1
        self.tokens[target, :length] = self.tokens[source, :length]
        for name in _VECTORS:
            if name not in ("num_blocks", "is_active", "occupancies"):
                vector = getattr(self, name)
                vector[target] = vector[source]
        self.sampling[target], self.outputs[target] = self.sampling[source], self.outputs[source]
        guide = self.guides[source]
        self.guides[target] = GuideState(guide.guide) if guide is not None else None
        if source in self.post_processors:
            self.post_processors[target] = self.post_processors[source]
        if source in self.banned:
            self.banned[target] = self.banned[source]
        self.failed.pop(target, None)
        if source in self.failed:
            self.failed[target] = self.failed[source]

    def append_blocks(self, rows: IntArray, block_ids: IntArray) -> None:
        """Append block_ids[i] to the block table of rows[i]; a row may occur more than once."""
        if block_ids.min() < 0 or block_ids.max() >= self._pool_size:
            raise ExecutionError("a block id is outside the pool")
        places = self.num_blocks[rows]
        repeats = len(set(rows.tolist())) < len(rows)
        if repeats:
            seen: dict[int, int] = {}
            for i, row in enumerate(rows.tolist()):
                places[i] += seen.get(row, 0)
                seen[row] = seen.get(row, 0) + 1
        if places.max() >= self.block_tables.shape[1]:
            raise ExecutionError("a block table has grown longer than the longest sequence needs")
        self.block_tables[rows, places] = block_ids
        np.add.at(self.num_blocks, rows, 1)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one token to each of `rows`; no row may occur twice."""
        lengths = self.lengths[rows]
        # The scheduler ends a sequence at max_sequence_length at the latest; until it does, further tokens overwrite
        # the last element.
        places = np.minimum(lengths, self.max_sequence_length - 1)
        self.tokens[rows, places] = token_ids
        self.lengths[rows] = np.minimum(lengths + 1, self.max_sequence_length)

    def append_pending(self, rows: IntArray) -> PendingTokens:
        """Append the placeholder id -1 - i to rows[i] for a token that is not known yet; no row may occur twice."""
        places = np.minimum(self.lengths[rows], self.max_sequence_length - 1)
        self.append_tokens(rows, -1 - np.arange(len(rows), dtype=np.int32))
        return PendingTokens(rows, places, self.occupancies[rows])

    def fill(self, pending: PendingTokens, token_ids: IntArray) -> None:
        """Replace placeholders by their tokens."""
        is_same = self.occupancies[pending.rows] == pending.occupancies
        self.tokens[pending.rows[is_same], pending.places[is_same]] = token_ids[is_same]

    def append_run(self, row: int, token_ids: list[int]) -> None:
        """Append several tokens to a row, as far as they fit."""
        start = min(int(self.lengths[row]), self.max_sequence_length - 1)
        end = min(start + len(token_ids), self.max_sequence_length)
        self.tokens[row, start:end] = token_ids[: end - start]
        self.lengths[row] = end

    def make_shadow(self, row: int, shadow: int, length: int) -> None:
        """Copy a row to an unused row, and set the number of known tokens in the copy to `length`."""
        if shadow >= self.num_rows:
            self._grow(shadow)
        self.copy(row, shadow)
        self.tokens[shadow, :length] = self.tokens[row, :length]
        self.lengths[shadow] = length

    def clear(self) -> None:
        self.is_active[:] = False
        self.occupancies += 1
        self.failed.clear()

    def _fault(self, new: NewSequence) -> MidstreamError | None:
        tokens, blocks = new.token_ids, new.block_ids
        if not 0 < len(tokens) <= self.max_sequence_length:
            return InvalidArgumentError(f"{len(tokens)} tokens; expected 1 to {self.max_sequence_length}")
        num_ids = self._vocab_size + new.num_virtual_tokens
        if tokens.min() < 0 or tokens.max() >= num_ids:
            return InvalidArgumentError(f"a token id is not in 0..{num_ids - 1}", field="token_ids")
        if len(blocks) > self.block_tables.shape[1]:
            return InvalidArgumentError(
                f"the block table has {len(blocks)} blocks; must have at most {self.block_tables.shape[1]}"
            )
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self._pool_size):
            return InvalidArgumentError("a block id is outside the pool")
        wanted = [token for token, _ in new.sampling.embedding_bias] + list(new.sampling.end_ids)
        wanted += [token for word in new.sampling.bad_words for token in word]
        wanted += new.sampling.allowed_token_ids
        if wanted and not 0 <= min(wanted) <= max(wanted) < self._vocab_size:
            return InvalidArgumentError(f"a token id is not in 0..{self._vocab_size - 1}", field="sampling")
        return None

    def _grow(self, row: int) -> None:
        if row >= _MAX_ROWS:
            raise ExecutionError(f"row {row} exceeds the worker's capacity")
        self._resize(max(2 * self.num_rows, row + 1))

    def _resize(self, num_rows: int) -> None:
        old = self.num_rows
        tokens = np.zeros((num_rows, self.max_sequence_length), dtype=np.int32)
        tokens[:old] = self.tokens  # includes drafts to verify, which are stored past a row's length
        self.tokens = tokens
        tables = np.zeros((num_rows, self.block_tables.shape[1]), dtype=np.int32)
        tables[:old] = self.block_tables
        self.block_tables = tables
        for name in _VECTORS:
            vector = getattr(self, name)
            setattr(self, name, np.concatenate([vector, np.zeros(num_rows - old, dtype=vector.dtype)]))
        self.sampling += [GREEDY] * (num_rows - old)
        self.outputs += [NOTHING] * (num_rows - old)
        self.guides += [None] * (num_rows - old)


def _ints() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _floats() -> NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)
