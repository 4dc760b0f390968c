"""A process's rank in its worker group, from the environment variables that torchrun and LeaderWorkerSet set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from midstream.config import WorkerConfig
from midstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process's position in its worker group.

    The group is a grid: the tensor ranks of a stage compute parts of each of its layers, and pipeline stages hold
    consecutive layers. The ranks of a stage have consecutive numbers, because they communicate most.

    Attributes:
        rank, world_size: Rank in the group and size of the group; rank 0 communicates with the scheduler.
        local_rank: Rank among those on this host, which is the index of its GPU.
        tensor_size, pipeline_size: Their product is world_size.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    master_addr: str = ""

    def __post_init__(self) -> None:
        for field, size in (("tensor_parallel", self.tensor_size), ("pipeline_parallel", self.pipeline_size)):
            if size < 1:
                raise ConfigError(f"is {size}; must be at least 1", field=field)
        if self.tensor_size * self.pipeline_size != self.world_size:
            raise ConfigError(
                f"{self.tensor_size} tensor ranks times {self.pipeline_size} stages must equal WORLD_SIZE, which is "
                f"{self.world_size}",
                field="tensor_parallel",
            )
        if not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise ConfigError(
                f"must be less than WORLD_SIZE ({self.world_size}); got {self.rank}, with LOCAL_RANK {self.local_rank}",
                field="RANK",
            )

    @property
    def tensor_rank(self) -> int:
        """Rank within its stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """Index of its pipeline stage."""
        return self.rank // self.tensor_size

    @property
    def is_alone(self) -> bool:
        """Whether the group is a single process."""
        return self.world_size == 1

    @classmethod
    def from_environment(cls, config: WorkerConfig, environment: Mapping[str, str]) -> Ranks:
        """Return the rank given by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; a single rank if they are
        unset. Raises ConfigError if a variable is not a number, is missing, or contradicts the settings.
        """
        world_size = _number(environment, "WORLD_SIZE", 1)
        if world_size == 1 and max(config.tensor_parallel, config.pipeline_parallel) <= 1:
            return cls()
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if world_size > 1 and not environment.get(name):
                raise ConfigError(f"must be set if WORLD_SIZE is {world_size}", field=name)
        pipeline_size = config.pipeline_parallel
        return cls(
            rank=_number(environment, "RANK", 0),
            world_size=world_size,
            local_rank=_number(environment, "LOCAL_RANK", 0),
            tensor_size=config.tensor_parallel or max(1, world_size // max(1, pipeline_size)),
            pipeline_size=pipeline_size,
            master_addr=environment.get("MASTER_ADDR", ""),
        )


ALONE = Ranks()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"is {text!r}; must be a number", field=name)
    return int(text)
