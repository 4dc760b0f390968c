"""The model of every simulated worker: a token is a hash of all preceding tokens, the seed and the sequence index.

Each token therefore depends only on its request and the preceding tokens, and a lost, duplicated or foreign token
changes all later tokens. Tokens are pieces of text that split characters.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from gpu_worker.batch.step import NewSequence, RowLogProbs, Step, StepOutput
from midstream.model.token_bytes import byte_level_alphabet
from midstream.text.incremental import ByteLevelFactory, DecoderFactory

VOCAB_SIZE = 96
END_ID = 1
# A worker crashes when a prompt contains this token.
POISON_ID = 2
FIRST_PLAIN_ID = 4
TOKENS_PER_BLOCK = 4
_MASK = (1 << 61) - 1


def extend_state(state: int, token: int) -> int:
    """Return the hash of a sequence of tokens, as stored in the cache, given the hash of all but the last one."""
    return (state * 1_000_003 + token + 1) & _MASK


def next_token(state: int, seed: int, sequence_index: int) -> int:
    """Return the token that follows a sequence with this hash."""
    mixed = (state ^ (seed * 0x9E3779B97F4A7C15) ^ (sequence_index * 0xC2B2AE3D27D4EB4F)) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed ^= mixed >> 29
    if mixed % 64 == 0:
        return END_ID
    return FIRST_PLAIN_ID + (mixed >> 8) % (VOCAB_SIZE - FIRST_PLAIN_ID)


def log_prob(token: int, position: int) -> float:
    """Return the log probability of a token, which is exact as a 32-bit float and differs between neighboring
    tokens.
    """
    return -(token * 64 + position % 64 + 1) / 64


class ProtocolError(AssertionError):
    """A step that a correct scheduler never sends."""


@dataclass
class Row:
    """A worker's row. `states[n]` is the hash of its first n tokens."""

    new: NewSequence
    tokens: list[int]
    table: list[int]
    num_computed: int = 0
    states: list[int] = field(default_factory=lambda: [0])


