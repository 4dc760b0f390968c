from __future__ import annotations

from protos import loads_pb2, status_pb2
from router.status.parts import REMEMBERED_S, Parts, cell_parts, router_part

Part = status_pb2.PartStatus


def worker(name: str, state: Part.State.ValueType = Part.SERVING) -> Part:
    return Part(kind="worker", name=name, state=state)


SCHEDULER = Part(kind="scheduler", name="s", state=Part.SERVING)


def states(parts: list[Part]) -> dict[str, str]:
    return {part.name: Part.State.Name(part.state) for part in parts}


def test_a_missing_component_is_lost_and_later_forgotten() -> None:
    parts = Parts()
    parts.update(0, [SCHEDULER, worker("w-0")])
    missing = parts.update(12, [SCHEDULER])[-1]
    assert (missing.state, missing.detail) == (Part.LOST, "last seen 12 s ago")
    assert states(parts.update(REMEMBERED_S + 1, [SCHEDULER])) == {"s": "SERVING"}


def test_a_component_that_returns_is_not_lost() -> None:
    parts = Parts()
    parts.update(0, [worker("w-0")])
    parts.update(1, [])
    assert states(parts.update(2, [worker("w-0")])) == {"w-0": "SERVING"}


def test_an_outage_lasts_until_the_component_is_seen_again() -> None:
    parts = Parts()
    parts.update(10, [SCHEDULER, worker("w-0"), worker("w-1")])
    parts.update(11, [SCHEDULER])
    parts.update(13, [SCHEDULER, worker("w-1")])
    (first, second) = parts.outages(13, unix_s=1013)
    assert (first.kind, first.name, first.from_unix_ms, first.until_unix_ms) == ("worker", "w-0", 1_010_000, 0)
    assert not first.HasField("until_unix_ms")
    assert (second.name, second.from_unix_ms, second.until_unix_ms) == ("w-1", 1_010_000, 1_013_000)
    # A component that does not return is forgotten after two minutes; the outage of a component that has returned is
    # forgotten after five.
    for now, names in ((100, ["w-0", "w-1"]), (131, ["w-1"]), (312, ["w-1"]), (314, [])):
        parts.update(now, [SCHEDULER, worker("w-1")])
        assert [outage.name for outage in parts.outages(now, unix_s=now)] == names


def test_a_component_that_drained_is_not_lost() -> None:
    parts = Parts()
    parts.update(0, [worker("w-0", Part.DRAINING)])
    assert parts.update(1, []) == []


def test_without_a_scheduler_workers_are_unknown() -> None:
    parts = Parts()
    parts.update(0, [SCHEDULER, worker("w-0")])
    assert states(parts.update(1, [], ["s"])) == {"s": "LOST", "w-0": "UNKNOWN"}


def test_a_scheduler_that_never_answered_may_be_a_standby() -> None:
    parts = Parts()
    parts.update(0, [SCHEDULER, worker("w-0")], ["other"])
    assert states(parts.update(1, [SCHEDULER], ["other"])) == {"s": "SERVING", "other": "UNKNOWN", "w-0": "LOST"}


def test_parts_are_in_order_of_kind_and_number() -> None:
    parts = Parts().update(0, [worker("w-10"), worker("w-2"), SCHEDULER, Part(kind="router", name="r")])
    assert [part.name for part in parts] == ["r", "s", "w-2", "w-10"]


def test_a_component_reports_its_problem() -> None:
    groups = [
        status_pb2.GroupStatus(group_id="fine", silent_ms=600, device="cpu", num_sequences=1, max_num_sequences=4),
        status_pb2.GroupStatus(group_id="first", role="prefill", device="cpu", max_num_sequences=4),
        status_pb2.GroupStatus(group_id="silent", silent_ms=1500),
        status_pb2.GroupStatus(group_id="stuck", stalled_ms=12_000),
    ]
    detokenizer = loads_pb2.DetokenizerInfo(detokenizer_id="d", num_attached=1)
    cell = status_pb2.CellStatus(cell="s", groups=groups, detokenizers=[detokenizer])
    found = {part.name: (part.state, part.detail) for part in cell_parts(cell)}
    assert found == {
        "s": (Part.SERVING, "4 workers, 1 detokenizer"),
        "fine": (Part.SERVING, "cpu, 1 of 4 sequences"),
        "first": (Part.SERVING, "prefill, cpu, 0 of 4 sequences"),
        "silent": (Part.DEGRADED, "silent for 1.5 s"),
        "stuck": (Part.DEGRADED, "no step ended for 12 s"),
        "d": (Part.SERVING, "1 stream"),
    }
    (alone,) = cell_parts(status_pb2.CellStatus(cell="s"))
    assert (alone.state, alone.detail) == (Part.DEGRADED, "has no worker")


def test_a_router_without_detokenizers_is_degraded_and_a_draining_one_drains() -> None:
    router = status_pb2.RouterStatus(router_id="r", num_open_streams=3, num_detokenizers=2, num_live_detokenizers=1)
    assert router_part(router).state == Part.DEGRADED
    assert router_part(router).detail == "3 streams, reaches 1 of 2 detokenizers"
    router.num_live_detokenizers = 2
    assert router_part(router).state == Part.SERVING
    router.problems.append("event loop")
    assert router_part(router).state == Part.DEGRADED
    router.is_draining = True
    assert router_part(router).state == Part.DRAINING


def test_a_worker_that_changes_its_weights_is_degraded() -> None:
    group = status_pb2.GroupStatus(group_id="w", is_outdated=True)
    (part,) = [part for part in cell_parts(status_pb2.CellStatus(groups=[group])) if part.kind == "worker"]
    assert (part.state, part.detail) == (Part.DEGRADED, "changes its weights")


def test_a_worker_that_sleeps_has_no_fault() -> None:
    group = status_pb2.GroupStatus(group_id="w", is_asleep=True)
    (part,) = [part for part in cell_parts(status_pb2.CellStatus(groups=[group])) if part.kind == "worker"]
    assert (part.state, part.detail) == (Part.SERVING, "sleeps")


def test_a_worker_in_backoff_reports_why() -> None:
    group = status_pb2.GroupStatus(group_id="w", held_off_ms=8_000, last_fault="wrong result")
    (part,) = [part for part in cell_parts(status_pb2.CellStatus(groups=[group])) if part.kind == "worker"]
    assert (part.state, part.detail) == (Part.DEGRADED, "held off for 8 s: wrong result")
