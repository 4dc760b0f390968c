"""Chooses the build of the compiled kernels for this processor, and checks it before use."""

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from kernels.build import BASE_ISA, BUILD_OF, ISA_NEEDS, BuildError, build, processor_flags
from kernels.cpu.library import Library


def load_library(isa: str = "auto") -> Library | None:
    """Return the best build of the kernels for this processor; None, after logging the reason, if there is none.

    A missing build is compiled first, which takes a minute or more.

    Args:
        isa: The only instruction set to try (a key of `ISA_NEEDS`), `reference` for none, or `auto`.
    """
    return _load(isa)


@functools.cache
def _load(wanted: str) -> Library | None:
    if wanted == "reference":
        return None
    flags, reasons, is_fault = processor_flags(), [], False
    for isa in ISA_NEEDS if wanted == "auto" else [wanted]:
        if isa not in ISA_NEEDS:
            reasons.append(f"{isa}: not an instruction set of this architecture")
            continue
        if not flags >= ISA_NEEDS[isa]:
            reasons.append(f"{isa}: this processor lacks {', '.join(sorted(ISA_NEEDS[isa] - flags))}")
            continue
        library, reason = _try(isa)
        if library is not None:
            if is_fault:
                warnings.warn(f"running the {isa} kernels ({'; '.join(reasons)})", stacklevel=3)
            return library
        is_fault = True
        reasons.append(f"{isa}: {reason}")
    warnings.warn(f"running the PyTorch reference instead of the CPU kernels ({'; '.join(reasons)})", stacklevel=3)
    return None


def _try(isa: str) -> tuple[Library | None, str | None]:
    """Return the build for this instruction set, or the reason why it cannot be used."""
    # Imported here because the check also runs as a separate program, and a module that runs as a program must not
    # already be imported.
    from kernels.cpu.self_check import find_difference

    try:
        path = build(BUILD_OF.get(isa, isa))
        reason = None if isa == BASE_ISA else find_crash(path, isa)
        library = None if reason else Library(path, isa)
    except (BuildError, OSError) as error:
        return None, str(error)
    reason = reason if library is None else find_difference(library)
    return (library, None) if reason is None else (None, reason)


def find_crash(path: Path, isa: str) -> str | None:
    """Check a library in a separate process; return how it failed, or None if it passes now or passed earlier."""
    digest = hashlib.sha256(" ".join(sorted(processor_flags())).encode()).hexdigest()[:16]
    passed = path.with_suffix(f".{isa}.{digest}.passed")
    if passed.exists():
        return None
    command = [sys.executable, "-P", "-m", f"{__package__}.self_check", str(path), isa]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode < 0:
        return f"its check ended with {signal.Signals(-result.returncode).name}"
    if result.returncode > 0:
        return result.stdout.strip() or result.stderr.strip()[-500:]
    with contextlib.suppress(OSError):
        passed.touch()
    return None
