"""The threads of the CPU kernels."""

import weakref
from collections import deque

from kernels.cpu.library import Library

_MOST_TOKENS = 8  # larger steps have enough work for all threads, even if each is sometimes interrupted
_NUM_KEPT, _FEWEST_KEPT = 8, 3  # measured times
_TRIAL_PERIOD = 32  # steps


class ThreadPool:
    """A pool of threads. Must not be called concurrently; the caller works as the first thread."""

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start num_threads - 1 threads.

        Raises RuntimeError if the library needs AMX and the system does not allow its use.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}: expected at least 1")
        self.library = library
        self.num_threads = num_threads
        self.handle: int = library.pool_create(num_threads)
        weakref.finalize(self, library.pool_destroy, self.handle)
        if library.isa == "amx" and not library.pool_use_tiles(self.handle):
            raise RuntimeError("the system does not allow this process to use AMX")


class StepThreads:
    """Chooses the number of threads for steps with few tokens: all, or one fewer.

    The threads wait for each other several times per layer, so a program that interrupts one of them delays all.
    Whether it is faster to leave a processor to other programs depends on the model, the processor and these programs.
    Therefore both are measured: most steps use the faster number, and one in _TRIAL_PERIOD the other.
    """

    def __init__(self, num_threads: int) -> None:
        self._all = num_threads
        self._steps: dict[int, int] = {}
        self._times: dict[tuple[int, int], deque[float]] = {}

    def number(self, num_tokens: int) -> int:
        """Return the number of threads for the next step with this number of tokens."""
        if self._all == 1 or num_tokens > _MOST_TOKENS:
            return self._all
        step = self._steps.get(num_tokens, 0)
        self._steps[num_tokens] = step + 1
        if step < 2 * _FEWEST_KEPT:
            return self._all - step % 2
        faster, slower = sorted((self._all, self._all - 1), key=lambda number: self._mean(num_tokens, number))
        return slower if step % _TRIAL_PERIOD == 0 else faster

    def note(self, num_tokens: int, num_threads: int, seconds: float) -> None:
        """Record how long a step took with the number of threads that `number` returned for it."""
        if self._all > 1 and num_tokens <= _MOST_TOKENS:
            self._times.setdefault((num_tokens, num_threads), deque(maxlen=_NUM_KEPT)).append(seconds)

    def _mean(self, num_tokens: int, num_threads: int) -> float:
        """Return the mean time of recent steps without the longest, which a rare event may have delayed."""
        times = sorted(self._times.get((num_tokens, num_threads), ()))[:-1]
        return sum(times) / max(1, len(times))
