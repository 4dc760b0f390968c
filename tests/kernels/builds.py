"""Builds of the kernels for tests only. `python -m tests.kernels.builds` compiles them, even where PyTorch is not
installed.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    # Importing the package `kernels` imports PyTorch, but its builds need only the standard library.
    package = ModuleType("kernels")
    package.__path__ = [str(Path(__file__).parents[2] / "kernels")]
    sys.modules["kernels"] = package

from kernels.build import (
    FLAGS,
    ISA_FLAGS,
    ISA_NEEDS,
    SOURCES,
    BuildError,
    build,
    builds_for,
    library_path,
    processor_flags,
)

# Sources that are compiled separately, since their unnamed namespaces contain names that other sources also use.
_APART = ("dot_panel.cpp",)

# "pair" runs the 16-lane AVX-512 code on pairs of AVX2 vectors. Its speed does not matter, but its compile time does:
# with -O1 instead of -Og, GCC takes six times as long to compile the unrolled sums.
PAIR = ("-DMIDSTREAM_PAIR", "-Og")
# Of the undefined-behavior checks, only those that are cheap to compile.
SANITIZED = (
    "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow",
    "-fno-sanitize-recover=alignment,bounds,shift,signed-integer-overflow",
    # Address checks are calls instead of inlined code: they run slower, but compile in two thirds of the time.
    "--param=asan-instrumentation-with-call-threshold=0",
    "-g1",
    "-O0",
)


def compiled(isa: str, flags: tuple[str, ...]) -> Path:
    """Compile the kernels with these flags, unless this was done before, and return the library's path.

    `build` would take twice as long: most sources are small and include the same large headers, so here they are
    compiled as one translation unit.
    """
    target = _path(isa, flags)
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


def _path(isa: str, flags: tuple[str, ...]) -> Path:
    # The name differs from those of `kernels.build`, which removes its libraries of other versions.
    path = library_path(isa, flags)
    return path.with_name(f"tests-{path.name}")


def main() -> None:
    """Compile the test libraries that run on any machine, and those builds for this machine that the service does not
    use here; remove test libraries of older sources.
    """
    flags = processor_flags()
    try:
        made = [compiled("avx2", own_flags) for own_flags in (PAIR, SANITIZED)]
        for isa in ISA_NEEDS:
            if isa in ISA_FLAGS and flags >= ISA_NEEDS[isa] and isa not in builds_for(flags):
                build(isa)
    except (OSError, subprocess.CalledProcessError, BuildError) as error:
        sys.exit(f"The tests' kernels are not compiled: {error}")
    for old in made[0].parent.glob("tests-*"):
        if old.with_suffix(".so") not in made:
            old.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
