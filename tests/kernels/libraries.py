"""The builds of the kernels that can run on this machine."""

import functools

import pytest

from kernels.build import ISA_NEEDS, build, processor_flags
from kernels.cpu import Library, ThreadPool

# "pair" is the 16-lane AVX-512 code on pairs of AVX2 vectors. Its speed does not matter, but its compile time does:
# with -O1 instead of -Og, GCC takes six times as long for the unrolled sums.
_PAIR = ("-DMIDSTREAM_PAIR", "-Og")
# Build, flags, and instruction set. "tiles" emulates AMX in plain C++.
BUILDS = {
    "avx2": ("avx2", (), "avx2"),
    "pair": ("avx2", _PAIR, "avx512"),
    "tiles": ("avx2", _PAIR, "amx"),
    "avx512": ("avx512", (), "avx512"),
    "amx": ("avx512", (), "amx"),
    "avxvnni": ("avxvnni", (), "avxvnni"),
}


@functools.cache
def library(name: str) -> Library:
    isa, extra_flags, used_for = BUILDS[name]
    return Library(build(isa, extra_flags), used_for)


@functools.cache
def threads(name: str, num_threads: int = 2) -> ThreadPool:
    return ThreadPool(library(name), num_threads)


_needs = {name: ISA_NEEDS["amx" if name == "amx" else isa] for name, (isa, _, _) in BUILDS.items()}
runnable_builds = [name for name, needs in _needs.items() if processor_flags() >= needs]
each_build = pytest.mark.parametrize("name", runnable_builds)
