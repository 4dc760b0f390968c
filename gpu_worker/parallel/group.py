"""This process as one rank of its worker group: joins and leaves the group.

The order of joining is: the group's store (at MASTER_ADDR:MASTER_PORT, or torchrun's), connections to rank 0,
rank monitor, then torch.distributed. Once the monitor runs, this rank ends when any other rank ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gpu_worker.parallel.communicator import RankCommunicator
from gpu_worker.parallel.frames import FrameReceiver, FrameSender
from gpu_worker.parallel.leader import Leader
from gpu_worker.parallel.rank_monitor import RankMonitor, end_process
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.rendezvous import DIGEST_BYTES, await_followers, connect_to_leader
from midstream.config import WorkerConfig
from midstream.errors import ConfigError, UnavailableError
from midstream.model.folder import ModelFolder

logger = logging.getLogger(__name__)

# The hosts of a group may start minutes apart.
_START_TIMEOUT_S = 600.0
# Settings that must be equal on all ranks.
_SHARED_SETTINGS = (
    "expert_parallel",
    "weights",
    "kv",
    "activations",
    "kernels",
    "implementation",
    "tokens_per_block",
    "max_batch_size",
    "max_num_tokens",
    "max_sequence_length",
    "cuda_graphs",
    "run_ahead",
    "attention",
    "batch_invariant",
    "rank_timeout_s",
    "replicate_post_processors",
)


class RankGroup:
    """The group from one rank's point of view.

    Attributes:
        monitor: Monitors the other ranks.
        leader: Sends commands to the other ranks; set on rank 0 only.
    """

    def __init__(self, config: WorkerConfig, folder: ModelFolder, ranks: Ranks, device: torch.device) -> None:
        """Join the group, and wait for all ranks. Raises ConfigError if a rank has another model or other settings, or
        UnavailableError if some ranks did not join in time.
        """
        if config.rank_timeout_s <= 0:
            raise ConfigError(f"is {config.rank_timeout_s:g}; must be greater than 0", field="rank_timeout_s")
        logger.info("rank %d is waiting for its group of %d", ranks.rank, ranks.world_size)
        self.ranks = ranks
        digest = _digest(config, folder, ranks)
        try:
            timeout = timedelta(seconds=_START_TIMEOUT_S)
            store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
            if ranks.rank == 0:
                connections = await_followers(store, ranks, digest, _START_TIMEOUT_S)
            else:
                connections = connect_to_leader(store, ranks, digest)
            self.monitor = RankMonitor(connections.heartbeats, config.rank_timeout_s)
            if ranks.rank == 0:
                self._sender = FrameSender(list(connections.frames.values()))
            else:
                self._receiver = FrameReceiver(connections.frames[0])
            self.communicator = RankCommunicator(
                ranks, device, PrefixStore("tensors", store), is_ordered=config.batch_invariant
            )
        except (OSError, RuntimeError) as error:
            raise UnavailableError(f"rank {ranks.rank} could not join its group: {error}") from error
        self.leader = Leader(self._sender, self.communicator) if ranks.rank == 0 else None
        logger.info("rank %d joined its group of %d", ranks.rank, ranks.world_size)

    @property
    def has_failed(self) -> bool:
        """Return whether the states of the ranks may have diverged."""
        return self.leader is not None and self.leader.has_failed

    def receive(self) -> bytes:
        """Return the next command. To be called on a follower. Raises OSError if rank 0 has disconnected."""
        return self._receiver.receive()

    def stop(self, exit_code: int) -> None:
        """Stop the other ranks with this exit code, and leave the group. To be called on rank 0."""
        assert self.leader is not None
        self.monitor.expect_end()
        self.leader.stop(exit_code)
        self.monitor.close()
        self._sender.close()
        self.communicator.close()

    def close(self) -> None:
        """Leave the group. To be called on a follower."""
        self.monitor.leave()
        self._receiver.close()
        self.communicator.close()

    def fail(self, reason: str) -> None:
        """End this process, which also ends the group."""
        end_process(reason)


def _digest(config: WorkerConfig, folder: ModelFolder, ranks: Ranks) -> bytes:
    settings = {name: getattr(config, name) for name in _SHARED_SETTINGS}
    if config.replicate_post_processors:
        settings["logits_post_processors"] = config.logits_post_processors
    settings |= {"fingerprint": folder.fingerprint, "grid": [ranks.tensor_size, ranks.pipeline_size]}
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
