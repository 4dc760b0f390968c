"""A fake model, driven over the worker protocol, that validates every step; its output can be computed by hand.

The next token is the last token plus one, modulo the vocabulary size. The model's "KV cache" stores, for each slot, a
hash of all tokens up to it; when a row is computed, all preceding tokens must be in its blocks. Wrong sharing, blocks
that are released too early, and lost or duplicated tokens are therefore detected in the step that causes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from protos import generation_pb2, worker_pb2

_MASK = (1 << 61) - 1
# This value is stored in the blocks of a failed row. A row that reads them yields a wrong token, which must never be
# delivered.
_NOT_COMPUTED = -1


class ProtocolError(AssertionError):
    """A step that a correct scheduler never sends."""


def next_token(last: int, vocab_size: int) -> int:
    """Return the token that follows `last`."""
    return (last + 1) % vocab_size


def candidates(last: int, count: int, end_ids: frozenset[int], vocab_size: int) -> list[tuple[int, float]]:
    """Return the candidates of a beam: the tokens after `last`, most likely first.

    After tokens that are multiples of 7, an end token is the second most likely.
    """
    scale = (1 + last % 5) / 8
    tokens = [(last + 1 + place) % vocab_size for place in range(count)]
    if last % 7 == 0 and end_ids and count > 1:
        tokens[1] = min(end_ids)
    return [(token, -scale * (1 + place)) for place, token in enumerate(tokens)]


def text_of(token: int) -> str:
    """Return the text of a token, in which stop words are found."""
    return f"{token} "


def num_candidates(row: Row) -> int:
    """Return the number of candidates of a beam, as StepResult defines it."""
    if row.has_stops:
        return max(2, 1 + len(row.end_ids)) * row.beam_width
    return row.beam_width + len(row.end_ids)


def num_accepted(position: int, limit: int) -> int:
    """Return how many of at most `limit` drafts the model accepts for a row with `position` tokens."""
    return position * 7 % (limit + 1)


@dataclass
class Row:
    """The state of a row in the worker."""

    request_id: str
    sequence_index: int
    tokens: list[int]
    num_prompt_tokens: int
    table: list[int]
    end_ids: frozenset[int]
    min_tokens: int
    beam_width: int = 1
    stop_words: tuple[str, ...] = ()
    has_stops: bool = False
    num_computed: int = 0
    is_wrong: bool = False
    prefix: list[int] = field(default_factory=lambda: [0])


class FakeModel:
    """Rows, blocks and steps of one epoch.

    Attributes:
        end_after: Number of output tokens, including the end id, after which a row ends; 0 means that there is no end
            id.
        num_context_tokens: Number of tokens computed in context chunks so far, over all rows.
        fail_token: A row whose prompt contains this token fails.
        checks: Whether to verify the KV cache in each step.
        followers: For some tokens, the token that follows instead of the next number.
        digest_shift: Added to the digests of logits, which are the sampled tokens.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        tokens_per_block: int = 16,
        num_blocks: int = 1024,
        end_after: int = 0,
        fail_token: int | None = None,
        checks: bool = True,
        attention_window: int = 0,
        sink_token_length: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.tokens_per_block = tokens_per_block
        self.end_after = end_after
        self.fail_token = fail_token
        self.checks = checks
        self.attention_window = attention_window
        self.sink_token_length = sink_token_length
        self.followers: dict[int, int] = {}
        self.digest_shift = 0
        self.num_context_tokens = 0
        self.num_steps = 0
        self.rows: dict[int, Row] = {}
        self.generating: list[int] = []
        self.slots = [[0] * tokens_per_block for _ in range(num_blocks)]

    def step(self, batch: worker_pb2.StepBatch) -> worker_pb2.StepResult:
        """Run a step.

        Raises:
            ProtocolError: The step contradicts the state of the worker.
        """
        if batch.step_id != self.num_steps + 1:
            raise ProtocolError(f"step {batch.step_id} after {self.num_steps}")
        self.num_steps += 1
        self._update_rows(batch)
        chunks = list(zip(batch.context_rows, batch.context_starts, batch.context_lengths, strict=True))
        if self.checks:
            self._check_blocks_are_owned(batch)
            self._write(chunks)
        result = worker_pb2.StepResult(epoch=batch.epoch, step_id=batch.step_id)
        limits = dict(zip(batch.draft_rows, batch.draft_limits, strict=True))
        tokens: list[int] = []
        counts: list[int] = []
        for row_number, start, length in chunks:
            row = self._row(row_number)
            if start + length == len(row.tokens):
                counts.append(self._sample(row, row_number, tokens, result))
            elif self._fails(row):
                self._fail(row_number, result)
            row.num_computed = start + length
            self.num_context_tokens += length
        for row_number in self.generating:
            row = self.rows[row_number]
            row.num_computed += 1
            count = self._sample(row, row_number, tokens, result)
            if row_number in limits and not self._fails(row):
                count += self._accept(row, row_number, limits[row_number], tokens, result)
            counts.append(count)
        result.token_ids.extend(tokens)
        self._report_digests(batch, counts, result)
        if any(count != 1 for count in counts):
            result.num_tokens.extend(counts)
        if limits:
            drafts = {number: limits.get(number, 0) for number in self.generating}
            result.num_drafts.extend([0] * (len(counts) - len(drafts)) + list(drafts.values()))
        return result

    def _report_digests(self, batch: worker_pb2.StepBatch, counts: list[int], result: worker_pb2.StepResult) -> None:
        if batch.reports_digests:
            ends = accumulate(counts)
            digests = (result.token_ids[end - 1] + self.digest_shift if end else 0 for end in ends)
            result.logit_digests.extend(digests)

    def _row(self, number: int) -> Row:
        if number not in self.rows:
            raise ProtocolError(f"row {number} is empty")
        return self.rows[number]

    def _update_rows(self, batch: worker_pb2.StepBatch) -> None:
        for number in batch.released_rows:
            self._row(number)
            del self.rows[number]
        for added in batch.add_sequences:
            if added.row in self.rows:
                raise ProtocolError(f"row {added.row} is taken")
            self.rows[added.row] = Row(
                request_id=added.request_id,
                sequence_index=added.sequence_index,
                tokens=list(added.token_ids),
                num_prompt_tokens=added.num_prompt_tokens,
                table=list(added.block_ids),
                end_ids=frozenset(added.end_ids),
                min_tokens=added.sampling.min_tokens,
                beam_width=added.sampling.beam_width,
                stop_words=tuple(added.beam_stop_words.words),
                has_stops=added.HasField("beam_stop_words"),
            )
        self._fork(batch)
        for number, block in zip(batch.block_rows, batch.block_ids, strict=True):
            self._row(number).table.append(block)
        for source, target in zip(batch.copy_source_blocks, batch.copy_target_blocks, strict=True):
            self.slots[target] = list(self.slots[source])
        self._update_generation(batch)

    def _fork(self, batch: worker_pb2.StepBatch) -> None:
        sources = {fork.to_row: self._row(fork.from_row) for fork in batch.forks}
        if self.checks and {fork.from_row for fork in batch.forks} & sources.keys():
            raise ProtocolError("a row is both the source and the target of a fork")
        for fork in batch.forks:
            source = sources[fork.to_row]
            self.rows[fork.to_row] = replace(
                source, tokens=source.tokens[:], prefix=source.prefix[:], table=list(fork.block_ids)
            )
        for number, token in zip(batch.beam_rows, batch.beam_token_ids, strict=True):
            row = self._row(number)
            if row.num_computed != len(row.tokens):
                raise ProtocolError(
                    f"beam {number} gets a token, but only {row.num_computed} of {len(row.tokens)} tokens are computed"
                )
            row.tokens.append(token)

    def _update_generation(self, batch: worker_pb2.StepBatch) -> None:
        if batch.repeat_generation:
            if batch.generation_rows or batch.idle_rows or batch.released_rows:
                gone = {*batch.released_rows, *batch.idle_rows}
                rows = [number for number in self.generating if number not in gone]
                self.generating = sorted([*rows, *batch.generation_rows])
        else:
            self.generating = sorted(batch.generation_rows)
        if self.checks:
            for number in self.generating:
                row = self._row(number)
                if row.num_computed != len(row.tokens) - 1:
                    raise ProtocolError(
                        f"row {number} generates, but {row.num_computed} of {len(row.tokens)} tokens are computed"
                    )

    def _write(self, chunks: list[tuple[int, int, int]]) -> None:
        """Write all keys and values of a step, and then check the ones that its rows attend to."""
        size = self.tokens_per_block
        spans = [(self._row(number), start, start + length) for number, start, length in chunks]
        spans += [(self.rows[n], self.rows[n].num_computed, self.rows[n].num_computed + 1) for n in self.generating]
        for row, start, end in spans:
            if end > len(row.tokens) or end > len(row.table) * size:
                raise ProtocolError(f"{row.request_id} computes [{start}, {end}) with {len(row.table)} blocks")
            self._extend_prefix(row, end)
            for position in range(start, end):
                value = _NOT_COMPUTED if self._fails(row) else row.prefix[position + 1]
                self.slots[row.table[position // size]][position % size] = value
        for row, start, end in spans:
            first = max(0, start - self.attention_window + 1) if self.attention_window else 0
            spans_seen = ((0, min(self.sink_token_length, first)), (first, end))
            for low, high in (pair for span in spans_seen for pair in self._by_block(*span)):
                block = low // size
                known = self.slots[row.table[block]][low - block * size : high - block * size]
                if _NOT_COMPUTED in known:
                    row.is_wrong = True
                elif known != row.prefix[low + 1 : high + 1]:
                    raise ProtocolError(
                        f"{row.request_id}/{row.sequence_index}: positions [{low}, {high}) are not in their block"
                    )

    def _by_block(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        size = self.tokens_per_block
        for block in range(start // size, -(-end // size)):
            yield max(start, block * size), min(end, (block + 1) * size)

    def _check_blocks_are_owned(self, batch: worker_pb2.StepBatch) -> None:
        for block in (*batch.block_ids, *(block for added in batch.add_sequences for block in added.block_ids)):
            if not 0 <= block < len(self.slots):
                raise ProtocolError(f"block {block} does not exist")

    def _extend_prefix(self, row: Row, end: int) -> None:
        prefix = row.prefix
        while len(prefix) <= end:
            prefix.append((prefix[-1] * 1_000_003 + row.tokens[len(prefix) - 1] + 1) & _MASK)

    def _fails(self, row: Row) -> bool:
        return self.fail_token is not None and self.fail_token in row.tokens[: row.num_prompt_tokens]

    def _fail(self, number: int, result: worker_pb2.StepResult) -> None:
        error = generation_pb2.ErrorInfo(code=2, message="the row failed")
        result.errors.append(worker_pb2.RowError(row=number, error=error))

    def _accept(self, row: Row, number: int, limit: int, tokens: list[int], result: worker_pb2.StepResult) -> int:
        """Verify drafts: write all of them to the cache, and accept some of them."""
        if len(row.table) * self.tokens_per_block < row.num_computed + limit:
            raise ProtocolError(f"row {number} has no room for {limit} drafts")
        accepted = num_accepted(len(row.tokens), limit)
        for position in range(row.num_computed, row.num_computed + limit):
            block, offset = divmod(position, self.tokens_per_block)
            self.slots[row.table[block]][offset] = 0
        for _ in range(accepted):
            row.num_computed += 1
            self._extend_prefix(row, row.num_computed)
            block, offset = divmod(row.num_computed - 1, self.tokens_per_block)
            self.slots[row.table[block]][offset] = row.prefix[row.num_computed]
            self._sample(row, number, tokens, result)
        result.num_draft_tokens += limit
        result.num_accepted_tokens += accepted
        return accepted

    @staticmethod
    def _stop_word(row: Row, token: int) -> int:
        """Return the stop word that a token completes, as in StepResult."""
        output = [*row.tokens[row.num_prompt_tokens :], token]
        if len(output) < row.min_tokens:
            return 0
        text = "".join(map(text_of, output))
        return next((number for number, word in enumerate(row.stop_words, 1) if word in text), 0)

    def _sample(self, row: Row, number: int, tokens: list[int], result: worker_pb2.StepResult) -> int:
        """Append the sampled tokens of a row to `tokens`; return their number."""
        if self._fails(row):
            self._fail(number, result)
            if row.beam_width > 1:
                return 0
            row.tokens.append(0)
            tokens.append(0)
            return 1
        if row.beam_width > 1:
            found = candidates(row.tokens[-1], num_candidates(row), row.end_ids, self.vocab_size)
            tokens.extend(token for token, _ in found)
            result.candidate_log_probs.extend(log_prob for _, log_prob in found)
            result.candidate_stop_words.extend(self._stop_word(row, token) for token, _ in found)
            return len(found)
        num_output = len(row.tokens) - row.num_prompt_tokens
        if self.end_after and num_output + 1 >= self.end_after and row.end_ids and num_output >= row.min_tokens:
            token = min(row.end_ids)
        else:
            last = row.tokens[-1]
            token = self.followers.get(last, next_token(last, self.vocab_size))
        token = (token + row.is_wrong) % self.vocab_size
        row.tokens.append(token)
        tokens.append(token)
        return 1
