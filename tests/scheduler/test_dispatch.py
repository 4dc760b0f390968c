"""The scheduler's port for workers, with real sockets."""

from __future__ import annotations

import asyncio

import zmq

from midstream.rpc.health import LoopProgress
from protos import worker_pb2
from scheduler.core.events import WorkerBeat
from scheduler.edge.dispatch import Dispatcher
from scheduler.wire.worker_messages import WorkerEvent

HEARTBEAT = worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat(epoch=1)).SerializeToString()
# This is more than the number of messages that one callback reads.
MANY = 100
WAIT_MS = 20_000


async def test_no_message_waits_for_the_next_one() -> None:
    """Sending may consume the notification of an incoming message, so that the socket's descriptor does not become
    readable.
    """
    dispatcher = Dispatcher("127.0.0.1", 0, heartbeat_interval_ms=500, worker_timeout_ms=2000)
    loop = asyncio.get_running_loop()

    def answer(event: WorkerEvent) -> None:
        assert isinstance(event, WorkerBeat)
        for _ in range(3):
            loop.call_soon(dispatcher.send_heartbeat_ack, event.connection, 1)

    def chat() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{dispatcher.port}")
            for size in (1, 2, MANY, 3) * 10:
                for _ in range(size):
                    dealer.send(HEARTBEAT)
                for _ in range(3 * size):
                    assert dealer.poll(WAIT_MS)
                    dealer.recv()

    running = asyncio.create_task(dispatcher.run(answer, lambda: None, LoopProgress("worker messages", 5.0)))
    try:
        await asyncio.to_thread(chat)
        assert not dispatcher.num_unsent
    finally:
        running.cancel()
        await asyncio.wait((running,))
        dispatcher.close()
