"""The status of each part (a process), including recently lost ones. No clock is read; the time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from midstream.kind_names import kind_name
from midstream.model.folder import ModelFolder
from protos import status_pb2

PartStatus = status_pb2.PartStatus

REMEMBERED_S = 120.0
_OUTAGES_REMEMBERED_S = 300.0
_MAX_OUTAGES = 100
_ORDER = ("router", "scheduler", "worker", "detokenizer")
# A worker reports every half second, and is dropped after two seconds of silence.
_SILENT_MS = 1_200
_STALLED_MS = 10_000


@dataclass(slots=True)
class _Outage:
    kind: str
    name: str
    began_s: float
    ended_s: float | None = None


class Parts:
    """All recently seen parts."""

    def __init__(self) -> None:
        self._outages: list[_Outage] = []  # oldest first
        # (kind, name) -> (time when last seen, status at that time).
        self._seen: dict[tuple[str, str], tuple[float, PartStatus]] = {}

    def update(
        self, now_s: float, present: Iterable[PartStatus], silent_schedulers: Iterable[str] = ()
    ) -> list[PartStatus]:
        """Update with the parts that are present now; return these and the missing ones, ordered by kind and name.

        Args:
            now_s: Time of any monotonic clock.
            present: One status per part; if a part is duplicated, the last status wins.
            silent_schedulers: Names of schedulers that are not responding; parts connected to them have an unknown
                status.
        """
        here = {(part.kind, part.name): part for part in present}
        silent = {("scheduler", name) for name in silent_schedulers} - here.keys()
        self._forget(now_s, here)
        is_complete = silent.isdisjoint(self._seen)
        parts = list(here.values())
        # The scheduler may be a standby, which does not respond.
        parts += [_part(key, PartStatus.UNKNOWN, "has not responded yet") for key in silent - self._seen.keys()]
        for key, (seen_s, part) in list(self._seen.items()):
            if key in here:
                continue
            if is_complete or part.kind == "scheduler":
                if self._outage(key) is None:
                    self._outages.append(_Outage(*key, began_s=seen_s))
                parts.append(_part(key, PartStatus.LOST, f"last seen {now_s - seen_s:.0f} s ago"))
            else:
                parts.append(_part(key, PartStatus.UNKNOWN, "its scheduler does not respond"))
        for key, part in here.items():
            self._seen[key] = now_s, part
            outage = self._outage(key)
            if outage is not None:
                outage.ended_s = now_s
        return sorted(parts, key=lambda part: (_ORDER.index(part.kind), natural(part.name)))

    def outages(self, now_s: float, unix_s: float) -> Iterator[status_pb2.Outage]:
        """Yield the recent outages, oldest first; `unix_s` is the wall time at `now_s`."""
        self._outages = [item for item in self._outages if self._is_recent(item, now_s)][-_MAX_OUTAGES:]
        for outage in self._outages:
            shown = status_pb2.Outage(kind=outage.kind, name=outage.name)
            shown.from_unix_ms = round((unix_s - now_s + outage.began_s) * 1e3)
            if outage.ended_s is not None:
                shown.until_unix_ms = round((unix_s - now_s + outage.ended_s) * 1e3)
            yield shown

    def _is_recent(self, outage: _Outage, now_s: float) -> bool:
        if outage.ended_s is not None:
            return now_s - outage.ended_s <= _OUTAGES_REMEMBERED_S
        return (outage.kind, outage.name) in self._seen

    def _outage(self, key: tuple[str, str]) -> _Outage | None:
        """Return the outage of a part that is lost now."""
        return next((item for item in self._outages if (item.kind, item.name) == key and item.ended_s is None), None)

    def _forget(self, now_s: float, here: Mapping[tuple[str, str], PartStatus]) -> None:
        for key, (seen_s, part) in list(self._seen.items()):
            # Forget a component that announced its exit instead of reporting it as missing.
            if now_s - seen_s > REMEMBERED_S or (part.state == PartStatus.DRAINING and key not in here):
                del self._seen[key]


def router_part(router: status_pb2.RouterStatus) -> PartStatus:
    detail = _count(router.num_open_streams, "stream")
    state = PartStatus.SERVING
    if router.is_draining:
        state = PartStatus.DRAINING
    elif router.problems:
        state, detail = PartStatus.DEGRADED, f"stalled: {', '.join(router.problems)}"
    elif router.num_live_detokenizers < router.num_detokenizers or not router.num_detokenizers:
        state = PartStatus.DEGRADED
        detail += f", reaches {router.num_live_detokenizers} of {router.num_detokenizers} detokenizers"
    return PartStatus(kind="router", name=router.router_id, state=state, detail=detail)


def cell_parts(cell: status_pb2.CellStatus, model: ModelFolder | None = None) -> Iterator[PartStatus]:
    """Return the status of a scheduler and of the parts connected to it; `model` is its model if there are several."""
    scheduler = PartStatus(kind="scheduler", name=cell.cell, state=PartStatus.SERVING)
    scheduler.detail = f"{_count(len(cell.groups), 'worker')}, {_count(len(cell.detokenizers), 'detokenizer')}"
    if cell.is_draining:
        scheduler.state = PartStatus.DRAINING
    elif not cell.groups:
        scheduler.state, scheduler.detail = PartStatus.DEGRADED, "has no worker"
    if model is not None:
        scheduler.detail = f"{model.name}, {scheduler.detail}"
    yield scheduler
    kinds = {kind_name(group.kind) for group in cell.groups}
    for group in cell.groups:
        part = _worker_part(group)
        if len(kinds) > 1:
            part.detail += f", kind {kind_name(group.kind)}"
        yield part
    tokenizers = {item.tokenizer_fingerprint for item in cell.detokenizers}
    tokenizers |= {router.tokenizer_fingerprint for router in cell.routers}
    for item in cell.detokenizers:
        detail = _count(item.num_attached, "stream") + _identity("tokenizer", item.tokenizer_fingerprint, tokenizers)
        yield PartStatus(kind="detokenizer", name=item.detokenizer_id, state=PartStatus.SERVING, detail=detail)
    templates = {router.template_fingerprint for router in cell.routers}
    for router in cell.routers:
        part = router_part(router)
        part.detail += _identity("tokenizer", router.tokenizer_fingerprint, tokenizers)
        part.detail += _identity("chat template", router.template_fingerprint, templates)
        yield part


def _identity(noun: str, fingerprint: str, all_of_them: set[str]) -> str:
    """Return which tokenizer or template a part has, if parts of the cell differ in it."""
    return f", {noun} {fingerprint[:8]}" if len(all_of_them) > 1 else ""


def _part(key: tuple[str, str], state: PartStatus.State.ValueType, detail: str) -> PartStatus:
    kind, name = key
    return PartStatus(kind=kind, name=name, state=state, detail=detail)


def _worker_part(group: status_pb2.GroupStatus) -> PartStatus:
    part = PartStatus(kind="worker", name=group.group_id, state=PartStatus.SERVING)
    role = f"{group.role}, " if group.role in ("prefill", "decode") else ""
    part.detail = f"{role}{group.device}, {group.num_sequences} of {group.max_num_sequences} sequences"
    if group.is_wrong:
        part.state = PartStatus.DEGRADED
        part.detail = f"held off until its process restarts: {group.last_fault}"
    elif group.held_off_ms:
        part.state = PartStatus.DEGRADED
        part.detail = f"held off for {group.held_off_ms / 1e3:.0f} s: {group.last_fault}"
    elif group.is_outdated:
        part.state, part.detail = PartStatus.DEGRADED, "changes its weights"
    elif group.is_asleep:
        part.detail = "sleeps"
    elif group.silent_ms > _SILENT_MS:
        part.state, part.detail = PartStatus.DEGRADED, f"silent for {group.silent_ms / 1e3:.1f} s"
    elif group.stalled_ms > _STALLED_MS:
        part.state, part.detail = PartStatus.DEGRADED, f"no step ended for {group.stalled_ms / 1e3:.0f} s"
    return part


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def natural(name: str) -> tuple[str, int]:
    """Return a sort key that orders worker-2 before worker-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)
