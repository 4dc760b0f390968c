"""The results of the ARM build are bit-identical to those of the x86 builds. The ARM build runs in an emulator, so
these tests need a cross compiler and QEMU (Debian: g++-aarch64-linux-gnu, qemu-user-static).
"""

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.build import build
from kernels.cpu.blocks import random_blocks
from kernels.cpu.decoder import stored_head_dim
from kernels.cpu.library import DimsStruct
from kernels.cpu.linear import InputFormat, WeightFormat
from kernels.cpu.sampling import empty_draws
from tests.kernels.builds import PAIR, compiled
from tests.kernels.paged import paged_batch

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
DRIVER = Path(__file__).with_name("kernels_driver.cpp")
PANEL = 32
CACHES = (torch.float32, torch.bfloat16, torch.int16, torch.int8)

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with builds for x86"),
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="no cross compiler or emulator"),
    pytest.mark.timeout(600),
]


def field(values: Tensor | np.ndarray | bytes) -> bytes:
    """Return a field of the driver's input: its length and its bytes."""
    data = values if isinstance(values, bytes) else (values.numpy() if isinstance(values, Tensor) else values).tobytes()
    return struct.pack("<q", len(data)) + data


def ints(*values: int) -> bytes:
    return field(np.array(values, dtype=np.int32))


def layer(
    weight: Tensor, weight_format: WeightFormat, input_format: InputFormat, num_inputs: int, order: Tensor
) -> bytes:
    has_blocks = weight.dtype == torch.uint8
    sizes = ints(weight_format, input_format, has_blocks, len(weight), num_inputs)
    return sizes + field(order.int()) + field(weight.contiguous())


def linear_cases() -> Iterator[bytes]:
    """Yield a layer of each format with inputs of each type, for several numbers of rows."""
    for weight_format in WeightFormat:
        weight = random_blocks(weight_format, 70, 256) if weight_format.has_blocks else torch.randn(70, 256)
        x = torch.randn(19, 256)
        x[3] = 0
        for input_format in InputFormat:
            case = layer(weight, weight_format, input_format, 256, torch.arange(70))
            yield field(b"linear") + case + ints(19, 9, 5, 4, 3, 2, 1) + field(x)


def decoder_case(cache_dtype: torch.dtype) -> bytes:
    """Return a layer with grouped heads, norms of heads, a window and a soft cap over a cache of this type."""
    hidden, heads, kv_heads, dim, ffn, block_size = 41, 6, 2, 24, 67, 5
    batch = paged_batch([33, 1, 70], [33, 1, 70], block_size)
    dims = DimsStruct(
        hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, ffn=ffn, num_layers=1,
        num_blocks=batch.num_blocks, block_size=block_size, num_positions=128, cache_format=CACHES.index(cache_dtype),
        eps=1e-5, scale=0.2, rotary_dim=dim, softcap=30.0, residual_scale=1.0, embedding_scale=1.0, logits_scale=1.0,
    )  # fmt: skip
    padded = torch.full((-(-ffn // PANEL) * PANEL,), -1)
    padded[:ffn] = torch.arange(ffn)
    gate = padded.view(-1, PANEL)
    gated = torch.stack((gate, torch.where(gate < 0, gate, gate + ffn)), dim=1).flatten()
    shapes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * ffn, hidden), (hidden, ffn)]
    orders = [torch.arange(rows) for rows, _ in shapes]
    orders[2] = gated
    layers = [
        layer(torch.randn(shape) * shape[1] ** -0.5, WeightFormat.F32, InputFormat.F32, shape[1], order)
        for shape, order in zip(shapes, orders, strict=True)
    ]
    norms = [field(torch.rand(size)) for size in (hidden, hidden, dim, dim)]
    size = batch.num_blocks * kv_heads * block_size * stored_head_dim(dim, cache_dtype) * cache_dtype.itemsize
    angles = torch.randn(128, dim // 2)
    steps = (batch.positions, batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables)
    settings = ints(20, len(batch.positions), 3, batch.block_tables.shape[1])
    parts: list[Tensor | bytes] = [
        bytes(dims),
        *([bytes(size)] * 2),
        angles.cos(),
        angles.sin(),
        *(part.int() for part in steps),
    ]
    fields = [field(part) for part in parts]
    ordered = [fields[0], settings, *layers, *norms, *fields[1:], field(torch.randn(len(batch.positions), hidden))]
    return field(b"decoder") + b"".join(ordered)


def draw_case() -> bytes:
    draws = empty_draws(5)
    limits = [(1, 0, 0), (0.9, 0, 7), (0.999, 0, 0), (1, 0, 900), (1, 0.1, 0)]
    draws[:] = [(seed, 0.8, *limit, 0, seed) for seed, limit in enumerate(limits)]
    return field(b"sample") + field(draws) + field(torch.randn(5, 1500))


def run(compiler: str, library: Path, emulator: list[str], folder: Path, cases: bytes) -> bytes:
    """Return the driver's output with a build of the kernels."""
    program = folder / f"driver-{library.stem}"
    subprocess.run([compiler, "-std=c++20", "-O1", DRIVER, library, "-o", program], check=True)
    return subprocess.run([*emulator, program], input=cases, capture_output=True, check=True).stdout


def test_the_bits_are_those_of_the_other_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX2 has no dot products of bytes, so linear layers are compared with the build that emulates AVX-512."""
    torch.manual_seed(0)
    linears, others = b"".join(linear_cases()), b"".join([*map(decoder_case, CACHES), draw_case()])
    compiler = os.environ.get("CXX", "g++")
    wanted = run(compiler, compiled("avx2", PAIR), [], tmp_path, linears)
    wanted += run(compiler, build("avx2"), [], tmp_path, others)
    monkeypatch.setenv("CXX", COMPILER)
    emulator = [EMULATOR, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
    found = run(COMPILER, build("neon"), emulator, tmp_path, linears + others)
    assert len(wanted) > 500_000
    assert found == wanted
