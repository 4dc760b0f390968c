"""The kernels under the address and undefined-behavior sanitizers."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.builds import SANITIZED, compiled

# The sizes are not multiples of any block size, so that an access past the end of a row is past the end of its buffer.
PROGRAM = """
import sys, torch
import numpy as np
from dataclasses import replace
from pathlib import Path
from kernels.cpu import DecoderDims, DecoderLayer, Embedding, Library, NativeDecoder, PackedLinear, WeightFormat
from kernels.cpu import PackedExpert, PackedMixture, draw, empty_draws
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

# Each way to limit a draw: none, few and many tokens, and more than half of a flat distribution.
draws = empty_draws(5)
draws[:] = [(seed, 1, *limits, 0, seed) for seed, limits in enumerate(
    [(1, 0, 0), (0.9, 0, 7), (0.999, 0, 0), (1, 0, 900), (1, 0.1, 0)]
)]
for width in (1, 77, 1500):
    tokens, _ = draw(models.threads("avx2", 2), torch.randn(5, width) * 0.1, np.arange(5, dtype=np.int32), draws)
    assert 0 <= tokens.min() <= tokens.max() < width


def pack(rows, columns, is_gated=False, bias=None):
    weight = torch.randn(rows, columns) * columns**-0.5
    parts = weight.chunk(2) if is_gated else [weight]
    return PackedLinear(sanitized, parts, WeightFormat.F32, bias, is_gated)


def expert(size, is_gated):
    biases = (None, None) if is_gated else (torch.randn(2 * size), torch.randn(41))
    return PackedExpert(pack(2 * size, 41, is_gated, biases[0]), pack(41, size, bias=biases[1]))


# Mixtures, and all that a decoder may have besides.
for activation in ("silu", "clamped_swiglu", "gelu_tanh"):
    is_gated = activation == "silu"
    full = replace(
        dims, activation=activation, rotary_dim=10, is_interleaved=True, norms_qk_rows=True, softcap=5.0,
        residual_scale=0.5, logits_scale=0.3, logits_softcap=4.0, embedding_scale=2.0, has_layer_norm=not is_gated,
    )
    mixture = PackedMixture(
        pack(6, 41), [expert(19, is_gated) for _ in range(6)], 3, "sigmoid", True, num_groups=3, num_active_groups=2,
        correction=torch.randn(6), shared=expert(23, is_gated), shared_gate=pack(1, 41),
    )
    dense = expert(67, is_gated)
    angles = torch.randn(2, 80, 5)
    for lengths in ([1], [33, 1, 70]):
        batch = paged_batch(lengths, lengths, 5)
        caches = torch.zeros(2, 2, batch.num_blocks, 2, 24, 5)
        layers = [
            DecoderLayer(
                qkv=pack(10 * 24, 41), o=pack(41, 6 * 24),
                gate_up=None if i else dense.gate_up, down=None if i else dense.down, mixture=mixture if i else None,
                attention_norm=None if i else torch.randn(41), ffn_norm=torch.randn(41),
                attention_output_norm=torch.randn(41), ffn_output_norm=torch.randn(41),
                q_norm=torch.randn(6 * 24), k_norm=torch.randn(2 * 24), sinks=torch.randn(6),
                k_cache=caches[i, 0], v_cache=caches[i, 1].view(batch.num_blocks, 2, 5, 24),
                chunk=16 if i else None, table=None if i else 1,
            )
            for i in range(2)
        ]
        native = NativeDecoder(models.threads("avx2", 2), full, layers, angles.cos(), angles.sin(), torch.rand(80))
        steps = (batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables)
        hidden = torch.randn(sum(lengths), 41)
        native.forward_layers(hidden, *steps)
        assert not hidden.isnan().any()
        tokens, sampled = torch.zeros(sum(lengths)).int(), torch.tensor([sum(lengths) - 1]).int()
        best, highest = native.choose(tokens, *steps, sampled, table, torch.ones(41), head)
        assert abs(highest) <= 4
print("clean")
"""


def test_no_access_outside_a_buffer() -> None:
    path = compiled("avx2", SANITIZED)
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    root = Path(__file__).parents[2]
    # Python itself never frees all its memory, and the runtime of the sanitizer must be loaded first.
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
