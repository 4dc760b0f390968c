"""Copies between host and device that a slow device performs late, concurrently with the steps that use them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu_worker.batch.staging import Copy, PinnedBuffers, Readback
from gpu_worker.cuda_graphs import GraphDecoder
from tests.gpu_worker.lazy_stream import LazyStream
from tests.gpu_worker.test_cuda_graphs import CPU, FakeDecoder, decode_inputs


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LazyStream:
    return LazyStream(monkeypatch)


def test_a_buffer_is_filled_again_after_its_copy_is_done(stream: LazyStream) -> None:
    pinned, seen = PinnedBuffers(CPU, 4), list[list[int]]()
    for step in range(5):
        (sent,) = pinned.send_arrays([np.full(4, step, dtype=np.int32)])
        stream.launch(lambda sent=sent: seen.append(sent.tolist()))  # type: ignore[misc]
    assert stream.num_done < stream.num_launched
    stream.run(stream.num_launched)
    assert seen == [[step] * 4 for step in range(5)]
    # At most two copies are in flight at any time: each copy from the third on waits for the copy before the previous
    # one.
    assert stream.num_waits == 3


@pytest.mark.parametrize("is_slow", [True, False])
def test_tokens_are_read_when_they_have_arrived(stream: LazyStream, is_slow: bool) -> None:
    readback, tokens, copies = Readback(CPU, 2), torch.zeros(2, dtype=torch.int32), list[Copy]()
    read = []
    for step in range(4):
        # Each step overwrites the device tensor that the previous step wrote.
        stream.launch(lambda step=step: tokens.fill_(step))  # type: ignore[misc]
        copies.append(readback.start(tokens))
        if not is_slow:
            stream.run(stream.num_launched)
        assert copies[-1].is_done != is_slow
        if len(copies) > 2:
            read.append(copies.pop(0).wait().tolist())
    read += [copy.wait().tolist() for copy in copies]
    assert read == [[step] * 2 for step in range(4)]


@torch.inference_mode()
def test_steps_launched_ahead_have_their_own_inputs(stream: LazyStream) -> None:
    decoder = FakeDecoder()
    graphs = GraphDecoder(
        decoder, CPU, max_batch_size=4, max_num_tokens=16, max_blocks=3, make_recorder=lambda: stream.record
    )
    graphs.capture()
    found, expected = list[list[list[float]]](), []
    for step in range(6):
        inputs = decode_inputs(1 + step % 4)
        inputs = replace(inputs, token_ids=inputs.token_ids + step, block_tables=inputs.block_tables + step)
        logits = graphs.forward(inputs)
        stream.launch(lambda logits=logits: found.append(logits.tolist()))  # type: ignore[misc]
        rows = range(1, 2 + step % 4)
        expected.append([[70.0 * row + 10 * step + 1, 2.0 * (row + step)] for row in rows])
    assert len(found) < 5
    stream.run(stream.num_launched)
    assert found == expected
