"""Two ranks of a worker on two hosts whose link is cut: python -m tests.faults.rank_hosts FOLDER [--namespaces].

This is a separate program, because it uses network namespaces where they are permitted. Otherwise both ranks run on
this host and one is killed.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from tests.faults.hosts import Namespaces
from tests.gpu_worker.scripted_scheduler import ScriptedScheduler, rank_environment, run_prompt, worker_process
from tests.ports import free_port

NUM_TOKENS = 6
LIMIT_S = 100
RANK_TIMEOUT_S = 10
LOST = 4


def main() -> None:
    """Run a prompt and print its tokens; fail if anything is wrong."""
    folder, hosts = Path(sys.argv[1]), Namespaces(["one", "two"]) if "--namespaces" in sys.argv else None
    first, outer = ("10.77.0.1", "10.77.0.254") if hosts else ("127.0.0.1", "127.0.0.1")
    scheduler, port = ScriptedScheduler(host=outer), free_port()
    flags = ("--kernels", "torch", "--num-threads", "1", "--rank-timeout-s", str(RANK_TIMEOUT_S))
    with ExitStack() as stack:
        stack.callback(scheduler.close)
        ranks = []
        for rank, host in enumerate(("one", "two")):
            variables = rank_environment(rank, 2, first, port) | ({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {})
            on = hosts.command(host) if hosts else []
            process = worker_process(scheduler.address, folder, *flags, variables=variables, on=on)
            ranks.append(stack.enter_context(process))
        assert scheduler.register(epoch=1).world_size == 2
        print(*run_prompt(scheduler, NUM_TOKENS))
        if hosts:
            hosts.cut("one", "two")
        else:
            ranks[1].kill()
        logs = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
    assert f"receiving steps over {'TCP' if hosts else 'shared memory'}" in logs[1], logs[1]
    assert ranks[0].returncode == LOST, logs[0]
    assert not hosts or ranks[1].returncode == LOST, logs[1]
    assert (f"sent no heartbeat for {RANK_TIMEOUT_S} s" if hosts else "rank 1 disconnected") in logs[0], logs[0]


if __name__ == "__main__":
    main()
