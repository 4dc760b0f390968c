"""The builds of the kernels that can run on this machine."""

import functools

import pytest

from kernels.build import ISA_NEEDS, build
from kernels.cpu import Library, ThreadPool
from kernels.cpu.library import processor_flags

# "pair" is the 16-lane code of AVX-512 on two AVX2 halves; nobody needs it fast, so it is compiled fast: with -O1, GCC
# takes six times as long over the sums that are unrolled.
BUILDS = {"avx2": ("avx2", ()), "pair": ("avx2", ("-DMIDSTREAM_PAIR", "-Og")), "avx512": ("avx512", ())}


@functools.cache
def library(name: str) -> Library:
    isa, extra_flags = BUILDS[name]
    return Library(build(isa, extra_flags), isa)


@functools.cache
def threads(name: str, num_threads: int = 2) -> ThreadPool:
    return ThreadPool(library(name), num_threads)


runnable_builds = [name for name, (isa, _) in BUILDS.items() if processor_flags() >= ISA_NEEDS[isa]]
each_build = pytest.mark.parametrize("name", runnable_builds)
