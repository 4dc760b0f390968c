"""Runs a process as one rank of a group."""

from __future__ import annotations

import logging

from gpu_worker.models.loader import use_device
from gpu_worker.parallel.follower import run_follower
from gpu_worker.parallel.group import RankGroup
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.worker import Worker
from midstream.config import WorkerConfig
from midstream.errors import MidstreamError
from midstream.model.folder import ModelFolder

logger = logging.getLogger(__name__)


def run_rank(config: WorkerConfig, folder: ModelFolder, ranks: Ranks) -> int:
    """Join the group and run until it ends; return the exit code.

    Once the group is complete, any failure ends this process immediately, and the other ranks with it, so that none
    waits forever in a collective operation. Raises MidstreamError if the settings, the model or the device are not
    supported, or the group could not be formed.
    """
    group = RankGroup(config, folder, ranks, use_device(config, ranks))
    if ranks.rank:
        return run_follower(config, folder, group)
    try:
        return Worker(config, folder, group).run()
    except MidstreamError:
        raise
    except Exception as error:
        logger.exception("rank 0 failed")
        group.fail(str(error))
        raise
