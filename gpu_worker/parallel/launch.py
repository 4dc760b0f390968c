"""Starts a process as one rank of a group."""

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
    """Joins the group and runs until it ends; returns the exit code.

    From the moment that the group is complete, whatever goes wrong ends this process without further ado: the other
    ranks end with it, and none waits for operations that will not come.

    Raises:
        MidstreamError: Settings, model and device do not fit, or the group does not come about.
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
