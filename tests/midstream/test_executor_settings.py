"""The executor's settings, statistics and folders, without a service."""

from __future__ import annotations

import json
import queue
import struct
from pathlib import Path

import pytest

from midstream.chunk import Chunk, FinishReason
from midstream.config import KNOWN_SETTINGS
from midstream.errors import ConfigError, InvalidArgumentError, UnsupportedError
from midstream.executor import (
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    GenerationRequest,
    GenerationResult,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    MultimodalParams,
    OutputConfig,
    PeftCacheConfig,
    Request,
    RequestState,
    SamplingConfig,
    SamplingParams,
    SchedulerConfig,
)
from midstream.executor.engine_folder import one_tokenizer, with_tokenizer
from midstream.executor.output import stack_tensors
from midstream.executor.response_tensors import RequestLengths, response_tensors
from midstream.executor.stats import IterationStats, sum_up
from midstream.extras import Extras, LogProbs, Tensor


def test_every_section_is_a_setting_of_a_service() -> None:
    config = ExecutorConfig(
        max_beam_width=20,
        max_batch_size=4,
        max_num_tokens=100,
        max_queue_size=7,
        scheduler_config=SchedulerConfig(CapacitySchedulerPolicy.STATIC_BATCH),
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=False,
            max_tokens=512,
            max_attention_window=64,
            sink_token_length=4,
            free_gpu_memory_fraction=0.5,
            host_cache_size=1 << 30,
            tokens_per_block=8,
        ),
        peft_cache_config=PeftCacheConfig(
            num_host_module_layer=1, num_device_module_layer=2, optimal_adapter_size=8, max_adapter_size=16,
            num_put_workers=1, num_ensure_workers=1, num_copy_streams=1, max_pages_per_block_host=24,
            max_pages_per_block_device=24, device_cache_percent=0.1, host_cache_size=1000,
        ),
        logits_post_processor_config=LogitsPostProcessorConfig(
            processor_map={"a": "m:A"}, processor_batched="m.n:B"
        ),
        speculative_model_dir="/draft",
        batching_type=BatchingType.INFLIGHT,
        enable_chunked_context=False,
        settings={"num_threads": 1},
    )  # fmt: skip
    environment = config.environment()
    assert environment == {
        "MIDSTREAM_MAX_BEAM_WIDTH": "20",
        "MIDSTREAM_MAX_BATCH_SIZE": "4",
        "MIDSTREAM_MAX_NUM_TOKENS": "100",
        "MIDSTREAM_MAX_QUEUE_SIZE": "7",
        "MIDSTREAM_CAPACITY_POLICY": "static_batch",
        "MIDSTREAM_BATCHING_TYPE": "inflight",
        "MIDSTREAM_ENABLE_CHUNKED_CONTEXT": "False",
        "MIDSTREAM_DRAFT_MODEL": "/draft",
        "MIDSTREAM_ENABLE_BLOCK_REUSE": "False",
        "MIDSTREAM_MAX_KV_TOKENS": "512",
        "MIDSTREAM_MAX_ATTENTION_WINDOW": "64",
        "MIDSTREAM_SINK_TOKEN_LENGTH": "4",
        "MIDSTREAM_FREE_MEMORY_FRACTION": "0.5",
        "MIDSTREAM_TOKENS_PER_BLOCK": "8",
        "MIDSTREAM_LORA_NUM_HOST_MODULE_LAYER": "1",
        "MIDSTREAM_LORA_NUM_DEVICE_MODULE_LAYER": "2",
        "MIDSTREAM_LORA_MAX_ADAPTER_SIZE": "16",
        "MIDSTREAM_LORA_DEVICE_CACHE_PERCENT": "0.1",
        "MIDSTREAM_LORA_HOST_CACHE_BYTES": "1000",
        "MIDSTREAM_LOGITS_POST_PROCESSORS": "a=m:A,batched=m.n:B",
        "MIDSTREAM_REPLICATE_POST_PROCESSORS": "False",
        "MIDSTREAM_NUM_THREADS": "1",
        "MIDSTREAM_HOST_KV_BYTES": str(1 << 30),
    }
    assert {name.removeprefix("MIDSTREAM_").lower() for name in environment} <= KNOWN_SETTINGS


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (ExecutorConfig(max_beam_width=0), InvalidArgumentError),
        (ExecutorConfig(kv_cache_config=KvCacheConfig(sink_token_length=4)), InvalidArgumentError),
        (
            ExecutorConfig(logits_post_processor_config=LogitsPostProcessorConfig(processor_map={"a": "m"})),
            InvalidArgumentError,
        ),
    ],
)
def test_unsupported_settings_are_rejected(config: ExecutorConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        config.environment()


def test_statistics_of_cells_are_added_up() -> None:
    def cell(active: int, iteration: int, scheduled: int, per_request: float, reused: int) -> dict[str, object]:
        batch = {"numScheduledRequests": scheduled, "avgNumDecodedTokensPerIter": per_request, "microBatchId": "3"}
        cache = {"usedNumBlocks": active, "tokensPerBlock": 16, "reusedBlocks": str(reused), "missedBlocks": "4"}
        return {
            "timestamp": f"11-22-2026 10:00:0{active}.5", "iter": str(iteration), "iterLatencyMS": active / 2,
            "numActiveRequests": active, "groupId": f"g{active}", "numFinishedByReason": {"stop": str(active)},
            "kvCacheStats": {**cache, "cacheHitRate": 0.9}, "inflightBatchingStats": batch,
        }  # fmt: skip

    stats = sum_up([cell(1, 40, 2, 1.0, 4), cell(2, 30, 6, 2.0, 0)])
    assert stats.num_active_requests == 3
    assert stats.current_batch_size == 8
    assert stats.fields["timestamp"] == "11-22-2026 10:00:02.5"
    assert (stats.fields["iter"], stats.fields["iterLatencyMS"], stats.fields["groupId"]) == (40, 1.0, "")
    assert stats.fields["numFinishedByReason"] == {"stop": 3}
    assert stats.fields["kvCacheStats"] == {
        "usedNumBlocks": 3, "tokensPerBlock": 16, "reusedBlocks": 4, "missedBlocks": 8, "cacheHitRate": 4 / 12,
    }  # fmt: skip
    assert stats.fields["inflightBatchingStats"] == {
        "numScheduledRequests": 8, "avgNumDecodedTokensPerIter": 14 / 8, "microBatchId": 3,
    }  # fmt: skip
    assert [part.num_active_requests for part in stats.cells] == [1, 2]
    labelled = stats.labelled()
    assert labelled["Timestamp"] == "11-22-2026 10:00:02"
    assert (labelled["Active Request Count"], labelled["Scheduled Requests"], labelled["MicroBatch ID"]) == (3, 8, 3)
    assert sum_up([{"numActiveRequests": 5}]) == IterationStats({"numActiveRequests": 5})


def make_folder(folder: Path, vocab_size: int | None, tokens: dict[str, int] | None) -> str:
    folder.mkdir()
    if vocab_size is not None:
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
        (folder / "model.safetensors").write_bytes(b"weights")
    if tokens is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": [{"id": 3}]}))
    return str(folder)


def test_weights_and_tokenizer_of_two_folders(tmp_path: Path) -> None:
    engine = make_folder(tmp_path / "engine", 5, {"old": 0})
    tokenizer = make_folder(tmp_path / "tokenizer", None, {"new": 4})
    combined = Path(with_tokenizer(engine, tokenizer, tmp_path / "target"))
    assert combined.name == "engine"
    assert (combined / "model.safetensors").read_bytes() == b"weights"
    assert "new" in (combined / "tokenizer.json").read_text()
    assert with_tokenizer(engine, None, tmp_path / "none") == engine
    assert with_tokenizer(engine, engine + "/", tmp_path / "none") == engine
    larger = make_folder(tmp_path / "larger", None, {"new": 5})
    with pytest.raises(InvalidArgumentError, match="token id 5"):
        with_tokenizer(engine, larger, tmp_path / "none")
    with pytest.raises(ConfigError):
        with_tokenizer(engine, make_folder(tmp_path / "empty", None, None), tmp_path / "none")
    copy = make_folder(tmp_path / "copy", None, {"new": 4})
    assert one_tokenizer(tokenizer, copy) == tokenizer
    assert one_tokenizer(None, copy) == copy
    assert one_tokenizer(None, None) is None
    with pytest.raises(InvalidArgumentError, match="postprocess_tokenizer_dir"):
        one_tokenizer(tokenizer, larger)


def test_requests_of_the_executor_api() -> None:
    """The fields of TensorRT-LLM's Request are converted to those of the native request."""
    output = OutputConfig(True, True, True, False, False, True)
    request = Request(
        [1, 2], 9, True, SamplingConfig(beam_width=2, top_p_reset_ids=5, seed=3), output, end_id=7, bad_words=[[4]],
        stop_words=["a"], client_id=12, priority=2,
    )  # fmt: skip
    request.logits_post_processor = "mine"
    message = request.to_generation_request().to_proto()
    assert (list(message.token_ids.values), message.max_tokens, message.streaming) == ([1, 2], 9, True)
    assert (message.sampling.beam_width, message.sampling.top_p_reset_id, message.sampling.seed) == (2, 5, 3)
    assert (message.output.log_probs, message.output.HasField("log_probs")) == (0, True)
    assert message.output.return_context_logits
    assert message.output.return_generation_logits
    assert message.output.return_perf_metrics
    assert not message.output.exclude_input_from_output
    assert (message.stopping.end_id, list(message.stopping.bad_word_token_ids[0].values)) == (7, [4])
    assert (message.client_id, message.priority, message.logits_post_processor_name) == ("12", 2, "mine")
    with pytest.raises(UnsupportedError, match="encoder"):
        Request([1], output_config=OutputConfig(return_encoder_output=True)).to_generation_request()
    with pytest.raises(UnsupportedError, match="pixels"):
        GenerationRequest([1], multimodal_params=MultimodalParams({"pixels": None})).to_proto()  # type: ignore[dict-item]


def ended(*beams: tuple[list[int], float], width: int, **params: object) -> GenerationResult:
    """Return a result whose sequences have all ended."""
    request = GenerationRequest([1, 2], SamplingParams(beam_width=width, log_probs=0, **params))  # type: ignore[arg-type]
    result = GenerationResult(request, lambda _: None)
    for index, (tokens, total) in enumerate(beams):
        rows = LogProbs(tuple([total / len(tokens)] * len(tokens)), 0, (), (), ())
        logits = Tensor("generation_logits", "float32", (len(tokens), 2), bytes(8 * len(tokens)))
        result.put(
            Chunk(
                index, 0, tokens, f"t{index}", is_sequence_final=True, is_final=index == len(beams) - 1,
                finish_reason=FinishReason.LENGTH, cumulative_log_prob=total, extras=Extras(rows, tensors=(logits,)),
            )
        )  # fmt: skip
    result.end(None)
    return result


def test_all_beams_are_one_response() -> None:
    result = ended(([7, 8], -1.0), ([9], -2.0), width=2, pad_id=5)
    (response,) = result.take_responses()
    assert response.result is not None
    assert response.result.output_token_ids == [[7, 8], [9]]
    assert response.result.texts == ["t0", "t1"]
    assert (response.result.sequence_index, response.is_final) == (0, True)
    logits = response.result.generation_logits
    assert logits is not None
    assert logits.shape == (2, 2, 2)
    tensors = {item.name: item for item in response_tensors(response.result, RequestLengths(result.request))}
    assert tensors["output_ids"].shape == (1, 2, 4)
    assert struct.unpack("<8i", tensors["output_ids"].data) == (1, 2, 7, 8, 1, 2, 9, 5)
    assert struct.unpack("<i", tensors["sequence_length"].data) == (4,)
    assert struct.unpack("<2f", tensors["cum_log_probs"].data) == (-1.0, -2.0)
    assert struct.unpack("<4f", tensors["log_probs"].data) == (-0.5, -0.5, -2.0, 0.0)
    assert tensors["generation_logits"].shape == (1, 2, 2, 2)
    assert tensors["context_logits"].shape == (1, 1, 1)
    assert result.take_responses() == []


def test_shorter_beams_are_filled_up() -> None:
    tensors = [Tensor("a", "float32", (2, 1), b"aaaabbbb"), Tensor("a", "float32", (1, 1), b"cccc")]
    stacked = stack_tensors(tensors)
    assert (stacked.shape, stacked.data) == ((2, 2, 1), b"aaaabbbbcccc\0\0\0\0")


def test_the_queue_of_a_result() -> None:
    result = GenerationResult(GenerationRequest([1], streaming=True), lambda _: None)
    assert result.streaming
    assert not result.done
    assert result.queue.empty()
    with pytest.raises(queue.Empty):
        result.queue.get(timeout=0.01)
    with pytest.raises(queue.Empty):
        result.queue.get(block=False)
    result.put(Chunk(0, 0, [4], "a"))
    assert result.queue.get().token_ids == [4]
    result.put(Chunk(0, 1, [], "", is_sequence_final=True, is_final=True, finish_reason=FinishReason.ABORT))
    result.end(None)
    assert result.queue.get().finish_reason == "abort"
    assert (result.done, result.state) == (True, RequestState.ABORTED)
    with pytest.raises(queue.Empty):
        result.queue.get()
