"""Loads schedulers: built-in ones by name, others through the entry points of installed packages.

A package registers a scheduler in the entry point group `midstream.schedulers`. The scheduler is a class derived from
RequestScheduler; from CapacityScheduler or MicroBatchScheduler, to be combined with a built-in policy of the other
kind; and is constructed without arguments. Or it is derived from one of TensorRT-LLM's classes in
scheduler/list_schedulers.py, which get all active requests at once. Exceptions of an
installed scheduler are survived (see guarded_scheduler.py).
"""

from __future__ import annotations

from importlib.metadata import entry_points

from midstream.errors import ConfigError
from scheduler.core.capacity_scheduler import CAPACITY_SCHEDULERS, CapacityScheduler
from scheduler.core.guarded_scheduler import GuardedScheduler
from scheduler.core.micro_batch_scheduler import MICRO_BATCH_SCHEDULERS, MicroBatchScheduler
from scheduler.core.request_scheduler import RequestScheduler, SimpleScheduler
from scheduler.list_schedulers import connect

ENTRY_POINT_GROUP = "midstream.schedulers"


def load_scheduler(name: str, capacity_policy: str, batching_type: str) -> RequestScheduler:
    """Return the scheduler with this name.

    Args:
        name: Name of an entry point; empty means the built-in scheduler.
        capacity_policy: One of CAPACITY_SCHEDULERS.
        batching_type: One of MICRO_BATCH_SCHEDULERS.

    Raises:
        ConfigError: There is no such entry point, or it is not a scheduler.
    """
    built_in = SimpleScheduler(CAPACITY_SCHEDULERS[capacity_policy](), MICRO_BATCH_SCHEDULERS[batching_type]())
    plugin = _load_plugin(name) if name else None
    if plugin is None:
        return built_in
    if isinstance(plugin, RequestScheduler):
        return GuardedScheduler(plugin, built_in)
    capacity = plugin if isinstance(plugin, CapacityScheduler) else built_in.capacity_scheduler
    micro_batch = plugin if isinstance(plugin, MicroBatchScheduler) else built_in.micro_batch_scheduler
    return GuardedScheduler(SimpleScheduler(capacity, micro_batch), built_in)


def _load_plugin(name: str) -> RequestScheduler | CapacityScheduler | MicroBatchScheduler:
    found = {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"no installed package provides {name!r} under {ENTRY_POINT_GROUP}; available: {known}",
            field="scheduler_plugin",
        )
    offered = found[name].load()
    plugin = connect(offered) if isinstance(offered, type) else None
    if plugin is not None:
        return plugin
    plugin = offered()
    if not isinstance(plugin, RequestScheduler | CapacityScheduler | MicroBatchScheduler):
        raise ConfigError(f"{name!r} is a {type(plugin).__name__}, not a scheduler", field="scheduler_plugin")
    return plugin
