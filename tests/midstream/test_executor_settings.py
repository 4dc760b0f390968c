"""The executor's settings, statistics and folders, without a service."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest

from midstream.chunk import Chunk, FinishReason
from midstream.config import KNOWN_SETTINGS
from midstream.errors import ConfigError, InvalidArgumentError, UnsupportedError
from midstream.executor import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DebugConfig,
    DecodingConfig,
    DecodingMode,
    ExecutorConfig,
    GenerationRequest,
    GenerationResult,
    GuidedDecodingConfig,
    InflightBatchingStats,
    IterationStats,
    KvCacheConfig,
    KvCacheStats,
    LogitsPostProcessorConfig,
    LookaheadDecodingConfig,
    ParallelConfig,
    PeftCacheConfig,
    RequestStage,
    RequestState,
    RequestStats,
    RequestStatsPerIteration,
    SchedulerConfig,
)
from midstream.executor.engine_folder import check_vocabulary, one_tokenizer, with_tokenizer
from midstream.executor.stats import sum_up


def test_windows_of_layers() -> None:
    def settings(windows: list[int] | int) -> list[str | None]:
        found = ExecutorConfig(kv_cache_config=KvCacheConfig(max_attention_window=windows)).environment()
        names = ("MAX_ATTENTION_WINDOW", "LAYER_ATTENTION_WINDOWS")
        return [found.get(f"MIDSTREAM_{name}") for name in names]

    assert settings([64, 64]) == ["64", None]
    assert settings([32, 64, 48]) == ["64", "32,64,48"]
    assert settings([]) == [None, None]
    assert settings(64) == ["64", None]


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
            max_attention_window=[64, 64],
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
        batching_type=BatchingType.STATIC,
        enable_chunked_context=False,
        settings={"num_threads": 1},
    )  # fmt: skip
    environment = config.environment("/run/functions")
    assert environment == {
        "MIDSTREAM_MAX_BEAM_WIDTH": "20",
        "MIDSTREAM_MAX_BATCH_SIZE": "4",
        "MIDSTREAM_MAX_NUM_TOKENS": "100",
        "MIDSTREAM_MAX_QUEUE_SIZE": "7",
        "MIDSTREAM_CAPACITY_POLICY": "static_batch",
        "MIDSTREAM_BATCHING_TYPE": "static",
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
        "MIDSTREAM_LOGITS_POST_PROCESSORS": "dynamic=unix:/run/functions,a=m:A,batched=m.n:B",
        "MIDSTREAM_REPLICATE_POST_PROCESSORS": "True",
        "MIDSTREAM_NUM_THREADS": "1",
        "MIDSTREAM_HOST_KV_BYTES": str(1 << 30),
    }
    assert {name.removeprefix("MIDSTREAM_").lower() for name in environment} <= KNOWN_SETTINGS


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (ExecutorConfig(kv_cache_config=KvCacheConfig(sink_token_length=4)), InvalidArgumentError),
        (
            ExecutorConfig(logits_post_processor_config=LogitsPostProcessorConfig(processor_map={"a": "m"})),
            InvalidArgumentError,
        ),
        (ExecutorConfig(kv_cache_config=KvCacheConfig(cross_kv_cache_fraction=0.5)), UnsupportedError),
        (ExecutorConfig(peft_cache_config=PeftCacheConfig(lora_prefetch_dir="/loras")), UnsupportedError),
        (ExecutorConfig(gpu_weights_percent=0.5), UnsupportedError),
        (ExecutorConfig(debug_config=DebugConfig()), UnsupportedError),
        (
            ExecutorConfig(
                scheduler_config=SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)
            ),
            UnsupportedError,
        ),
    ],
)
def test_unsupported_settings_are_rejected(config: ExecutorConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        config.environment("/run/functions")


def test_drafts_of_a_decoding_mode() -> None:
    assert ExecutorConfig(decoding_config=DecodingConfig(DecodingMode.TopK())).drafts is None
    lookahead = DecodingConfig(lookahead_decoding_config=LookaheadDecodingConfig(3, 5, 7))
    assert ExecutorConfig(decoding_config=lookahead).drafts == LookaheadDecodingConfig(3, 5, 7)
    assert ExecutorConfig(decoding_config=DecodingConfig(DecodingMode.Lookahead())).drafts == LookaheadDecodingConfig()
    with pytest.raises(UnsupportedError, match="Medusa"):
        _ = ExecutorConfig(decoding_config=DecodingConfig(medusa_choices=[[0]])).drafts


def test_one_rank_for_each_device() -> None:
    assert ParallelConfig().num_tensor_ranks == 1
    config = ParallelConfig(CommunicationType.MPI, CommunicationMode.LEADER, [2, 3, 4, 5])
    assert config.num_tensor_ranks == 4
    assert ParallelConfig(device_ids=[0, 1, 2, 3], pipeline_parallel_size=2).num_tensor_ranks == 2
    assert ExecutorConfig(parallel_config=config).environment()["CUDA_VISIBLE_DEVICES"] == "2,3,4,5"


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
    assert (stats.timestamp, stats.iter, stats.iter_latency_ms) == ("11-22-2026 10:00:02.5", 40, 1.0)
    assert stats.group_id == ""
    assert stats.kv_cache_stats == KvCacheStats(
        used_num_blocks=3, tokens_per_block=16, reused_blocks=4, missed_blocks=8, cache_hit_rate=4 / 12
    )
    assert stats.inflight_batching_stats == InflightBatchingStats(
        num_scheduled_requests=8, avg_num_decoded_tokens_per_iter=14 / 8, micro_batch_id=3
    )
    assert [part.num_active_requests for part in stats.cells] == [1, 2]
    labelled = stats.labelled()
    assert labelled["Timestamp"] == "11-22-2026 10:00:02"
    assert (labelled["Active Request Count"], labelled["Scheduled Requests"], labelled["MicroBatch ID"]) == (3, 8, 3)
    assert sum_up([{"numActiveRequests": 5}]) == IterationStats(num_active_requests=5)


def test_statistics_as_json_have_numbers_and_nulls() -> None:
    """Protobuf's own JSON has 64-bit numbers as texts."""
    stats = IterationStats.from_fields({"iter": "7", "iterLatencyMS": 0.5, "kvCacheStats": {"allocTotalBlocks": "9"}})
    fields = json.loads(stats.to_json_str())
    assert (fields["iter"], fields["iterLatencyMS"], fields["numActiveRequests"]) == (7, 0.5, 0)
    assert fields["kvCacheStats"]["allocTotalBlocks"] == 9
    assert (fields["staticBatchingStats"], fields["inflightBatchingStats"]) == (None, None)
    request = RequestStatsPerIteration(3, [RequestStats(id=1, stage=RequestStage.CONTEXT_IN_PROGRESS)])
    fields = json.loads(request.to_json_str())
    assert (fields["iter"], fields["requestStats"][0]["id"]) == (3, 1)
    assert fields["requestStats"][0]["stage"] == "CONTEXT_IN_PROGRESS"
    assert fields["requestStats"][0]["disServingStats"] is None


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
    numbers = Path(with_tokenizer(make_folder(tmp_path / "bare", 5, None), None, tmp_path / "numbered"))
    assert json.loads((numbers / "tokenizer.json").read_text())["model"]["vocab"] == {str(i): i for i in range(5)}
    with pytest.raises(InvalidArgumentError, match="postprocess_tokenizer_dir"):
        one_tokenizer(tokenizer, larger)


def test_a_vocabulary_for_guided_decoding_must_be_the_models(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", 3, {"a": 0, "b": 1})
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    check_vocabulary(GuidedDecodingConfig(encoded_vocab=["a", "b"]), folder)
    for vocabulary in (["a", "c"], ["a"], ["a", "b", "c"]):
        with pytest.raises(InvalidArgumentError, match="encoded_vocab"):
            check_vocabulary(GuidedDecodingConfig(encoded_vocab=vocabulary), folder)
    other = json.dumps({"model": {"vocab": {"b": 0, "a": 1}}})
    with pytest.raises(InvalidArgumentError, match="tokenizer_str"):
        check_vocabulary(GuidedDecodingConfig(encoded_vocab=["a", "b"], tokenizer_str=other), folder)
    with pytest.raises(InvalidArgumentError, match="encoded_vocab"):
        GuidedDecodingConfig(tokenizer_str=other).validate()


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
