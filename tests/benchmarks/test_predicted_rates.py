"""The kernels' loops are found in the code that this machine's compiler generates, and are complete.

By default this tests only the builds that this processor runs, which are already compiled; compiling another one takes
over a minute. With TEST_ALL_LOOPS=1 it tests all of them.
"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace

import pytest

from benchmarks.predicted_rates import (
    BYTES,
    LANES,
    PAIRS,
    PANEL_TILE,
    REGISTERS,
    TILE,
    LoopError,
    find_loop,
    functions,
    llvm_mca,
    peak,
    predict,
    replaced,
    structures,
    used_structures,
)
from kernels.build import build, builds_for, processor_flags

pytestmark = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
# The number of multiplies of a block of 32 weights, by the number of rows in a tile.
MULTIPLIES = {
    "avx2": {
        "halves in a tile": {rows: 32 * rows for rows in (1, 2, 3, 4)},
        "halves in registers": {rows: 64 * rows for rows in (1, 2, 3, 4)},
    },
    "avx512": {
        "bytes in registers": {1: 64, 2: 128},
        "halves in a tile": {rows: 64 * rows for rows in range(1, 7)},
        "halves in registers": {rows: 64 * rows for rows in range(1, 7)},
        "pairs in a tile": {rows: 16 * rows for rows in range(1, 7)},
    },
}
ISAS = [isa for isa in MULTIPLIES if os.environ.get("TEST_ALL_LOOPS") or isa in builds_for(processor_flags())]
code_of = functools.cache(lambda isa: functions(build(isa)))


@pytest.mark.parametrize("isa", ISAS)
def test_each_loop_has_the_multiplies_of_its_rows(isa: str) -> None:
    found: dict[str, dict[int, int]] = {}
    for structure, num_rows in used_structures(isa):
        loop = find_loop(code_of(isa), structure, num_rows)
        assert not any(text.startswith(("j", "call", "ret")) for text in loop.instructions)
        found.setdefault(structure.name, {})[num_rows] = loop.num_multiplies
    assert found == MULTIPLIES[isa]


def test_a_loop_that_is_not_found_is_named() -> None:
    with pytest.raises(LoopError, match=r"no function sum_split<NibbleBytes<Q4Block>, NibbleHalves<Q4Block>, 2>"):
        find_loop(code_of("avx2"), BYTES, 2)
    with pytest.raises(LoopError, match=r"sum_tile<.*> has no loop of 136 multiplies without branches"):
        find_loop(code_of("avx2"), replace(TILE, multiplies=17), 4)


def test_rows_are_multiplied_in_tiles() -> None:
    assert structures("avx512", 2, "znver5") == [(BYTES, 2)]
    assert structures("avx512", 16, "znver5") == [(REGISTERS, 6), (REGISTERS, 6), (REGISTERS, 4)]
    assert structures("avx512", 16, "znver4") == [(PAIRS, 6), (PAIRS, 6), (PAIRS, 4)]
    assert structures("avx512", 7, "icelake-server") == [(REGISTERS, 6), (REGISTERS, 1)]
    assert structures("avx512", 8, "icelake-server") == [(PANEL_TILE, 6), (PANEL_TILE, 2)]
    assert structures("avx2", 7, "znver3") == [(TILE, 4), (TILE, 3)]


def test_instructions_that_a_model_describes_wrongly_are_replaced() -> None:
    loop = ["vpdpbusd %zmm1,%zmm2,%zmm3", "vpbroadcastd (%rax),%zmm4", "vmulps (%rcx){1to16},%zmm5,%zmm6"]
    loop += ["vcvtph2ps %ymm7,%zmm8", "vpbroadcastd %xmm1,%zmm2", "vpsrlw $0x4,0x40(%rdx),%zmm1"]
    shift = ["vpsrlw $0x4,%zmm1,%zmm20"]
    assert replaced(loop + shift, "icelake-server") == loop + shift
    assert replaced(loop + shift, "znver4") == [
        "vfmadd231ps %zmm1,%zmm2,%zmm3",
        "vmovups (%rax),%zmm4",
        *loop[2:],
        "vpsrlvw %zmm1,%zmm1,%zmm20",
    ]
    assert replaced(loop + shift, "znver5") == [
        "vfmadd231ps %ymm1,%ymm2,%ymm3",
        "vmovups (%rax),%ymm4",
        "vmulps (%rcx){1to8},%ymm5,%ymm6",
        "vcvtph2ps %xmm7,%ymm8",
        "vpbroadcastd %xmm1,%ymm2",
        "vpsrlw $0x4,0x40(%rdx),%ymm1",
        "vpsrlvw %ymm1,%ymm1,%ymm20",
    ]


@pytest.mark.skipif(llvm_mca() is None, reason="llvm-mca 19 is not installed")
def test_the_peaks_are_those_of_the_processors() -> None:
    """Zen 4 executes one 512-bit multiply (32 products) per cycle, Zen 5 and Ice Lake execute two."""
    peaks = {processor: peak("avx512", processor, unchanged=False) for processor in ("znver4", "znver5")}
    assert peaks == {"znver4": pytest.approx(32, rel=0.02), "znver5": pytest.approx(64, rel=0.02)}
    assert peak("avx512", "icelake-server", unchanged=False) == pytest.approx(64, rel=0.02)
    loop = find_loop(code_of("avx2"), TILE, 4)
    assert loop.num_multiplies / 2 < predict(loop.instructions, "znver3").cycles < 2 * loop.num_multiplies
    assert set(MULTIPLIES) < set(LANES)
