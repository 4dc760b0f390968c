"""Measure how long it takes to fetch the KV blocks of a long prompt from disk: `python -m benchmarks.kv_tiers`.

Each round computes a new prompt, restarts the whole service, drops the files of the blocks from the page cache, and
sends the same prompt again. Prints the times to the first token and their median ratio, the rate at which the blocks
were fetched, and for comparison the rates of only reading their files and of copying memory. The outputs must be equal.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.kills.service import running_service
from midstream.client import Client, SamplingParams


def generate(model: str, folder: Path, prompt: list[int]) -> tuple[float, list[int]]:
    """Send the prompt to a new service that stores its blocks in the folder; return the seconds until the first token,
    and the output. The service ends when all full blocks of the prompt are stored.
    """
    with (
        running_service(model, 1, 1, 1, MIDSTREAM_DISK_KV_FOLDER=str(folder)) as service,
        Client(service.routers[0]) as client,
    ):
        client.generate(token_ids=[7], sampling=SamplingParams(max_tokens=1)).result()  # connections are open now
        started = time.perf_counter()
        stream = client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=8, temperature=0))
        tokens, first_s = list[int](), 0.0
        for chunk in stream:
            first_s = first_s or time.perf_counter() - started
            tokens += chunk.token_ids
        while len(blocks_in(folder)) < (len(prompt) - 1) // 16:
            time.sleep(0.1)
    return first_s, tokens


def blocks_in(folder: Path) -> list[Path]:
    """Return the files of the stored blocks."""
    return [path for path in folder.rglob("[0-9a-f]*") if path.is_file()]


def read_rate(folder: Path) -> float:
    """Drop the blocks from the page cache, read them in order of their names, and return the bytes per second."""
    drop(folder)
    started = time.perf_counter()
    num_bytes = sum(len(path.read_bytes()) for path in blocks_in(folder))
    return num_bytes / (time.perf_counter() - started)


def copy_rate(num_bytes: int) -> float:
    """Return the bytes per second at which memory is copied."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = source.copy()
    started = time.perf_counter()
    target[:] = source
    return num_bytes / (time.perf_counter() - started)


def drop(folder: Path) -> None:
    """Write the blocks to the disk, and drop them from the page cache."""
    for path in blocks_in(folder):
        file_number = os.open(path, os.O_RDONLY)
        os.fsync(file_number)
        os.posix_fadvise(file_number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file_number)


def main() -> int:
    """Run the rounds; fail if outputs differ or a round took more than a tenth of the time to compute the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000, help="Length of the prompt. [4000]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="A folder on the disk to measure. [a temporary one]")
    arguments = parser.parse_args()
    ratios: list[float] = []
    for number in range(arguments.rounds):
        rng = random.Random(number)
        prompt = [rng.randint(300, 40_000) for _ in range(arguments.tokens)]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            folder = Path(temporary) / "kv"
            computed_s, expected = generate(arguments.model, folder, prompt)
            num_bytes = sum(path.stat().st_size for path in blocks_in(folder))
            disk, memory = read_rate(folder), copy_rate(num_bytes)
            drop(folder)
            fetched_s, found = generate(arguments.model, folder, prompt)
        ratios.append(fetched_s / computed_s)
        print(
            f"{len(prompt)} tokens, {num_bytes / 1e6:.0f} MB: computed in {computed_s:.2f} s, from disk in "
            f"{fetched_s:.2f} s ({num_bytes / fetched_s / 1e6:.0f} MB/s; files alone {disk / 1e6:.0f} MB/s, memory "
            f"{memory / 1e6:.0f} MB/s); outputs {'are equal' if found == expected else 'DIFFER'}",
            flush=True,
        )
        if found != expected:
            return 1
    print(f"median ratio {statistics.median(ratios):.3f}")
    return 1 if statistics.median(ratios) > 0.1 else 0


if __name__ == "__main__":
    sys.exit(main())
