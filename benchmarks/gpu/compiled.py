"""Compile the Triton kernels without a GPU: `python -m benchmarks.gpu.compiled [--capability C] [NAME ...]`.

`--write` compiles all cases for every capability, and writes compiled.jsonl next to this file; existing entries for the
same source and types are kept. `--write --triton VERSION` does this with another version of Triton, which pip installs
in a temporary folder. Each version has its own lines. `--check` lists the cases that the installed version or one in
TRITON_VERSIONS lacks, without compiling them; with names, it compiles these cases with the installed version, and also
lists those whose results differ from the recorded ones. `--table` prints the installed version's lines as a table.

The launchers run on meta tensors at the shapes of an 8B model, and each kernel that they would start is compiled for
compute capability 8.0, 9.0 (Hopper) or 10.0 with the tools in Triton's package. Prints one JSON object per line:
registers and stack bytes per thread, spills (local stores), shared memory per program, whether multiplications use
Hopper's instructions (HGMMA), and whether the kernel waits for the previous kernel and releases the next one
(programmatic dependent launch). The results show that kernels compile and which resources they need, not that they are
correct.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
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

from benchmarks.gpu.report import Report
from kernels import Activation, BlockWeight, KvScales
from kernels import triton as operations
from kernels.block_weight import KINDS
from kernels.triton import dependent_launch
from kernels.triton.rank_sum import RankSum

# Compute capabilities of Ampere, Hopper and Blackwell.
CAPABILITIES = (80, 90, 100)
# The oldest version that pyproject.toml allows, the version that CUDA builds of PyTorch 2.13 require, and the newest. A
# kernel has the same key under all versions.
TRITON_VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
TABLE = Path(__file__).with_name("compiled.jsonl")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources that a compiled kernel needs; `key` identifies its source, types and constants."""

    case: str
    kernel: str
    key: str
    num_warps: int
    registers: int
    stack_bytes: int
    num_spills: int
    shared_bytes: int
    has_hopper_products: bool
    has_matrix_products: bool
    is_dependent: bool


class NoDevice:
    """Stand-in for the CUDA driver during compilation."""

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


def compile_cases(names: set[str], capability: int = 90, keys: set[str] | None = None) -> Iterator[Compiled]:
    """Compile the cases with these names (all if there are none) for a compute capability, which is given times ten.

    With `keys`, compile only these kernels of the cases.
    """
    _compile_for(capability)
    made: dict[str, tuple[str, Any]] = {}

    def launch(function: JITFunction, grid: object) -> Callable[..., object]:
        def compile_only(*args: object, **kwargs: object) -> None:
            key = _key(function, args, kwargs)
            # A case may launch a kernel more than once.
            if key not in made and (keys is None or key in keys):
                function.device_caches.clear()  # these caches may hold a kernel compiled for another capability
                made[key] = (function.__name__, function.warmup(*args, grid=grid, **kwargs))

        return compile_only

    JITFunction.__getitem__ = launch
    for case, run in CASES.items():
        if not names or case in names:
            run()
            yield from (_inspect(case, kernel, key, compiled) for key, (kernel, compiled) in made.items())
            made.clear()


def _compile_for(capability: int) -> None:
    driver.set_active(NoDevice(capability))
    dependent_launch.capability.cache_clear()


@functools.cache
def keys_of_cases(capability: int) -> dict[str, set[str]]:
    """Return the keys of the kernels that each case launches on a device of this capability."""
    _compile_for(capability)
    found: dict[str, set[str]] = {}

    def launch(function: JITFunction, grid: object) -> Callable[..., object]:
        return lambda *args, **kwargs: found[case].add(_key(function, args, kwargs))

    JITFunction.__getitem__ = launch
    for case, run in CASES.items():
        found[case] = set()
        run()
    return found


