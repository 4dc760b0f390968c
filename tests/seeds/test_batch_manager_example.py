"""The example in the documentation of the batch manager, translated from C++ to Python."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from midstream.executor import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    NamedTensor,
    PeftCacheConfig,
    SchedulerConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

PROMPT = [504, 2365, 282, 4649, 314]


def test_the_example(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GptManager batchManager(pathToTrtEngine, TrtGptModelType::InflightFusedBatching, maxBeamWidth, schedulerConfig,
    getInferenceRequestsCb, sendResponseCb, pollStopSignalCb, returnBatchManagerStatsCb);

    One request with all tensors, two beams.
    """
    monkeypatch.setenv("MIDSTREAM_MAX_BATCH_SIZE", "16")
    beams = InferenceRequest(2**64 - 1)
    beams.input_ids, beams.max_new_tokens = np.array([PROMPT], np.int32), np.array([[3]], np.int32)
    beams.beam_width, beams.return_log_probs = np.array([[2]], np.int32), np.array([[True]])
    plain = InferenceRequest(7)
    plain.input_ids, plain.max_new_tokens = torch.tensor([PROMPT]), torch.tensor([[3]])
    plain.return_context_logits = plain.return_generation_logits = torch.tensor([[True]])
    waiting = [beams, plain]
    answers: dict[int, dict[str, torch.Tensor]] = {}
    stats: list[str] = []
    done = threading.Event()

    def get_inference_requests(max_num_requests: int) -> list[InferenceRequest]:
        assert max_num_requests < 0
        return [waiting.pop() for _ in range(len(waiting))]

    def send_response(request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str) -> None:
        assert (is_final, error) == (True, "")
        answers[request_id] = {item.name: item.tensor for item in tensors}
        if len(answers) == 2:
            done.set()

    optional = TrtGptModelOptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=2048, free_gpu_memory_fraction=0.5),
        enable_trt_overlap=True,
        enable_chunked_context=True,
        peft_cache_manager_config=PeftCacheConfig(0, 0, 8, 64, 1, 1, 1, 24, 24, 0.05, 1 << 30),
    )
    with GptManager(
        folders / "model",
        TrtGptModelType.InflightFusedBatching,
        4,
        SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        get_inference_requests,
        send_response,
        set,
        stats.append,
        optional,
    ):
        assert done.wait(120)
    found, alone = answers[2**64 - 1], answers[7]
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {
        "output_ids": (1, 2, 8),
        "sequence_length": (1, 1),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
        "output_log_probs": (1, 2, 3),
        "cum_log_probs": (1, 2),
    }
    assert found["sequence_length"].tolist() == [[8]]
    assert found["output_ids"][0, :, :5].tolist() == [PROMPT, PROMPT]
    totals = found["cum_log_probs"][0]
    torch.testing.assert_close(found["output_log_probs"][0].sum(dim=1), totals)
    assert totals[0] >= totals[1]
    assert alone["context_logits"].shape == (1, 5, 49152)
    assert alone["generation_logits"].shape == (1, 1, 3, 49152)
    assert alone["generation_logits"][0, 0].argmax(dim=1).tolist() == alone["output_ids"][0, 0, 5:].tolist()
    assert stats
