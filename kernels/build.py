"""Builds the CPU kernels: `python -m kernels.build` compiles csrc/ once per instruction set."""

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "csrc"

# -ffp-contract=off: whether a multiply and an add are fused must not depend on where the code is inlined.
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"]
ISA_FLAGS = {
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mavx512bf16",
        "-mfma",
        "-mf16c",
    ],
    "avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "neon": ["-march=armv8.2-a+dotprod"],
}
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "fma", "f16c"})
_AVX2 = frozenset({"avx2", "fma", "f16c"})
# Instruction sets of this kind of processor, fastest first, with the processor flags that each requires, as named in
# /proc/cpuinfo. The last one runs on all processors that are supported.
ISA_NEEDS: dict[str, frozenset[str]] = (
    {"neon": frozenset({"asimd", "asimddp"})}
    if platform.machine() == "aarch64"
    else {
        "amx": _AVX512 | {"amx_tile", "amx_bf16"},
        "avx512": _AVX512,
        "avxvnni": _AVX2 | {"avx_vnni"},
        "avx2": _AVX2,
    }
)
BASE_ISA = list(ISA_NEEDS)[-1]
# Instruction sets that use the build of another instruction set.
BUILD_OF = {"amx": "avx512"}


class BuildError(Exception):
    """No compiler is installed, or compilation failed; the message says which."""


def processor_flags() -> frozenset[str]:
    """Return the processor's flags (on ARM: features), as in /proc/cpuinfo; empty if the file does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, []))


def builds_for(flags: frozenset[str]) -> list[str]:
    """Return the builds that a processor with these flags can run: the best one, and the one for all processors as a
    fallback.
    """
    runnable = [BUILD_OF.get(isa, isa) for isa, needs in ISA_NEEDS.items() if flags >= needs]
    return list(dict.fromkeys([*runnable[:1], BASE_ISA]))


def library_path(isa: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the path of the library for the current sources and flags, whether or not it exists."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join([*FLAGS, *ISA_FLAGS[isa], *extra_flags]).encode())
    name = f"midstream-{isa}-{digest.hexdigest()[:16]}.so"
    # Installations that the user cannot write to, such as containers, contain prebuilt libraries.
    shipped = PACKAGE / "_build" / name
    return shipped if shipped.exists() else _build_dir() / name


def build(isa: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compile the library unless it exists, and return its path; raise BuildError if that fails."""
    target = library_path(isa, extra_flags)
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) is installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    # If several processes start, one compiles and the others wait for it. The compiler holds the lock too: if the
    # process that started it is killed, the next one uses its result instead of compiling at the same time.
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            logger.info("compiling the %s kernels once, for a minute or more", isa)
            _compile(compiler, isa, extra_flags, target, lock.fileno())
    return target


def _compile(compiler: str, isa: str, extra_flags: tuple[str, ...], target: Path, lock: int) -> None:
    program = compiler.split()
    if shutil.which(program[0]) is None:
        raise BuildError(f"cannot run {compiler}: no such program")
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    # The rename makes the library visible only once it is complete.
    script = 'made=$1 target=$2; shift 2; "$@" -o "$made" && mv "$made" "$target"'
    made = str(target.with_suffix(".partial"))
    command = ["sh", "-c", script, "sh", made, str(target), *program, *FLAGS, *ISA_FLAGS[isa], *extra_flags, *sources]
    result = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[lock])
    if result.returncode != 0:
        raise BuildError(f"{compiler} failed for {isa}: {result.stderr.strip()[-2000:]}")


def _build_dir() -> Path:
    beside = PACKAGE / "_build"
    if os.access(beside if beside.exists() else PACKAGE, os.W_OK):
        return beside
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "midstream" / "kernels"


def main() -> int:
    """Build the libraries, remove those of older sources, and report; return 1 if nothing could be built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", action="store_true", help="Build only for this processor. [all instruction sets]")
    every = list(dict.fromkeys(BUILD_OF.get(isa, isa) for isa in ISA_NEEDS))
    wanted = builds_for(processor_flags()) if parser.parse_args().here else every
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        builds = {isa: pool.submit(build, isa) for isa in wanted}
    built = []
    for isa, made in builds.items():
        try:
            built.append(made.result())
        except BuildError as error:
            print(f"kernels: {isa} not built: {error}", file=sys.stderr)
        else:
            print(f"kernels: {isa} ready in {built[-1]}")
            for old in built[-1].parent.glob(f"midstream-{isa}-*"):
                if not old.name.startswith(built[-1].stem):
                    old.unlink(missing_ok=True)
    print(f"kernels: {len(built)} of {len(builds)} built in {time.monotonic() - started:.0f} s")
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
