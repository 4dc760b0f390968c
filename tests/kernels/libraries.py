"""The builds of the kernels that can run on this machine."""

import fcntl
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from kernels.build import FLAGS, ISA_FLAGS, ISA_NEEDS, SOURCES, build, library_path, processor_flags
from kernels.cpu import Library, ThreadPool

# Sources whose unnamed namespaces have names of other sources.
_APART = ("dot_panel.cpp",)

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


def compiled(isa: str, flags: tuple[str, ...]) -> Path:
    """Compile the kernels with these flags, unless this was done before, and return the library's path.

    `build` would do the same, but in twice the time: most sources are small and include the same large headers, so here
    they are one translation unit.
    """
    target = library_path(isa, flags)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            together, made = Path(scratch) / "together.cpp", Path(scratch) / target.name
            names = sorted(path.name for path in SOURCES.glob("*.cpp") if path.name not in _APART)
            together.write_text("".join(f'#include "{SOURCES / name}"\n' for name in names))
            sources = [together, *(SOURCES / name for name in _APART)]
            compiler = os.environ.get("CXX", "g++").split()
            subprocess.run([*compiler, *FLAGS, *ISA_FLAGS[isa], *flags, *sources, "-o", made], check=True)
            made.replace(target)
    return target


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
