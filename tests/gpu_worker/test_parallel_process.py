"""Ranks as real worker processes, driven over ZeroMQ by a scripted scheduler."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from gpu_worker.model_runner import ModelRunner
from tests.gpu_worker.rank_pool import HOST
from tests.gpu_worker.scripted_scheduler import PROMPT, ScriptedScheduler, rank_environment, run_prompt, worker_process
from tests.gpu_worker.tiny_models import Driver
from tests.ports import free_port

LIMIT_S = 240
# The limit is small, so that the steps that run at the start are small.
FLAGS = ("--kernels", "torch", "--num-threads", "1", "--run-ahead", "on", "--max-num-tokens", "32")


def test_sigterm_to_any_rank_drains_the_group(tiny_folder: Path, tiny_runner: ModelRunner) -> None:
    scheduler, port = ScriptedScheduler(), free_port()
    with ExitStack() as stack:
        stack.callback(scheduler.close)
        ranks = [
            stack.enter_context(
                worker_process(scheduler.address, tiny_folder, *FLAGS, variables=rank_environment(rank, 2, HOST, port))
            )
            for rank in (0, 1)
        ]
        offer = scheduler.register(epoch=1)
        assert (offer.world_size, offer.num_blocks) == (2, 256)
        assert offer.group_id.endswith(f"-{ranks[0].pid}")
        assert run_prompt(scheduler, 6) == Driver(tiny_runner).run_alone(PROMPT, 6)
        ranks[1].send_signal(signal.SIGTERM)
        assert scheduler.receive("leave").epoch == 1
        logs = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert "receiving steps over shared memory" in logs[1]
