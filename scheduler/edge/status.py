"""The status report of this scheduler's cell, which routers request periodically. It never changes the core."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from protos import loads_pb2, status_pb2
from scheduler.core.block_manager import BlockManager
from scheduler.core.core import SchedulerCore
from scheduler.core.stats import LATENCY_BUCKETS_S, Histogram, Totals
from scheduler.core.worker_group import WorkerGroup
from scheduler.edge.feed import FeedHub
from scheduler.wire.kinds import kind_to_proto

_ROUTER_TTL_S = 5.0
_MAX_ROUTERS = 256
_MAX_NAME = 128
_MAX_DETACHED = 10_000
_NS_PER_MS = 1_000_000
# The counts that have the same name in Totals.
_SAME_COUNTS = set(status_pb2.CountsSinceStart.DESCRIPTOR.fields_by_name) - {"num_generated_tokens"}


class CellStatusReport:
    """Builds the answers to GetStatus, and tracks which routers have recently asked for it."""

    def __init__(
        self, core: SchedulerCore, hub: FeedHub, cell: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = core
        self._hub = hub
        self._cell = cell
        self._clock = clock
        # Router id -> (time of its last request, its status), latest last.
        self._routers: dict[str, tuple[float, status_pb2.RouterStatus]] = {}

    def answer(self, request: status_pb2.GetCellStatusRequest, now_ns: int) -> status_pb2.CellStatus:
        self._note(request.router)
        core = self._core
        totals = core.totals
        return status_pb2.CellStatus(
            cell=self._cell,
            scheduler_epoch=core.config.scheduler_epoch,
            is_draining=core.lifecycle.is_draining,
            requests=self._request_counts(),
            groups=[self._group(group, request.max_map_cells, now_ns) for group in core.groups],
            detokenizers=detokenizer_infos(self._hub),
            routers=[router for _, router in self._routers.values()],
            counts=_counts(totals),
            time_to_first_token=_duration_counts(totals.time_to_first_token),
            inter_token_latency=_duration_counts(totals.inter_token_latency),
            queue_time=_duration_counts(totals.request_queue_time),
            detached=self._detached(),
        )

    def _detached(self) -> list[status_pb2.DetachedRequests]:
        found: dict[str, status_pb2.DetachedRequests] = {}
        detached = self._core.lifecycle.detached
        unread = (request for request in detached if not request.num_attached and request.spec.client_id)
        for request in itertools.islice(unread, _MAX_DETACHED):
            client = request.spec.client_id
            item = found.setdefault(client, status_pb2.DetachedRequests(client=client))
            item.request_ids.append(request.request_id)
        return list(found.values())

    def _note(self, router: status_pb2.RouterStatus) -> None:
        now = self._clock()
        if 0 < len(router.router_id) <= _MAX_NAME:
            self._routers.pop(router.router_id, None)
            self._routers[router.router_id] = (now, router)
        for router_id, (asked_at, _) in list(self._routers.items()):
            if asked_at > now - _ROUTER_TTL_S and len(self._routers) <= _MAX_ROUTERS:
                break
            del self._routers[router_id]

    def _request_counts(self) -> status_pb2.RequestCounts:
        core = self._core
        num_paused = sum(1 for request in core.queue if request.times.first_scheduled_ns and request.group is None)
        num_context = sum(len({sequence.request for sequence in group.context}) for group in core.groups)
        return status_pb2.RequestCounts(
            num_queued=len(core.queue) - num_paused,
            num_paused=num_paused,
            num_context=num_context,
            num_generation=core.num_active_requests - num_context,
            max_num_queued=core.queue.max_size,
        )

    def _group(self, group: WorkerGroup, max_map_cells: int, now_ns: int) -> status_pb2.GroupStatus:
        blocks, registration = group.blocks, group.registration
        status = status_pb2.GroupStatus(
            group_id=group.group_id,
            cell=self._cell,
            epoch=group.epoch,
            device=registration.device,
            dtype=registration.dtype,
            world_size=registration.world_size,
            num_sequences=group.max_batch_size - group.num_free_rows,
            max_num_sequences=group.max_batch_size,
            num_steps_in_flight=len(group.in_flight),
            num_steps=group.next_step_id - 1 - len(group.in_flight),
            silent_ms=max(0, now_ns - group.last_heard_ns) // _NS_PER_MS,
            num_blocks=blocks.num_blocks,
            tokens_per_block=group.tokens_per_block,
            num_held_blocks=blocks.num_held,
            num_cached_blocks=blocks.num_cached,
            num_faults=group.standing.num_faults,
            held_off_ms=max(0, group.standing.held_until_ns - now_ns) // _NS_PER_MS,
            last_fault=group.standing.reason,
            role=group.role,
            num_stored_blocks=len(group.stored),
            kind=kind_to_proto(group.kind),
            is_wrong=group.standing.is_wrong,
            is_outdated=group.is_outdated,
            is_asleep=group.is_asleep,
        )
        since_ns = group.awaited_since_ns
        if since_ns is not None:
            status.stalled_ms = max(0, now_ns - since_ns) // _NS_PER_MS
        if max_map_cells:
            status.block_map.CopyFrom(_block_map(blocks, max_map_cells))
            status.num_shared_blocks = sum(status.block_map.shared)
        return status


def detokenizer_infos(hub: FeedHub) -> list[loads_pb2.DetokenizerInfo]:
    return [
        loads_pb2.DetokenizerInfo(
            detokenizer_id=feed.detokenizer_id,
            num_attached=feed.num_attached,
            num_attached_total=feed.num_attached_total,
            tokenizer_fingerprint=feed.tokenizer_fingerprint,
        )
        for feed in hub.feeds
    ]


def _block_map(blocks: BlockManager, max_cells: int) -> status_pb2.BlockMap:
    size = max(1, -(-blocks.num_blocks // max_cells))
    held, shared, cached = blocks.occupancy(size)
    return status_pb2.BlockMap(blocks_per_cell=size, held=held, shared=shared, cached=cached)


def _counts(totals: Totals) -> status_pb2.CountsSinceStart:
    same = {name: getattr(totals, name) for name in _SAME_COUNTS}
    return status_pb2.CountsSinceStart(num_generated_tokens=totals.num_generation_tokens, **same)


def _duration_counts(histogram: Histogram) -> status_pb2.DurationCounts:
    return status_pb2.DurationCounts(bounds_ms=[bound * 1e3 for bound in LATENCY_BUCKETS_S], counts=histogram.counts)
