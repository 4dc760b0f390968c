"""Measure the processor time that receipts take in the scheduler: `python -m benchmarks.receipt_cost [--rounds 5]`.

Prints the time of each part without receipts and with them, as medians: the conversion of a request, the journal's
record of a token (256 sequences per commit), and the receipt in the ledger, with its share of a signature.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from midstream.clock import SteadyClock
from midstream.merkle import merkle_root
from midstream.receipts.digests import NONCE_BYTES, body_leaf
from midstream.receipts.keys import SigningKey
from protos import generation_pb2 as pb
from scheduler.core.effects import Accepted, Emitted
from scheduler.core.kind import Kind
from scheduler.core.request import FinishReason, Request, SequenceEnd
from scheduler.edge.receipts import receipt_body
from scheduler.journal.writer import RowWriter
from scheduler.wire.requests import ModelLimits, spec_from_proto

LIMITS = ModelLimits(8192, (2,), 49_152, 576)
KIND = Kind("m" * 64, "w" * 64, "a" * 32, "implementation=native processor=avx2 kernels, AVX2 dtype=float32 kv=int16")
NUM_SEQUENCES, NUM_STEPS, NUM_REQUESTS, NUM_TOKENS, NUM_TOGETHER = 256, 256, 2_000, 16, 64
CLOCK, KEY = SteadyClock(), SigningKey.new()


def message(number: int, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"{number:032x}",
        token_ids=pb.TokenIds(values=range(32)),
        max_tokens=max_tokens,
        sampling=pb.SamplingConfig(seed=5, temperature=0.7),
        tokenizer_fingerprint="t" * 64,
        arrival_time_unix_ns=5,
    )


def requests(count: int, max_tokens: int, *, has_receipts: bool) -> list[Request]:
    made = []
    for number in range(count):
        contents = message(number, max_tokens)
        if has_receipts:
            contents.receipt_nonce = os.urandom(NONCE_BYTES)
        made.append(Request(spec_from_proto(contents, LIMITS, 0), number))
        made[-1].kind = KIND
    return made


def microseconds(work: Callable[[], None], count: int) -> float:
    gc.collect()
    started = time.thread_time()
    work()
    return (time.thread_time() - started) / count * 1e6


def submission(*, has_receipts: bool) -> float:
    contents = [message(number, NUM_TOKENS) for number in range(NUM_REQUESTS)]
    pool = os.urandom(NONCE_BYTES * NUM_REQUESTS)
    nonces = [pool[start : start + NONCE_BYTES] for start in range(0, len(pool), NONCE_BYTES)]

    def convert() -> None:
        for item in contents:
            if has_receipts:
                item.receipt_nonce = nonces.pop()
            spec_from_proto(item, LIMITS, 0)

    return microseconds(convert, NUM_REQUESTS)


def journal(*, has_receipts: bool) -> float:
    writer = RowWriter({}, "m", CLOCK, folds_commits=False)
    running = requests(NUM_SEQUENCES, NUM_STEPS, has_receipts=has_receipts)
    writer.transaction([Accepted(request, is_attached=False) for request in running])
    sequences = [request.sequences[0] for request in running]
    total = 0.0
    for step in range(NUM_STEPS):
        for sequence in sequences:
            sequence.output.append(1000 + step)
        emitted = Emitted(sequences, [step + 1] * NUM_SEQUENCES)
        started = time.thread_time()
        writer.transaction([emitted])
        total += time.thread_time() - started
    return total / (NUM_SEQUENCES * NUM_STEPS) * 1e6


def ended_receipts() -> float:
    ended = requests(NUM_REQUESTS, NUM_TOKENS, has_receipts=True)
    accepted = [pb.GenerateRequest.FromString(request.spec.payload) for request in ended]  # the ledger needs these, too
    for request in ended:
        request.sequences[0].output = array("I", range(NUM_TOKENS))
        request.sequences[0].finish(SequenceEnd(FinishReason.LENGTH, NUM_TOKENS))

    def make() -> None:
        bodies = [receipt_body(request, contents, CLOCK) for request, contents in zip(ended, accepted, strict=True)]
        for start in range(0, NUM_REQUESTS, NUM_TOGETHER):
            KEY.sign(merkle_root(list(map(body_leaf, bodies[start : start + NUM_TOGETHER]))))

    return microseconds(make, NUM_REQUESTS)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    arguments = parser.parse_args()
    rounds = [
        (
            submission(has_receipts=False),
            submission(has_receipts=True),
            journal(has_receipts=False),
            journal(has_receipts=True),
            ended_receipts(),
        )
        for _ in range(arguments.rounds)
    ]
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    table = Table("part", "off, µs", "digests, µs")
    table.add_row("conversion of a request", f"{medians[0]:.2f}", f"{medians[1]:.2f}")
    table.add_row("journal, per token", f"{medians[2]:.3f}", f"{medians[3]:.3f}")
    table.add_row("receipt of a request of 16 tokens", "0", f"{medians[4]:.2f}")
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
