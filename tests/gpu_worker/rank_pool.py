"""Processes that serve as ranks 1, 2, … of one group after another, so that tests need not start new processes.

python -m tests.gpu_worker.rank_pool reads one JSON line per group, serves as a rank until the group ends, and then
reports that the group has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.model_runner import ModelRunner
from gpu_worker.models.loader import use_device
from gpu_worker.parallel.follower import follow
from gpu_worker.parallel.group import RankGroup
from gpu_worker.parallel.ranks import Ranks
from midstream.config import WorkerConfig
from midstream.model.folder import open_model_folder
from tests.ports import free_port

HOST = "127.0.0.1"


class RankPool:
    """A pool of processes; this process is rank 0."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-m", "tests.gpu_worker.rank_pool"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(size)
        ]
        self._is_in_use = False

    @contextmanager
    def runner(
        self,
        folder: Path | str,
        tensor: int,
        stages: int,
        *,
        environment: Any = None,
        **settings: Any,
    ) -> Iterator[ModelRunner]:
        """Return a runner on a grid of ranks, with the settings of `make_runner`.

        `environment` contains additional variables for the other ranks.
        """
        defaults = {"device": "cpu", "max_kv_tokens": 4096, "max_batch_size": 8, "num_threads": 1}
        values = {**defaults, **settings, "tensor_parallel": tensor, "pipeline_parallel": stages}
        world_size = tensor * stages
        variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
        assert not self._is_in_use, "another group's runner is still open"
        self._is_in_use = True
        followers = self._processes[: world_size - 1]
        for rank, process in enumerate(followers, 1):
            assert process.stdin is not None
            own = {**variables, **(environment or {}), "RANK": str(rank)}
            job = {"model": str(folder), "settings": values, "variables": own}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**variables, "RANK": "0"}.items():
                patch.setenv(name, value)
            config, model = WorkerConfig(**values), open_model_folder(str(folder))
            group = RankGroup(config, model, Ranks.from_environment(config, os.environ), use_device(config))
        try:
            runner = ModelRunner(config, model, leader=group.leader)
            yield runner
            runner.close()
            group.stop(exit_code=0)
        except BaseException:
            group.monitor.expect_end()  # without this, the exit of another rank would end this process
            raise
        for process in followers:
            assert process.stdout is not None
            assert process.stdout.readline() == "ended with 0\n"
        self._is_in_use = False

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.update(job["variables"])
        config, model = WorkerConfig(**job["settings"]), open_model_folder(job["model"])
        group = RankGroup(config, model, Ranks.from_environment(config, os.environ), use_device(config))
        print(f"ended with {follow(config, model, group)}", flush=True)


if __name__ == "__main__":
    main()
