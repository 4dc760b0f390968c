"""The model that every simulated worker runs: a token is a hash of all before it, the seed and the sequence.

So each token depends on its request and the tokens before it alone (R1), and a lost, doubled or foreign token changes
everything behind it. Tokens stand for pieces of text that tear characters apart.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from detokenizer.incremental import ByteLevelFactory, DecoderFactory
from gpu_worker.step import RowLogProbs, Step, StepOutput
from protos import generation_pb2, worker_pb2
from tests.fakes.model import FakeModel, Row

VOCAB_SIZE = 96
END_ID = 1
# A worker that is given a prompt with this token dies.
POISON_ID = 2
FIRST_PLAIN_ID = 4
TOKENS_PER_BLOCK = 4
_MASK = (1 << 61) - 1


def extend_state(state: int, token: int) -> int:
    """The hash of some tokens and one more, as the fake model's cache keeps it."""
    return (state * 1_000_003 + token + 1) & _MASK


def next_token(state: int, seed: int, sequence_index: int) -> int:
    """The model."""
    mixed = (state ^ (seed * 0x9E3779B97F4A7C15) ^ (sequence_index * 0xC2B2AE3D27D4EB4F)) & ((1 << 64) - 1)
    mixed = ((mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    mixed ^= mixed >> 29
    if mixed % 64 == 0:
        return END_ID
    return FIRST_PLAIN_ID + (mixed >> 8) % (VOCAB_SIZE - FIRST_PLAIN_ID)


def log_prob(token: int, position: int) -> float:
    """What the model gives for a token: exact as a 32-bit float, and different for neighbours."""
    return -(token * 64 + position % 64 + 1) / 64


class SimulatedModel(FakeModel):
    """The fake model, which checks every step, with other tokens."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, tokens_per_block=TOKENS_PER_BLOCK, num_blocks=num_blocks, checks=True)
        self._samplings: dict[int, tuple[int, bool]] = {}
        self._outputs: list[RowLogProbs] = []

    def run(self, step: Step) -> StepOutput:
        """Runs a step as the link gives it."""
        for new in step.new_sequences:
            self._samplings[new.row] = (new.sampling.seed, new.sampling.log_probs is not None)
        self._outputs = []
        result = self.step(_message(step))
        tokens = np.array(result.token_ids, dtype=np.int32)
        return StepOutput(tokens, tuple(self._outputs), (), 0.001)

    def _sample(self, row: Row, number: int, result: worker_pb2.StepResult) -> int:
        seed, wants_log_probs = self._samplings[number]
        position = len(row.tokens) - row.num_prompt_tokens
        token = next_token(row.prefix[len(row.tokens)], seed, row.sequence_index)
        if token in row.end_ids and position < row.min_tokens:
            token = FIRST_PLAIN_ID
        row.tokens.append(token)
        if wants_log_probs:
            self._outputs.append(RowLogProbs(number, log_prob(token, position), 0, (token,), (0.0,)))
        return token


def _message(step: Step) -> worker_pb2.StepBatch:
    return worker_pb2.StepBatch(
        epoch=step.epoch,
        step_id=step.step_id,
        released_rows=step.released_rows.tolist(),
        add_sequences=[
            worker_pb2.AddSequence(
                row=new.row,
                request_id=new.request_id,
                sequence_index=new.sequence_index,
                token_ids=new.token_ids.tolist(),
                num_prompt_tokens=new.num_prompt_tokens,
                block_ids=new.block_ids.tolist(),
                end_ids=new.sampling.end_ids,
                sampling=generation_pb2.SamplingConfig(min_tokens=new.sampling.min_tokens),
            )
            for new in step.new_sequences
        ],
        context_rows=step.context_rows.tolist(),
        context_starts=step.context_starts.tolist(),
        context_lengths=step.context_lengths.tolist(),
        context_without_sample=step.context_without_sample.tolist(),
        repeat_generation=step.repeat_generation,
        generation_rows=step.generation_rows.tolist(),
        idle_rows=step.idle_rows.tolist(),
        block_rows=step.block_rows.tolist(),
        block_ids=step.block_ids.tolist(),
        copy_source_blocks=step.copy_sources.tolist(),
        copy_target_blocks=step.copy_targets.tolist(),
    )


@dataclass(frozen=True)
class Vocabulary:
    """Stands in for the model folder's tokenizer; entries are in GPT-2's alphabet of bytes."""

    pieces: tuple[bytes, ...]
    vocab_size: int = VOCAB_SIZE
    special_ids: frozenset[int] = frozenset((0, END_ID, POISON_ID, 3))

    def token(self, token_id: int) -> str | None:
        """The entry of an id."""
        alphabet = {byte: character for character, byte in _alphabet().items()}
        return "".join(alphabet[byte] for byte in self.pieces[token_id]) if token_id < VOCAB_SIZE else None

    def text(self, token_ids: list[int]) -> str:
        """What tokens say, without special ones."""
        data = b"".join(self.pieces[token] for token in token_ids if token not in self.special_ids)
        return data.decode("utf-8", "replace")


def _alphabet() -> dict[str, int]:
    from detokenizer.incremental import _byte_level_alphabet

    return _byte_level_alphabet()


@cache
def vocabulary() -> Vocabulary:
    """Letters, words, and the bytes of emoji and Chinese characters, torn apart."""
    dice = random.Random("vocabulary")
    pieces = [b"<s>", b"</s>", b"<poison>", b"<pad>"]
    pieces += [bytes([byte]) for byte in b"abcdefgh ,."]
    pieces += ["\U0001f600".encode()[:2], "\U0001f600".encode()[2:], "\U0001f600".encode(), "中".encode()[:1]]
    pieces += ["中".encode()[1:], "文字".encode(), "文".encode()[:2], "文".encode()[2:], "é".encode()[:1], b"\xa9"]
    while len(pieces) < VOCAB_SIZE:
        pieces.append(bytes(dice.choices(b"abcdefghijklmnop ", k=dice.randint(1, 4))))
    return Vocabulary(tuple(pieces))


@cache
def decoders() -> DecoderFactory:
    """The real decoders, for this vocabulary."""
    return ByteLevelFactory(vocabulary())  # type: ignore[arg-type]


def fingerprint() -> str:
    """Of the model."""
    return hashlib.sha256(b"simulated").hexdigest()