class SimulatedModel:
    """The rows and blocks of one epoch; checks each step.

    For each slot, the KV cache stores a hash of all tokens up to it. When a row is computed, all preceding tokens must
    be in its blocks. Incorrect sharing and premature release of blocks are therefore detected where they occur.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int = TOKENS_PER_BLOCK, kind: int = 0) -> None:
        """Models of different kinds have other states, and therefore other tokens and blocks.

        Attributes:
            flip: Bits that are wrong in every state from which a token is sampled.
        """
        self._kind = kind
        self.flip = 0
        self._rows: dict[int, Row] = {}
        self._size = tokens_per_block
        self._generating: list[int] = []
        self.slots = [[0] * tokens_per_block for _ in range(num_blocks)]

    def clear(self) -> None:
        """Drop all rows, but keep the blocks."""
        self._rows.clear()
        self._generating.clear()

    def run(self, step: Step) -> StepOutput:
        """Run a step.

        Raises:
            ProtocolError: The step contradicts the current state.
        """
        self._update_rows(step)
        self._update_generating(step)
        spans = [
            (self._row(row), start, start + length)
            for row, start, length in zip(
                step.context_rows.tolist(), step.context_starts.tolist(), step.context_lengths.tolist(), strict=True
            )
        ]
        sampling = [row for row, _, end in spans if end == len(row.tokens)]
        rows = [self._row(number) for number in self._generating]
        spans += [(row, row.num_computed, row.num_computed + 1) for row in rows]
        self._compute(spans)
        log_probs: list[RowLogProbs] = []
        tokens = [self._sample(row, log_probs) for row in sampling + rows]
        digests = (row.states[len(row.tokens) - 1] ^ self.flip for row in sampling + rows if step.reports_digests)
        return StepOutput(np.array(tokens, dtype=np.int32), tuple(log_probs), (), 0.001, logit_digests=tuple(digests))

    def _row(self, number: int) -> Row:
        if number not in self._rows:
            raise ProtocolError(f"row {number} is empty")
        return self._rows[number]

    def _update_rows(self, step: Step) -> None:
        for number in step.released_rows.tolist():
            self._row(number)
            del self._rows[number]
        for new in step.new_sequences:
            if new.row in self._rows:
                raise ProtocolError(f"row {new.row} is taken")
            self._rows[new.row] = Row(new, new.token_ids.tolist(), new.block_ids.tolist(), states=[self._kind])
        for number, block in zip(step.block_rows.tolist(), step.block_ids.tolist(), strict=True):
            self._row(number).table.append(block)
        for source, target in zip(step.copy_sources.tolist(), step.copy_targets.tolist(), strict=True):
            self.slots[target] = list(self.slots[source])

    def _update_generating(self, step: Step) -> None:
        rows = step.generation_rows.tolist()
        if step.repeat_generation:
            gone = {*step.released_rows.tolist(), *step.idle_rows.tolist()}
            rows += [number for number in self._generating if number not in gone]
        self._generating = sorted(rows)
        for number in self._generating:
            row = self._row(number)
            if row.num_computed != len(row.tokens) - 1:
                raise ProtocolError(
                    f"row {number} generates, but only {row.num_computed} of {len(row.tokens)} tokens are computed"
                )

    def _compute(self, spans: list[tuple[Row, int, int]]) -> None:
        """Write the keys and values of all rows of a step, and only then check what their attention reads."""
        for row, start, end in spans:
            if end > len(row.tokens) or end > len(row.table) * self._size:
                raise ProtocolError(
                    f"{row.new.request_id} computes up to token {end} with only {len(row.table)} blocks"
                )
            while len(row.states) <= end:
                row.states.append(extend_state(row.states[-1], row.tokens[len(row.states) - 1]))
            for position in range(start, end):
                self.slots[row.table[position // self._size]][position % self._size] = row.states[position + 1]
        for row, _, end in spans:
            for position in range(end):
                slot = self.slots[row.table[position // self._size]][position % self._size]
                if slot != row.states[position + 1]:
                    raise ProtocolError(f"{row.new.request_id}: position {position} is not in its block")
            row.num_computed = end

    def _sample(self, row: Row, log_probs: list[RowLogProbs]) -> int:
        sampling = row.new.sampling
        position = len(row.tokens) - row.new.num_prompt_tokens
        token = next_token(row.states[len(row.tokens)] ^ self.flip, sampling.seed, row.new.sequence_index)
        if token in sampling.end_ids and position < sampling.min_tokens:
            token = FIRST_PLAIN_ID
        row.tokens.append(token)
        if sampling.log_probs is not None:
            log_probs.append(RowLogProbs(row.new.row, log_prob(token, position), 0, (token,), (0.0,)))
        return token


@dataclass(frozen=True)
class Vocabulary:
    """A stand-in for the tokenizer in the model folder; entries use GPT-2's byte alphabet."""

    pieces: tuple[bytes, ...]
    vocab_size: int = VOCAB_SIZE
    special_ids: frozenset[int] = frozenset((0, END_ID, POISON_ID, 3))

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of a token id."""
        alphabet = {byte: character for character, byte in byte_level_alphabet().items()}
        return "".join(alphabet[byte] for byte in self.pieces[token_id]) if token_id < VOCAB_SIZE else None

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        data = b"".join(self.pieces[token] for token in token_ids if token not in self.special_ids)
        return data.decode("utf-8", "replace")


@cache
def vocabulary(tokenizer: str = "") -> Vocabulary:
    """Return letters, words, and the separate bytes of emoji and Chinese characters; another tokenizer has other
    words.
    """
    dice = random.Random(f"vocabulary{tokenizer}")
    pieces = [b"<s>", b"</s>", b"<poison>", b"<pad>"]
    pieces += [bytes([byte]) for byte in b"abcdefgh ,."]
    pieces += ["\U0001f600".encode()[:2], "\U0001f600".encode()[2:], "\U0001f600".encode(), "中".encode()[:1]]
    pieces += ["中".encode()[1:], "文字".encode(), "文".encode()[:2], "文".encode()[2:], "é".encode()[:1], b"\xa9"]
    if tokenizer:
        pieces[4:12] = [bytes([byte]) for byte in b"ABCDEFGH"]
    while len(pieces) < VOCAB_SIZE:
        pieces.append(bytes(dice.choices(b"abcdefghijklmnop ", k=dice.randint(1, 4))))
    return Vocabulary(tuple(pieces))


@cache
def decoders(tokenizer: str = "") -> DecoderFactory:
    """Return the real decoders for this vocabulary."""
    return ByteLevelFactory(vocabulary(tokenizer))  # type: ignore[arg-type]


def fingerprint() -> str:
    """Return the model's fingerprint."""
    return hashlib.sha256(b"simulated").hexdigest()