def _key(function: JITFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    _, specialization, options = function.create_binder()[-1](*args, debug=False, **kwargs)
    text = f"{sorted(_sources(function, set()))} {specialization} {options}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sources(function: JITFunction, seen: set[JITFunction]) -> set[str]:
    """Return the sources of a kernel and of the functions that it calls, and the constants that they use."""
    seen.add(function)
    sources = {function.src}
    for name in function.fn.__code__.co_names:
        value = function.fn.__globals__.get(name)
        if isinstance(value, triton.language.constexpr):
            sources.add(f"{name} = {value.value}")
        elif isinstance(value, JITFunction) and value not in seen:
            sources |= _sources(value, seen)
    return sources


def read_table(version: str = triton.__version__) -> list[dict[str, Any]]:
    """Return the lines of compiled.jsonl for a version of Triton."""
    lines = map(json.loads, TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else ())
    return [line for line in lines if line["triton"] == version]


def missing(capability: int, version: str = triton.__version__) -> dict[str, set[str]]:
    """Return the kernel keys that compiled.jsonl lacks for this capability and version, by case, each only once."""
    seen = {line["key"] for line in read_table(version) if line["capability"] == capability}
    found = {}
    for case, keys in keys_of_cases(capability).items():
        if not keys <= seen and (case, capability) not in CANNOT_COMPILE:
            found[case] = keys - seen
            seen |= keys
    return found


def differing(names: set[str], capability: int) -> list[str]:
    """Compile the cases with these names, and return those whose results are not the ones in compiled.jsonl."""
    # A kernel that several cases launch is recorded for one of them.
    recorded = {line["key"]: line | {"case": ""} for line in read_table() if line["capability"] == capability}
    version = {"triton": triton.__version__, "capability": capability}
    return sorted(
        {
            made.case
            for made in compile_cases(names, capability)
            if recorded.get(made.key) != {**version, **asdict(made), "case": ""}
        }
    )


def write_table(num_processes: int) -> None:
    """Compile the kernels that compiled.jsonl lacks in `num_processes` processes, and write it; drop lines that belong
    to no case.
    """
    used = {key for capability in CAPABILITIES for keys in keys_of_cases(capability).values() for key in keys}
    kept = [line for line in read_table() if line["key"] in used]
    # A process keeps every kernel that it compiled, for all capabilities.
    for capability in CAPABILITIES:
        jobs = [(capability, case, keys) for case, keys in missing(capability).items()]
        for i, made in enumerate(_compile_all(jobs, num_processes), 1):
            kept += made
            _save(kept)
            print(f"{i} of {len(jobs)}: {jobs[i - 1][:2]}", flush=True)
    _save(kept)


def fill_cache(report: Report) -> None:
    """Compile all cases for the GPU of this machine, in one process per processor, into Triton's cache on disk, where
    the benchmark's other parts find them.
    """
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    jobs = [
        (capability, case, keys)
        for case, keys in keys_of_cases(capability).items()
        if (case, capability) not in CANNOT_COMPILE
    ]
    num_processes = os.cpu_count() or 1
    num_kernels = sum(len(made) for made in _compile_all(jobs, num_processes))
    report.note("kernels compiled", f"{num_kernels} in {num_processes} processes")


def _compile_all(jobs: list[tuple[int, str, set[str]]], num_processes: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each job, in order: capability, case, and keys of the kernels to compile."""
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_compile, jobs)


def write_table_with(version: str, num_processes: int) -> int:
    """Run `--write` with another version of Triton; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
        subprocess.run(pip, check=True)
        command = [sys.executable, "-m", "benchmarks.gpu.compiled", "--write", "--processes", str(num_processes)]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, check=False).returncode


def table() -> str:
    """Return a table of the resources of each kernel and case, from compiled.jsonl."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {}
    for line in read_table():
        cells = found.setdefault((line["case"], line["kernel"]), {capability: [] for capability in CAPABILITIES})
        spills = f", {line['num_spills']} spills" if line["num_spills"] else ""
        cells[line["capability"]].append(
            f"{line['registers']} × {32 * line['num_warps']}{spills}, {line['shared_bytes'] / 1024:.0f} KiB"
        )
    rows = ["| case | kernel | " + " | ".join(f"{capability / 10:.1f}" for capability in CAPABILITIES) + " |"]
    rows.append("| --- " * (2 + len(CAPABILITIES)) + "|")
    rows += [
        f"| {case} | {kernel} | " + " | ".join("; ".join(cell) or "–" for cell in cells.values()) + " |"
        for (case, kernel), cells in sorted(found.items())
    ]
    return "\n".join(rows)


def _save(kept: list[dict[str, Any]]) -> None:
    """Replace the lines for the installed version of Triton with these lines."""
    lines = [] if not TABLE.exists() else [json.loads(line) for line in TABLE.read_text("utf-8").splitlines()]
    lines = [line for line in lines if line["triton"] != triton.__version__]
    lines += {(line["capability"], line["case"], line["key"]): line for line in kept}.values()
    lines.sort(key=lambda line: (line["triton"], line["capability"], line["case"], line["kernel"], line["key"]))
    TABLE.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _compile(job: tuple[int, str, set[str]]) -> list[dict[str, Any]]:
    capability, case, keys = job
    try:
        found = list(compile_cases({case}, capability, keys))
    except (triton.CompilationError, RuntimeError) as error:
        print(f"{case} for {capability}: {error}", flush=True)
        return []
    return [{"triton": triton.__version__, "capability": capability, **asdict(one)} for one in found]


def _inspect(case: str, kernel: str, key: str, compiled: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        code = _dump("--dump-sass", file.name)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return Compiled(
        case=case,
        kernel=kernel,
        key=key,
        num_warps=compiled.metadata.num_warps,
        registers=int(registers),
        stack_bytes=int(stack),
        num_spills=len(re.findall(r"\bSTL\b", code)),
        shared_bytes=compiled.metadata.shared,
        has_hopper_products="HGMMA" in code,
        has_matrix_products="HGMMA" in code or "HMMA" in code,
        is_dependent=all(f"griddepcontrol.{part}" in compiled.asm["ptx"] for part in ("wait", "launch_dependents")),
    )


def _dump(what: str, file: str) -> str:
    return subprocess.run([str(_CUOBJDUMP), what, file], capture_output=True, text=True, check=True).stdout


_activations = torch.bfloat16


def _meta(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*shape, dtype=dtype or _activations, device="meta")


def _with_activations(dtype: torch.dtype, run: Callable[[], object]) -> None:
    """Run a case with activations and weights of this type instead of bfloat16."""
    global _activations
    _activations = dtype
    try:
        run()
    finally:
        _activations = torch.bfloat16


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
    chunk: int | None = None,
    softcap: float = 0.0,
    has_sinks: bool = False,
    dtype: torch.dtype | None = None,
    kv: torch.dtype | None = None,
    num_shares: int = 1,
    num_tile_splits: int = 1,
    is_batch_invariant: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    rows = _meta(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cache = _meta(512, 16, num_kv_heads, head_dim, dtype=kv or dtype)
    scales = None
    if kv is not None:
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
        softcap,
        scales=scales,
        sinks=_floats(num_heads) if has_sinks else None,
        chunk=chunk,
        num_shares=num_shares,
        num_tile_splits=num_tile_splits,
        is_batch_invariant=is_batch_invariant,
    )


def _rotate() -> None:
    rows = _meta(64, 6144)
    q, k = rows[:, :4096].view(64, 32, 128), rows[:, 4096:5120].view(64, 8, 128)
    operations.apply_rotary(q, k, _floats(64, 64), _floats(64, 64))


def _quantized_linear(num_rows: int) -> None:
    operations.quantized_linear(_meta(num_rows, 4096), _meta(4096, 4096, dtype=torch.int8), _floats(4096))


def _gated_linear(num_rows: int, *, is_quantized: bool = False, is_batch_invariant: bool = False) -> None:
    weight = _meta(28672, 4096, dtype=torch.int8 if is_quantized else None)
    scale = _floats(28672) if is_quantized else None
    x = _meta(num_rows, 4096)
    operations.gated_linear(x, weight, "silu", scale=scale, is_batch_invariant=is_batch_invariant)


def _blocks(kind: str) -> BlockWeight:
    codes = _meta(4096, 2048 if kind in KINDS[:2] else 4096, dtype=torch.uint8)
    group = 128 if kind == "float8" else 32
    scale = _meta(4096, 4096 // group)
    return BlockWeight(kind, codes, scale, scale if kind in ("int4", "uint8") else None, group, 4096)


def _block_linear(kind: str, num_rows: int, activation: Activation | None = None) -> None:
    operations.block_linear(_meta(num_rows, 4096), _blocks(kind), activation=activation)


def _unpack(kind: str) -> None:
    operations.unpack(_blocks(kind), torch.bfloat16)


_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# (query heads, KV heads, head size): groups of 3, 1, 7 and 71, and head sizes that are large or not a power of two.
_ODD_HEADS = ((9, 3, 64), (8, 8, 80), (14, 2, 256), (71, 1, 64))
# Triton does not support float8 e4m3 on compute capability 8.0.
CANNOT_COMPILE = {
    ("prefill, float8 KV", 80),
    ("short queries, float8 KV", 80),
    ("store, float8 KV", 80),
    ("norm, rotary and store, float8 KV", 80),
    ("float8 rows", 80),
}


def _attention_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield attention of a decode step, of prompts, and of short queries over a long context."""
    shapes: dict[str, dict[str, Any]] = {
        f"{heads[0]}/{heads[1]} heads of {heads[2]}, {name}": {"heads": heads, "dtype": dtype}
        for heads in ((32, 8, 128), *_ODD_HEADS)
        for name, dtype in _TYPES.items()
        if heads in ((32, 8, 128), (9, 3, 64)) or name == "bf16"
    }
    shapes |= {
        "window": {"window": 4096},
        "chunks": {"chunk": 8192},
        "softcap": {"softcap": 50.0},
        "sinks and window": {"has_sinks": True, "window": 128},
        "int8 KV": {"kv": torch.int8},
        "float8 KV": {"kv": torch.float8_e4m3fn},
    }
    for name, shape in shapes.items():
        yield f"short queries, {name}", partial(_attend, 50, 2, num_shares=4, num_tile_splits=16, **shape)


def _store(kv: torch.dtype) -> None:
    cache = _meta(512, 16, 8, 128, dtype=kv)
    scales = KvScales(_floats(512, 16, 8), _floats(512, 16, 8))
    operations.store_kv(_meta(64, 8, 128), _meta(64, 8, 128), cache, cache, _ints(64), scales=scales)


def _rotate_and_store(kv: torch.dtype | None = None) -> None:
    cache, scales = _meta(512, 16, 8, 128, dtype=kv), None
    if kv is not None:
        scales = KvScales(_floats(512, 16, 8), _floats(512, 16, 8))
    q, k, v = torch.split(_meta(64, 48, 128), [32, 8, 8], dim=1)
    operations.rotate_and_store(
        q,
        k,
        v,
        _floats(64, 64),
        _floats(64, 64),
        cache,
        cache,
        _ints(64),
        q_norm=_meta(128),
        k_norm=_meta(128),
        eps=1e-5,
        scales=scales,
    )


def _grouped_linear(num_rows: int, activation: Activation | None = None) -> None:
    operations.grouped_linear(_meta(num_rows, 2048), _meta(64, 2816, 2048), _ints(num_rows), activation=activation)


def _add_ranks(num_ranks: int) -> None:
    addresses = _meta(num_ranks, dtype=torch.int64)
    RankSum(addresses, addresses, 0, 1 << 18, torch.bfloat16)(_meta(1, 4096))


CASES: dict[str, Callable[[], object]] = {
    "decode, batch 64": lambda: _attend(64, 64),
    "decode, batch 1": lambda: _attend(1, 1, num_shares=50),
    "prefill": lambda: _attend(16384, 8),
    "prefill, window": lambda: _attend(16384, 8, window=4096),
    "prefill, int8 KV": lambda: _attend(16384, 8, kv=torch.int8),
    "prefill, float8 KV": lambda: _attend(16384, 8, kv=torch.float8_e4m3fn),
    "prefill, head size 256": lambda: _attend(16384, 8, heads=(16, 4, 256)),
    "prefill, head size 256, f32": lambda: _attend(16384, 8, heads=(16, 4, 256), dtype=torch.float32),
    "batch-invariant, head size 256, f32": lambda: _attend(
        16384, 8, heads=(16, 4, 256), dtype=torch.float32, is_batch_invariant=True
    ),
    "prefill, head size 80": lambda: _attend(16384, 8, heads=(16, 16, 80)),
    "prefill, group of 3": lambda: _attend(16384, 8, heads=(9, 3, 64)),
    "batch-invariant": lambda: _attend(16384, 8, is_batch_invariant=True),
    "sum of 8 ranks": lambda: _add_ranks(8),
    "norm": lambda: operations.rms_norm(_meta(64, 4096), _meta(4096), 1e-5),
    "head norm": lambda: operations.rms_norm(_meta(64, 32, 128), _meta(128), 1e-5),
    "residual norm": lambda: operations.add_rms_norm(_meta(64, 4096), _meta(64, 4096), _meta(4096), 1e-5),
    "rotary": _rotate,
    "silu": lambda: operations.activate(_meta(64, 28672), "silu"),
    "store": lambda: operations.store_kv(
        _meta(64, 8, 128), _meta(64, 8, 128), _meta(512, 16, 8, 128), _meta(512, 16, 8, 128), _ints(64)
    ),
    "store, int8 KV": partial(_store, torch.int8),
    "store, float8 KV": partial(_store, torch.float8_e4m3fn),
    "norm, rotary and store": _rotate_and_store,
    "norm, rotary and store, int8 KV": partial(_rotate_and_store, torch.int8),
    "norm, rotary and store, float8 KV": partial(_rotate_and_store, torch.float8_e4m3fn),
    "linear": lambda: operations.linear(_meta(64, 4096), _meta(4096, 4096)),
    "grouped linear, 8 rows": partial(_grouped_linear, 8),
    "grouped linear, 2048 rows": partial(_grouped_linear, 2048),
    "weighted sum": lambda: operations.weighted_sum(_meta(64, 8, 2048), _floats(64, 8)),
    "grouped gate, up and SiLU, 8 rows": partial(_grouped_linear, 8, "silu"),
    "grouped gate, up and SiLU, 2048 rows": partial(_grouped_linear, 2048, "silu"),
    **dict(_attention_cases()),
    "int8 linear, 1 row": lambda: _quantized_linear(1),
    "int8 linear, 64 rows": lambda: _quantized_linear(64),
    "int8 linear, 2048 rows": lambda: _quantized_linear(2048),
    **{f"{kind} blocks, {n} rows": partial(_block_linear, kind, n) for kind in KINDS for n in (1, 64, 2048)},
    **{f"{kind} blocks, unpacked": partial(_unpack, kind) for kind in KINDS},
    "gate, up and SiLU, 1 row": partial(_gated_linear, 1),
    "gate, up and SiLU, batch-invariant": partial(_gated_linear, 1, is_batch_invariant=True),
    **{f"gate, up and SiLU, int8, {n} rows": partial(_gated_linear, n, is_quantized=True) for n in (1, 64, 2048)},
    **{
        f"gate, up and SiLU, {kind} blocks, {n} rows": partial(_block_linear, kind, n, "silu")
        for kind in ("int4", "float8")
        for n in (1, 64, 2048)
    },
    "float8 rows": lambda: operations.quantize_rows(_meta(64, 14336)),
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


# Cases that are also compiled with float16 and float32; the attention cases above include these types.
_IN_ALL_TYPES = (
    *("norm", "head norm", "residual norm", "rotary", "silu", "store", "norm, rotary and store", "linear", "LoRA"),
    *("grouped linear, 8 rows", "grouped linear, 2048 rows", "int8 linear, 64 rows", "gate, up and SiLU, 1 row"),
    *("grouped gate, up and SiLU, 8 rows", "grouped gate, up and SiLU, 2048 rows"),
)
CASES |= {
    f"{case}, {name}": partial(_with_activations, dtype, CASES[case])
    for case in _IN_ALL_TYPES
    for name, dtype in _TYPES.items()
    if name != "bf16"
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiled")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--capability",
        type=int,
        choices=CAPABILITIES,
        action="append",
        help="compute capability times ten; may be repeated [90]",
    )
    parser.add_argument(
        "--check", action="store_true", help="print missing cases, and cases of NAME with different results"
    )
    parser.add_argument("--write", action="store_true", help="compile missing cases, and add them to compiled.jsonl")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="number of processes of --write")
    parser.add_argument("--triton", metavar="VERSION", default=triton.__version__, help="version for --write")
    parser.add_argument("--table", action="store_true", help="print compiled.jsonl as a table")
    options = parser.parse_args()
    if options.table:
        raise SystemExit(print(table()))
    if options.write and options.triton != triton.__version__:
        raise SystemExit(write_table_with(options.triton, options.processes))
    if options.write:
        write_table(options.processes)
    if options.check or options.write:
        versions = {triton.__version__, *(TRITON_VERSIONS if options.check else ())}
        lacking = [
            f"{case} for {capability} with --triton {version}"
            for version in sorted(versions)
            for capability in CAPABILITIES
            for case in missing(capability, version)
        ]
        if options.names:
            lacking += [
                f"{case} for {capability}, which gives other results"
                for capability in CAPABILITIES
                for case in differing(set(options.names), capability)
            ]
        raise SystemExit("\n".join(lacking) if lacking else 0)
    for capability in options.capability or [90]:
        for found in compile_cases(set(options.names), capability):
            print(json.dumps({"capability": capability, **asdict(found)}), flush=True)
