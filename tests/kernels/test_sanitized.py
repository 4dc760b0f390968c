"""The kernels under the address and undefined-behaviour sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

from kernels.build import build

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O0")

# Shapes whose sizes are multiples of nothing, so that a read or write past an end is one past a buffer.
PROGRAM = """
import sys, torch
from pathlib import Path
from kernels.cpu import DecoderDims, Embedding, Library, PackedLinear, WeightFormat
from kernels.cpu.self_check import find_difference
from tests.kernels import libraries
from tests.kernels.models import random_decoder
from tests.kernels.paged import paged_batch

sanitized = Library(Path(sys.argv[1]), "avx2")
libraries.library = lambda name: sanitized
assert find_difference(sanitized) is None
import tests.kernels.models as models
models.library = libraries.library
dims = DecoderDims(hidden_size=41, num_heads=6, num_kv_heads=2, head_dim=24, ffn_size=67, eps=1e-5, scale=0.2)
decoder = random_decoder(dims, 2, has_bias=True, has_head_norms=True, window=20)
for lengths in ([1], [33, 1, 70], [5, 31]):
    batch = paged_batch(lengths, lengths, 5)
    caches = decoder.caches(batch.num_blocks, 5, torch.bfloat16)
    hidden = torch.randn(sum(lengths), 41)
    native = decoder.native("avx2", caches)
    native.forward_layers(
        hidden, batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables
    )
    assert not hidden.isnan().any()
    head = PackedLinear(sanitized, [torch.randn(77, 41)], WeightFormat.F32)
    tokens, sampled = torch.zeros(sum(lengths)).int(), torch.tensor([sum(lengths) - 1]).int()
    table = Embedding(torch.randn(1, 41), WeightFormat.F32, 41)
    steps = (batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables)
    best, highest = native.choose(tokens, *steps, sampled, table, torch.ones(41), head)
    assert 0 <= best[0] < 77 and highest.isfinite().all()
print("clean")
"""


def test_no_access_outside_a_buffer() -> None:
    path = build("avx2", FLAGS)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    root = Path(__file__).parents[2]
    # Python itself never frees everything, and the sanitizer's runtime must come before it.
    environment = os.environ | {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(root),
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "clean"
