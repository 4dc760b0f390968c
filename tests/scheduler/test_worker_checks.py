"""The scheduler's edge rejects messages that no correct worker sends; each case names the invalid field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import generation_pb2, worker_pb2
from scheduler.wire.worker_checks import WrongMessageError
from scheduler.wire.worker_messages import decode_worker_message

FLOAT32 = generation_pb2.Tensor.DTYPE_FLOAT32


def result(**fields: Any) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(step_result=worker_pb2.StepResult(epoch=1, step_id=1, **fields))


def row(**fields: Any) -> worker_pb2.WorkerMessage:
    return result(token_ids=[1], outputs=[worker_pb2.RowOutputs(row=0, **fields)])


def tensor(**fields: Any) -> worker_pb2.WorkerMessage:
    values: dict[str, Any] = {"name": "t", "dtype": FLOAT32, "shape": [1, 2], "data": bytes(8)} | fields
    return row(tensors=[generation_pb2.Tensor(**values)])


def log_probs(**fields: Any) -> worker_pb2.WorkerMessage:
    values: dict[str, Any] = {
        "token_log_probs": [-1.0],
        "top_k": 2,
        "top_token_ids": [1, 2],
        "top_log_probs": [-1.0, -math.inf],
        "token_ranks": [1],
    } | fields
    return row(log_probs=generation_pb2.LogProbs(**values))


def error(code: int = 13, message: str = "no") -> worker_pb2.WorkerMessage:
    failed = worker_pb2.RowError(row=0, error=generation_pb2.ErrorInfo(code=code, message=message))
    return result(token_ids=[0], errors=[failed])


def registration(**fields: Any) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(register=worker_pb2.Register(**({"group_id": "g"} | fields)))


def decode(message: worker_pb2.WorkerMessage) -> Any:
    return decode_worker_message(message.SerializeToString(), b"w", 0)


@pytest.mark.parametrize("message", [result(token_ids=[1, 2]), tensor(), log_probs(), error(), registration()])
def test_valid_messages_are_accepted(message: worker_pb2.WorkerMessage) -> None:
    decode(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (result(token_ids=[1, 2], num_tokens=[1, 2]), "num_tokens"),
        (result(token_ids=[1, 2], num_drafts=[1]), "num_drafts"),
        (result(token_ids=[1, 2], num_tokens=[2], num_drafts=[1, 1]), "num_drafts"),
        (result(token_ids=[1], candidate_log_probs=[math.nan]), "candidate_log_probs"),
        (result(token_ids=[1], missing_blocks=[3, 3]), "missing_blocks"),
        (tensor(dtype=77), "tensors.dtype"),
        (tensor(dtype=0), "tensors.dtype"),
        (tensor(shape=[]), "tensors.shape"),
        (tensor(shape=[1 << 63, 1 << 63]), "tensors.data"),
        (tensor(shape=[3]), "tensors.data"),
        (tensor(data_offset=1 << 63), "tensors.data_offset"),
        (tensor(name="t" * 1000), "tensors.name"),
        (log_probs(token_log_probs=[-1.0, -2.0]), "log_probs"),
        (log_probs(token_log_probs=[]), "log_probs"),
        (log_probs(top_k=3), "log_probs"),
        (log_probs(token_ranks=[]), "log_probs"),
        (log_probs(top_log_probs=[math.nan, 0]), "log_probs"),
        (log_probs(token_log_probs=[math.inf]), "log_probs"),
        (error(code=0), "error.code"),
        (error(code=99), "error.code"),
        (error(message="x" * 100_000), "error.message"),
        (registration(group_id="g\n"), "group_id"),
        (registration(device="x" * 300), "device"),
        (registration(features=["f"] * 1000), "features"),
        (registration(world_size=(1 << 32) - 1), "world_size"),
        (registration(max_loras=(1 << 32) - 1), "max_loras"),
        (registration(num_micro_batches=(1 << 32) - 1), "num_micro_batches"),
        (registration(block_bytes=(1 << 64) - 1), "block_bytes"),
        (registration(price_per_hour=-1), "price_per_hour"),
        (registration(price_per_hour=math.nan), "price_per_hour"),
        (registration(price_per_hour=math.inf), "price_per_hour"),
        (registration(lora_cache_bytes=(1 << 64) - 1), "lora_cache_bytes"),
        (
            worker_pb2.WorkerMessage(
                heartbeat=worker_pb2.Heartbeat(memory=worker_pb2.MemoryUsage(gpu_bytes=(1 << 64) - 1))
            ),
            "memory",
        ),
        (worker_pb2.WorkerMessage(leave=worker_pb2.Leave(reason="x" * 100_000)), "reason"),
        (worker_pb2.WorkerMessage(lora_result=worker_pb2.LoraResult(num_bytes=(1 << 64) - 1)), "num_bytes"),
        (worker_pb2.WorkerMessage(lora_result=worker_pb2.LoraResult(rank=(1 << 32) - 1)), "rank"),
        (worker_pb2.WorkerMessage(lora_result=worker_pb2.LoraResult(fingerprint="x" * 300)), "fingerprint"),
        (worker_pb2.WorkerMessage(lora_result=worker_pb2.LoraResult(num_virtual_tokens=(1 << 32) - 1)), "num_virtual"),
    ],
)
def test_invalid_messages_are_rejected_by_field(message: worker_pb2.WorkerMessage, field: str) -> None:
    with pytest.raises(WrongMessageError, match=field):
        decode(message)
