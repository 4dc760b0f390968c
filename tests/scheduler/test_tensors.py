"""Tensors that workers report use limited memory, are delivered with their tokens, and are recomputed for the next
scheduler.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midstream.clock import SteadyClock
from protos import generation_pb2, scheduler_pb2, worker_pb2
from scheduler.core.effects import EpochEnded, GroupJoined, Refused
from scheduler.core.events import AbortRequested, DrainStarted, Recovered, StepDone, WorkerFailed
from scheduler.core.failure import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, Failure
from scheduler.core.request import (
    ExtraOutput,
    Finish,
    FinishReason,
    Request,
    RequestState,
    RequestTimes,
    SequenceEnd,
)
from scheduler.core.request_spec import RequestSpec
from scheduler.edge.dispatch import Dispatcher
from scheduler.edge.feed import DetokenizerFeed, FeedHub
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.records import replay
from scheduler.journal.writer import RowWriter
from scheduler.wire.requests import ModelLimits, spec_from_proto
from tests.scheduler.harness import LIMITS, Harness

MIB = 1 << 20


def refusals(effects: list[Any]) -> list[int]:
    return [effect.failure.code for effect in effects if isinstance(effect, Refused)]


def test_memory_for_tensors_is_bounded_by_dropping_ended_requests() -> None:
    harness = Harness(max_tensor_bytes=100)
    harness.add_group()
    assert refusals(harness.submit("too-large", 3, 2, tensor_bytes=101)) == [INVALID_ARGUMENT]
    assert refusals(harness.submit("a", 3, 2, tensor_bytes=60)) == []
    assert refusals(harness.submit("b", 3, 2, tensor_bytes=60)) == [RESOURCE_EXHAUSTED]
    assert refusals(harness.submit("plain", 3, 2)) == []
    harness.run()
    assert refusals(harness.submit("b", 3, 2, tensor_bytes=60)) == []
    known = harness.core.lifecycle.requests
    assert known.keys() == {"b", "plain"}


def test_embeddings_and_attachments_are_bounded_like_tensors() -> None:
    request = generation_pb2.GenerateRequest(request_id="a", attachment=b"12345")
    request.token_ids.values.append(1)
    request.prompt_tuning.table.data = bytes(40)
    request.prompt_tuning.table.shape[:] = 5, 8
    spec = spec_from_proto(request, LIMITS, 0)
    assert (spec.attached_bytes, spec.tensor_bytes) == (45, 0)
    harness = Harness(max_tensor_bytes=100)
    harness.add_group()
    assert refusals(harness.submit("a", 3, 2, attached_bytes=60)) == []
    assert refusals(harness.submit("b", 3, 2, attached_bytes=60)) == [RESOURCE_EXHAUSTED]
    harness.run()
    assert refusals(harness.submit("b", 3, 2, attached_bytes=60)) == []
    assert harness.core.lifecycle.requests.keys() == {"b"}
    restored = replace(harness.core.lifecycle.requests["b"].spec, request_id="c", attached_bytes=40)
    outputs = (array("I", [1, 2]),)
    ends = ((0, SequenceEnd(FinishReason.LENGTH, 2)),)
    harness.ended["c"] = FinishReason.LENGTH
    harness.handle(Recovered(harness.now_ns, restored, outputs, ends, finish=Finish(RequestTimes())))
    assert refusals(harness.submit("d", 3, 2, attached_bytes=1)) == []
    assert harness.core.lifecycle.requests.keys() == {"b", "d"}


def fail(harness: Harness, request_id: str) -> None:
    """Run the two steps in flight; in the first one, the worker is not ready for the request."""
    row = harness.core.lifecycle.requests[request_id].sequences[0].row
    assert row is not None
    event = harness.groups["g"].run(harness.now_ns)
    harness.handle(replace(event, failures=((row, Failure(UNAVAILABLE, "not yet")),)))
    harness.step()


def test_a_worker_that_is_not_ready_for_a_request_tries_again_after_growing_delays() -> None:
    harness = Harness()
    harness.add_group()
    requests = harness.core.lifecycle.requests
    harness.submit("a", 3, 3)
    harness.submit("b", 3, 3)
    harness.turn()
    fail(harness, "a")
    harness.step()
    assert len(requests["b"].sequences[0].output) == 3  # `a` does not delay other requests
    harness.advance(20)
    for delay_ms in (40, 80):
        fail(harness, "a")
        assert harness.advance(delay_ms - 1) == []
        assert harness.advance(1)
    harness.step()
    assert len(requests["a"].sequences[0].output) == 1
    fail(harness, "a")
    assert harness.advance(20)  # after a token, the delay is short again
    harness.run()
    alone = Harness()
    alone.add_group()
    alone.submit("a", 3, 3)
    alone.run()
    assert requests["a"].sequences[0].output == alone.core.lifecycle.requests["a"].sequences[0].output
    harness.check_is_empty()


@pytest.mark.parametrize("end", ["abort", "deadline", "drain", "no worker"])
def test_a_request_ends_while_it_waits_for_its_worker_to_be_ready(end: str) -> None:
    harness = Harness()
    harness.add_group()
    deadline_ns = harness.now_ns + 10_000_000 if end == "deadline" else None
    harness.submit("a", 3, 3, deadline_ns=deadline_ns)
    harness.turn()
    fail(harness, "a")
    request = harness.core.lifecycle.requests["a"]
    assert request in harness.core.queue
    if end == "abort":
        harness.handle(AbortRequested(harness.now_ns, "a"))
    elif end == "deadline":
        harness.advance(10)
    elif end == "drain":
        harness.handle(DrainStarted(harness.now_ns))
        assert harness.advance(20)  # accepted requests still run
        harness.run()
    else:
        harness.cut("g")
        harness.advance(harness.config.no_worker_timeout_ns // 1_000_000)
    assert request.state is RequestState.FINISHED
    assert harness.advance(20) == []
    assert len(harness.core.queue) == 0


def test_a_journal_keeps_only_requested_data(tmp_path: Path) -> None:
    store = LogStore(LogFolder(tmp_path / "journal"))
    store.take_over(least_epoch=1)
    limits = ModelLimits(4096, (999,), vocab_size=1000, hidden_size=8)
    harness = Harness()
    harness.add_group()
    message = generation_pb2.GenerateRequest(request_id="a", max_tokens=5)
    message.token_ids.values.extend([1, 2, 3])
    message.output.return_generation_logits = True
    spec = spec_from_proto(message, limits, 0)
    assert spec.tensor_bytes == 5 * 1000 * 4
    writer = RowWriter({}, "print", SteadyClock())
    from scheduler.core.events import Submitted
    from scheduler.journal import is_entry

    harness.handle(Submitted(harness.now_ns, spec))
    harness.run()
    entries: list[Any] = [effect for effect in harness.effects if is_entry(effect)]
    store.write(writer.transaction(entries))
    store.take_over(least_epoch=1)
    (stored,) = replay(store.read(), limits, "print", SteadyClock()).requests.values()
    assert [list(tokens) for tokens in stored.outputs] == [[]]
    assert stored.finish is None
    store.close()


def feed_of(request: Request) -> DetokenizerFeed:
    hub = FeedHub(1, lambda _: None, lambda _: None, SteadyClock())
    hub.restore(request)
    feed = hub.connect("d", lambda: None)
    feed.attach(1, request.request_id)
    return feed


def output(offset: int, num_bytes: int) -> ExtraOutput:
    tensor = generation_pb2.Tensor(name="t", shape=[1, num_bytes], data=bytes(num_bytes))
    return ExtraOutput(offset, worker_pb2.RowOutputs(tensors=[tensor]).SerializeToString())


def test_no_message_is_too_large_and_no_token_comes_before_its_outputs() -> None:
    request = Request(RequestSpec(request_id="r", prompt=array("I", [1]), max_tokens=9), 1)
    sequence = request.sequences[0]
    sequence.output = array("I", range(9))
    sequence.outputs = [output(0, MIB) for _ in range(20)] + [output(offset, MIB) for offset in range(1, 9)]
    feed, seen, num_tokens = feed_of(request), 0, 0
    batches: list[scheduler_pb2.FeedBatch] = []
    while (batch := feed.collect()) is not None:
        assert batch.ByteSize() < 10 * MIB
        seen += len(batch.outputs)
        num_tokens += len(batch.token_ids)
        # The first token comes with the 20 pieces of the prompt's tensors, and every other token comes with one more
        # piece.
        assert num_tokens <= max(seen - 19, 0)
        batches.append(batch)
    assert (seen, num_tokens) == (28, 9)
    assert len(batches) == 4


@pytest.fixture
def dispatcher() -> Any:
    made = Dispatcher("127.0.0.1", 0, heartbeat_interval_ms=500, worker_timeout_ms=2000)
    yield made
    made.close()


async def test_tensors_that_come_before_their_result_become_a_part_of_it(dispatcher: Dispatcher) -> None:
    def message(**fields: Any) -> list[bytes]:
        return [b"w", worker_pb2.WorkerMessage(**fields).SerializeToString()]

    def outputs(step_id: int, row: int) -> worker_pb2.StepOutputs:
        return worker_pb2.StepOutputs(epoch=1, step_id=step_id, outputs=[worker_pb2.RowOutputs(row=row)])

    dispatcher.send_joined(GroupJoined(b"w", "w", 1))
    assert dispatcher._decode(message(step_outputs=outputs(1, 9))) is None
    for row in (3, 4):
        assert dispatcher._decode(message(step_outputs=outputs(2, row))) is None
    result = worker_pb2.StepResult(epoch=1, step_id=2, outputs=[worker_pb2.RowOutputs(row=5)])
    event = dispatcher._decode(message(step_result=result))
    assert isinstance(event, StepDone)
    assert [row for row, _ in event.outputs] == [3, 4, 5]
    event = dispatcher._decode(message(step_result=worker_pb2.StepResult(epoch=1, step_id=3)))
    assert isinstance(event, StepDone)
    assert event.outputs == ()


async def test_an_unexpected_error_in_a_message_is_blamed_on_its_worker(dispatcher: Dispatcher) -> None:
    def fail(_: object) -> None:
        raise KeyError("a defect")

    dispatcher.on_adapter_result = fail
    dispatcher.send_joined(GroupJoined(b"w", "w", 1))
    result = worker_pb2.WorkerMessage(lora_result=worker_pb2.LoraResult(epoch=1, name="a"))
    failed = dispatcher._decode([b"w", result.SerializeToString()])
    assert isinstance(failed, WorkerFailed)
    assert failed.connection == b"w"


async def test_tensors_without_a_request_are_dropped_and_a_workers_are_bounded(dispatcher: Dispatcher) -> None:
    def outputs(epoch: int, num_bytes: int) -> bytes:
        tensor = generation_pb2.Tensor(
            name="t", dtype=generation_pb2.Tensor.DTYPE_FLOAT32, shape=[1, num_bytes // 4], data=bytes(num_bytes)
        )
        rows = [worker_pb2.RowOutputs(row=1, tensors=[tensor])]
        message = worker_pb2.StepOutputs(epoch=epoch, step_id=1, outputs=rows)
        return worker_pb2.WorkerMessage(step_outputs=message).SerializeToString()

    for peer in range(20):
        assert dispatcher._decode([b"stranger %d" % peer, outputs(0, MIB)]) is None
    dispatcher.send_joined(GroupJoined(b"w", "w", 1))
    assert dispatcher._decode([b"w", outputs(2, MIB)]) is None
    assert dispatcher._outputs == {}
    dispatcher._max_held_bytes = 3 * MIB
    for _ in range(2):
        assert dispatcher._decode([b"w", outputs(1, MIB)]) is None
    failed = dispatcher._decode([b"w", outputs(1, MIB)])
    assert isinstance(failed, WorkerFailed)
    assert "step_outputs" in failed.reason
    assert dispatcher._outputs == {}


async def test_tensors_are_dropped_with_the_epoch_or_the_connection_of_their_worker(dispatcher: Dispatcher) -> None:
    outputs = worker_pb2.StepOutputs(epoch=1, step_id=1, outputs=[worker_pb2.RowOutputs(row=1)])
    message = worker_pb2.WorkerMessage(step_outputs=outputs).SerializeToString()
    dispatcher.send_joined(GroupJoined(b"w", "w", 1))
    assert dispatcher._decode([b"w", message]) is None
    dispatcher.send_epoch_ended(EpochEnded(b"w", 1))
    assert dispatcher._outputs == {}
    dispatcher.send_joined(GroupJoined(b"w", "w", 1))
    assert dispatcher._decode([b"w", message]) is None
    assert list(dispatcher._outputs) == [b"w"]
    assert dispatcher._lost_links() == [b"w"]  # there has never been a real connection
    assert dispatcher._outputs == {}
