"""A model whose arithmetic can be done by hand, behind the worker protocol, that checks every step it is given.

The next token is the last one plus one, modulo the vocabulary. Its "KV cache" keeps, for each slot, a number that
stands for all tokens up to there; before a row is computed, everything behind it must be in its blocks. So wrong
sharing, blocks given away too early, and a lost or doubled token are found at the step that does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import generation_pb2, worker_pb2

_MASK = (1 << 61) - 1


class ProtocolError(AssertionError):
    """A step that no scheduler should send."""


def next_token(last: int, vocab_size: int) -> int:
    """The model."""
    return (last + 1) % vocab_size


@dataclass
class Row:
    """A row's state at the worker."""

    request_id: str
    sequence_index: int
    tokens: list[int]
    num_prompt_tokens: int
    table: list[int]
    end_ids: frozenset[int]
    min_tokens: int
    num_computed: int = 0
    prefix: list[int] = field(default_factory=lambda: [0])


class FakeModel:
    """Rows, blocks and steps of one epoch.

    Attributes:
        end_after: Output tokens after which an end id is given; 0 is never.
        num_context_tokens: Computed in context chunks so far, over all rows.
        fail_token: A row whose prompt holds it fails.
        checks: Verify the KV cache at each step.
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
    ) -> None:
        self.vocab_size = vocab_size
        self.tokens_per_block = tokens_per_block
        self.end_after = end_after
        self.fail_token = fail_token
        self.checks = checks
        self.attention_window = attention_window
        self.num_context_tokens = 0
        self.num_steps = 0
        self.rows: dict[int, Row] = {}
        self.generating: list[int] = []
        self.slots = [[0] * tokens_per_block for _ in range(num_blocks)]

    def step(self, batch: worker_pb2.StepBatch) -> worker_pb2.StepResult:
        """Runs a step.

        Raises:
            ProtocolError: The step contradicts what is known.
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
        unsampled = set(batch.context_without_sample)
        tokens: list[int] = []
        for row_number, start, length in chunks:
            row = self._row(row_number)
            if start + length == len(row.tokens) and row_number not in unsampled:
                tokens.append(self._sample(row, row_number, result))
            row.num_computed = start + length
            self.num_context_tokens += length
        for row_number in self.generating:
            row = self.rows[row_number]
            row.num_computed += 1
            tokens.append(self._sample(row, row_number, result))
        result.token_ids.extend(tokens)
        return result

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
            )
        for number, block in zip(batch.block_rows, batch.block_ids, strict=True):
            self._row(number).table.append(block)
        for source, target in zip(batch.copy_source_blocks, batch.copy_target_blocks, strict=True):
            self.slots[target] = list(self.slots[source])
        self._update_generation(batch)

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
                    raise ProtocolError(f"row {number} generates with {row.num_computed} of {len(row.tokens)} computed")

    def _write(self, chunks: list[tuple[int, int, int]]) -> None:
        """All keys and values of a step are written before anything is attended to."""
        spans = [(self._row(number), start, start + length) for number, start, length in chunks]
        spans += [(self.rows[n], self.rows[n].num_computed, self.rows[n].num_computed + 1) for n in self.generating]
        for row, start, end in spans:
            if end > len(row.tokens) or end > len(row.table) * self.tokens_per_block:
                raise ProtocolError(f"{row.request_id} computes [{start}, {end}) with {len(row.table)} blocks")
            self._extend_prefix(row, end)
            for position in range(start, end):
                block, offset = divmod(position, self.tokens_per_block)
                self.slots[row.table[block]][offset] = row.prefix[position + 1]
        for row, start, end in spans:
            first = max(0, start - self.attention_window + 1) if self.attention_window else 0
            for position in range(first, end):
                block, offset = divmod(position, self.tokens_per_block)
                if self.slots[row.table[block]][offset] != row.prefix[position + 1]:
                    raise ProtocolError(
                        f"{row.request_id}/{row.sequence_index}: position {position} is not in its block"
                    )

    def _check_blocks_are_owned(self, batch: worker_pb2.StepBatch) -> None:
        for block in (*batch.block_ids, *(block for added in batch.add_sequences for block in added.block_ids)):
            if not 0 <= block < len(self.slots):
                raise ProtocolError(f"there is no block {block}")

    def _extend_prefix(self, row: Row, end: int) -> None:
        prefix = row.prefix
        while len(prefix) <= end:
            prefix.append((prefix[-1] * 1_000_003 + row.tokens[len(prefix) - 1] + 1) & _MASK)

    def _sample(self, row: Row, number: int, result: worker_pb2.StepResult) -> int:
        if self.fail_token is not None and self.fail_token in row.tokens[: row.num_prompt_tokens]:
            error = generation_pb2.ErrorInfo(code=2, message="the row failed")
            result.errors.append(worker_pb2.RowError(row=number, error=error))
            row.tokens.append(0)
            return 0
        num_output = len(row.tokens) - row.num_prompt_tokens
        if self.end_after and num_output + 1 >= self.end_after and row.end_ids and num_output >= row.min_tokens:
            token = min(row.end_ids)
        else:
            token = next_token(row.tokens[-1], self.vocab_size)
        row.tokens.append(token)
        return token
