"""The builds of the kernels that can run on this machine."""

import functools

import pytest

from kernels.build import ISA_NEEDS, build, processor_flags
from kernels.cpu import Library, ThreadPool
from tests.kernels.builds import PAIR, compiled

# By name: build, additional flags, and instruction set of the library. "tiles" emulates AMX in plain C++.
BUILDS = {
    "avx2": ("avx2", (), "avx2"),
    "pair": ("avx2", PAIR, "avx512"),
    "tiles": ("avx2", PAIR, "amx"),
    "avx512": ("avx512", (), "avx512"),
    "amx": ("avx512", (), "amx"),
    "avxvnni": ("avxvnni", (), "avxvnni"),
}


@functools.cache
def library(name: str) -> Library:
    isa, extra_flags, used_for = BUILDS[name]
    return Library(compiled(isa, extra_flags) if extra_flags else build(isa), used_for)


@functools.cache
def threads(name: str, num_threads: int = 2) -> ThreadPool:
    return ThreadPool(library(name), num_threads)


_needs = {name: ISA_NEEDS["amx" if name == "amx" else isa] for name, (isa, _, _) in BUILDS.items()}
runnable_builds = [name for name, needs in _needs.items() if processor_flags() >= needs]
each_build = pytest.mark.parametrize("name", runnable_builds)
