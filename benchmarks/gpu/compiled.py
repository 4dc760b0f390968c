"""Compile the Triton kernels without a GPU: `python -m benchmarks.gpu.compiled [--capability C] [NAME ...]`.

The launchers run on meta tensors at the shapes of an 8B model, and each kernel that they would start is compiled for
compute capability 8.0, 9.0 (Hopper) or 10.0 with the tools in Triton's package. Prints one JSON object a line:
registers and stack bytes of a thread, spills (local stores), shared memory of a program, and whether the matrix
products are Hopper's own (HGMMA). It shows that kernels compile and what resources they need, not that they are
correct.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import BlockWeight, KvScales
from kernels import triton as operations
from kernels.block_weight import KINDS

# Compute capabilities of Ampere, Hopper and Blackwell.
CAPABILITIES = (80, 90, 100)
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources that a compiled kernel needs."""

    case: str
    kernel: str
    num_warps: int
    registers: int
    stack_bytes: int
    num_spills: int
    shared_bytes: int
    has_hopper_products: bool
    has_matrix_products: bool


class NoDevice:
    """Stands in for the CUDA driver for compilation."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_cases(names: set[str], capability: int = 90) -> Iterator[Compiled]:
    """Compile the cases of these names for a compute capability, times ten; all, if there are no names."""
    driver.set_active(NoDevice(capability))
    made: dict[int, tuple[str, Any]] = {}

    def launch(function: JITFunction, grid: object) -> Callable[..., object]:
        def compile_only(*args: object, **kwargs: object) -> None:
            compiled = function.warmup(*args, grid=grid, **kwargs)
            # A case may launch a kernel more than once.
            made[id(compiled)] = (function.__name__, compiled)

        return compile_only

    JITFunction.__getitem__ = launch
    for case, run in CASES.items():
        if not names or case in names:
            run()
            yield from (_inspect(case, kernel, compiled) for kernel, compiled in made.values())
            made.clear()


def _inspect(case: str, kernel: str, compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        code = _dump("--dump-sass", file.name)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return Compiled(
        case=case,
        kernel=kernel,
        num_warps=compiled.metadata.num_warps,
        registers=int(registers),
        stack_bytes=int(stack),
        num_spills=len(re.findall(r"\bSTL\b", code)),
        shared_bytes=compiled.metadata.shared,
        has_hopper_products="HGMMA" in code,
        has_matrix_products="HGMMA" in code or "HMMA" in code,
    )


def _dump(what: str, file: str) -> str:
    return subprocess.run([str(_CUOBJDUMP), what, file], capture_output=True, text=True, check=True).stdout


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _floats(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _attend(
    num_tokens: int,
    num_sequences: int,
    *,
    heads: tuple[int, int, int] = (32, 8, 128),
    window: int | None = None,
    kv: torch.dtype = torch.bfloat16,
    num_splits: int | None = 1,
    is_batch_invariant: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    rows = _meta(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cache = _meta(512, 16, num_kv_heads, head_dim, dtype=kv)
    scales = None
    if kv != torch.bfloat16:
        scales = KvScales(_floats(512, 16, num_kv_heads), _floats(512, 16, num_kv_heads))
    operations.paged_attention(
        rows[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim),
        cache,
        cache,
        _ints(num_sequences, 128),
        _ints(num_sequences + 1),
        _ints(num_sequences),
        head_dim**-0.5,
        window,
        scales=scales,
        num_splits=num_splits,
        is_batch_invariant=is_batch_invariant,
    )


def _rotate() -> None:
    rows = _meta(64, 6144)
    q, k = rows[:, :4096].view(64, 32, 128), rows[:, 4096:5120].view(64, 8, 128)
    operations.apply_rotary(q, k, _floats(64, 64), _floats(64, 64))


def _quantized_linear(num_rows: int) -> None:
    operations.quantized_linear(_meta(num_rows, 4096), _meta(4096, 4096, dtype=torch.int8), _floats(4096))


def _block_linear(kind: str, num_rows: int) -> None:
    num_bytes = 2048 if kind in KINDS[:2] else 4096
    codes = _meta(4096, num_bytes, dtype=torch.uint8)
    weight = BlockWeight(kind, codes, _meta(4096, 128), _meta(4096, 128), 32, 4096)
    operations.block_linear(_meta(num_rows, 4096), weight)


CASES: dict[str, Callable[[], object]] = {
    "decode, batch 64": lambda: _attend(64, 64),
    "decode, batch 1": lambda: _attend(1, 1, num_splits=16),
    "prefill": lambda: _attend(16384, 8),
    "prefill, window": lambda: _attend(16384, 8, window=4096),
    "prefill, int8 KV": lambda: _attend(16384, 8, kv=torch.int8),
    "prefill, float8 KV": lambda: _attend(16384, 8, kv=torch.float8_e4m3fn),
    "prefill, head size 256": lambda: _attend(16384, 8, heads=(16, 4, 256)),
    "prefill, head size 80": lambda: _attend(16384, 8, heads=(16, 16, 80)),
    "prefill, group of 3": lambda: _attend(16384, 8, heads=(9, 3, 64)),
    "batch-invariant": lambda: _attend(16384, 8, num_splits=None, is_batch_invariant=True),
    "norm": lambda: operations.rms_norm(_meta(64, 4096), _meta(4096), 1e-5),
    "head norm": lambda: operations.rms_norm(_meta(64, 32, 128), _meta(128), 1e-5),
    "residual norm": lambda: operations.add_rms_norm(_meta(64, 4096), _meta(64, 4096), _meta(4096), 1e-5),
    "rotary": _rotate,
    "silu": lambda: operations.activate(_meta(64, 28672), "silu"),
    "store": lambda: operations.store_kv(
        _meta(64, 8, 128), _meta(64, 8, 128), _meta(512, 16, 8, 128), _meta(512, 16, 8, 128), _ints(64)
    ),
    "linear": lambda: operations.linear(_meta(64, 4096), _meta(4096, 4096)),
    "int8 linear, 1 row": lambda: _quantized_linear(1),
    "int8 linear, 64 rows": lambda: _quantized_linear(64),
    "int8 linear, 2048 rows": lambda: _quantized_linear(2048),
    **{f"{kind} blocks, {n} rows": partial(_block_linear, kind, n) for kind in KINDS for n in (1, 64, 2048)},
    "LoRA": lambda: operations.add_lora(
        _meta(64, 4096), _meta(64, 4096), _meta(1 << 20), _meta(8, 2, dtype=torch.int64), _ints(64), 64
    ),
    "sampling": lambda: operations.sample(
        _floats(64, 128256),
        _floats(64),
        _ints(64),
        _floats(64),
        _floats(64),
        _meta(64, dtype=torch.int64),
        _ints(64),
        _ints(64),
    ),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiled")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=90)
    options = parser.parse_args()
    for found in compile_cases(set(options.names), options.capability):
        print(json.dumps(asdict(found)), flush=True)
