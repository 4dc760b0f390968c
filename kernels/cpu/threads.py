"""The threads of the CPU kernels."""

import ctypes
import weakref
from collections.abc import Sequence

from kernels.cpu.library import Library


class ThreadPool:
    """A pool of threads. Must not be called concurrently; the caller works as the first thread."""

    def __init__(self, library: Library, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        """Start num_threads - 1 threads; if `cpus` is given, pin each to one of these processors.

        Raises RuntimeError if the library needs AMX and the system does not allow its use.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}: expected at least 1")
        if cpus is not None and len(cpus) != num_threads - 1:
            raise ValueError(f"cpus has {len(cpus)} processors: expected {num_threads - 1}")
        self.library = library
        self.num_threads = num_threads
        pinned = None if cpus is None else (ctypes.c_int * len(cpus))(*cpus)
        self.handle: int = library.pool_create(num_threads, pinned)
        weakref.finalize(self, library.pool_destroy, self.handle)
        if library.isa == "amx" and not library.pool_use_tiles(self.handle):
            raise RuntimeError("the system does not allow this process to use AMX")
