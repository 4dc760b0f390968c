"""The example in the documentation of the batch manager, translated from C++ to Python."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from midstream.executor import (
    BatchingType,
    BatchManager,
    CapacitySchedulerPolicy,
    GenerationRequest,
    InferenceRequest,
    KvCacheConfig,
    OptionalParams,
    PeftCacheConfig,
    SamplingParams,
    SchedulerConfig,
)
from midstream.extras import Tensor

PROMPT = [504, 2365, 282, 4649, 314]


def test_the_example(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GptManager batchManager(pathToTrtEngine, TrtGptModelType::InflightFusedBatching, maxBeamWidth, schedulerConfig,
    getInferenceRequestsCb, sendResponseCb, pollStopSignalCb, returnBatchManagerStatsCb);

    One request with all tensors, two beams.
    """
    monkeypatch.setenv("MIDSTREAM_MAX_BATCH_SIZE", "16")
    params = SamplingParams(
        max_tokens=3, beam_width=2, temperature=1.0, ignore_eos=True, log_probs=0, length_penalty=0.0
    )
    plain = SamplingParams(
        max_tokens=3, temperature=0.0, ignore_eos=True, return_context_logits=True, return_generation_logits=True
    )
    waiting = [
        InferenceRequest(2**64 - 1, GenerationRequest(PROMPT, params)),
        InferenceRequest(7, GenerationRequest(PROMPT, plain)),
    ]
    answers: dict[int, dict[str, Tensor]] = {}
    stats: list[str] = []
    done = threading.Event()

    def get_inference_requests(max_num_requests: int) -> list[InferenceRequest]:
        assert max_num_requests < 0
        return [waiting.pop() for _ in range(len(waiting))]

    def send_response(request_id: int, tensors: Sequence[Tensor], is_final: bool, error: str) -> None:
        assert (is_final, error) == (True, "")
        answers[request_id] = {tensor.name: tensor for tensor in tensors}
        if len(answers) == 2:
            done.set()

    optional = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=2048, free_gpu_memory_fraction=0.5),
        enable_trt_overlap=True,
        enable_chunked_context=True,
        peft_cache_manager_config=PeftCacheConfig(
            num_host_module_layer=0,
            num_device_module_layer=0,
            optimal_adapter_size=8,
            max_adapter_size=64,
            num_put_workers=1,
            num_ensure_workers=1,
            num_copy_streams=1,
            max_pages_per_block_host=24,
            max_pages_per_block_device=24,
            device_cache_percent=0.05,
            host_cache_size=1 << 30,
        ),
    )
    with BatchManager.create(
        str(folders / "model"),
        BatchingType.INFLIGHT_FUSED,
        4,
        SchedulerConfig(policy=CapacitySchedulerPolicy.MAX_UTILIZATION),
        get_inference_requests,
        send_response,
        set,
        stats.append,
        optional,
    ):
        assert done.wait(120)
    beams, alone = answers[2**64 - 1], answers[7]
    shapes = {name: tensor.shape for name, tensor in beams.items()}
    assert shapes == {
        "output_ids": (1, 2, 8),
        "sequence_length": (1, 1),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
        "log_probs": (1, 2, 3),
        "cum_log_probs": (1, 2),
    }
    assert np.frombuffer(beams["sequence_length"].data, np.int32).tolist() == [8]
    ids = np.frombuffer(beams["output_ids"].data, np.int32).reshape(2, 8)
    assert ids[:, :5].tolist() == [PROMPT, PROMPT]
    log_probs = np.frombuffer(beams["log_probs"].data, np.float32).reshape(2, 3)
    totals = np.frombuffer(beams["cum_log_probs"].data, np.float32)
    np.testing.assert_allclose(log_probs.sum(axis=1), totals, rtol=1e-5)
    assert totals[0] >= totals[1]
    assert alone["context_logits"].shape == (1, 5, 49152)
    assert alone["generation_logits"].shape == (1, 1, 3, 49152)
    logits = np.frombuffer(alone["generation_logits"].data, np.float32).reshape(3, 49152)
    output = np.frombuffer(alone["output_ids"].data, np.int32)[5:]
    assert logits.argmax(axis=1).tolist() == output.tolist()
    assert stats
