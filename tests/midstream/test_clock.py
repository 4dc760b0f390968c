"""Monotonic time within a process is unaffected by jumps of the wall clock."""

from __future__ import annotations

import pytest

from midstream.clock import SteadyClock

S = 1_000_000_000


class Machine:
    """The two clocks of a machine, which the test sets."""

    def __init__(self, wall_ns: int, up_ns: int) -> None:
        self.wall_ns, self.up_ns = wall_ns, up_ns

    def passes(self, ns: int, jump_ns: int = 0) -> None:
        self.wall_ns += ns + jump_ns
        self.up_ns += ns

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall_ns, lambda: self.up_ns, boot_id="boot")


@pytest.mark.parametrize("jump_ns", [3 * S, -3 * S, 3600 * S, -3600 * S])
def test_a_clock_jump_changes_only_time_stamps(jump_ns: int) -> None:
    machine = Machine(1_700_000_000 * S, 50 * S)
    clock = machine.clock()
    began = clock.now_ns()
    assert began == clock.to_unix_ns(began) == 1_700_000_000 * S
    machine.passes(2 * S, jump_ns)
    assert clock.now_ns() - began == 2 * S
    assert clock.to_unix_ns(clock.now_ns()) == machine.wall_ns
    assert clock.from_unix_ns(machine.wall_ns + 5 * S) == clock.now_ns() + 5 * S
    # Another process on the machine starts after the jump, but reads the same monotonic clock.
    other = machine.clock()
    assert other.from_monotonic_ns(clock.to_monotonic_ns(clock.now_ns() + 7 * S)) == other.now_ns() + 7 * S


def test_slewing_is_not_a_jump() -> None:
    machine = Machine(1_700_000_000 * S, 50 * S)
    clock = machine.clock()
    machine.passes(S, 900_000)
    assert clock.to_unix_ns(clock.now_ns()) == clock.now_ns()
    machine.passes(S, 900_000)
    assert clock.to_unix_ns(clock.now_ns()) == machine.wall_ns
    assert clock.to_unix_ns(0) == clock.from_unix_ns(0) == 0
