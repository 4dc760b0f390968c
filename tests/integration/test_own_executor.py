"""An executor that starts services for a model without a tokenizer: functions of the client as logits post-processors,
LoRA weights as tensors, and models from memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from midstream.errors import UnsupportedError
from midstream.executor import (
    Executor,
    ExecutorConfig,
    GenerationExecutor,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    LoraConfig,
    LoRARequest,
    ModelType,
    OutputConfig,
    Request,
    RequestType,
    SamplingConfig,
    SamplingParams,
)
from midstream.executor.kv_cache import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheStoredData,
    KVCacheUpdatedData,
)
from tests.faults.small_model import make_small_model

PROMPT = [1, 2, 3, 4]
EXCLUDED = OutputConfig(exclude_input_from_output=True)
calls: list[tuple[int, int | None, list[list[int]], tuple[int, ...]]] = []


def only_42(request_id: int, logits: Any, tokens: list[list[int]], stream: int, client_id: int | None) -> None:
    """Change the logits in place."""
    calls.append((request_id, client_id, tokens, tuple(logits.shape)))
    logits[:] = float("-inf")
    logits[..., 42] = 0


def rather_42(request_id: int, logits: Any, tokens: list[list[int]], stream: int, client_id: int | None) -> None:
    only_42(request_id, logits, tokens, stream, client_id)
    logits[..., 43] = -1


def only_43(
    request_ids: list[int], logits: list[Any], tokens: list[Any], stream: int, client_ids: list[int | None]
) -> None:
    for item in logits:
        item[:] = float("-inf")
        item[..., 43] = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_small_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[Executor]:
    cache = KvCacheConfig(True, 2048, event_buffer_max_size=1000)
    config = ExecutorConfig(2, kv_cache_config=cache, settings={"num_threads": 1})
    config.logits_post_processor_config = LogitsPostProcessorConfig({"my_logits_pp": only_42}, only_43)
    with Executor(model, ModelType.DECODER_ONLY, config) as executor:
        yield executor


def finish(executor: Executor, request: Request) -> list[list[int]]:
    request.output_config = EXCLUDED
    (response,) = executor.await_responses(executor.enqueue_request(request), timedelta(seconds=60))
    return response.result.output_token_ids


def test_functions_of_this_process_change_logits(executor: Executor) -> None:
    calls.clear()
    request = Request(PROMPT, 3, client_id=123)
    request.logits_post_processor_name = "my_logits_pp"
    assert finish(executor, request) == [[42] * 3]
    assert [(client, tokens, shape[:2]) for _, client, tokens, shape in calls] == [
        (123, [[*PROMPT, *[42] * count]], (1, 1)) for count in range(3)
    ]
    request.logits_post_processor_name = request.BATCHED_POST_PROCESSOR_NAME
    assert finish(executor, request) == [[43] * 3]


def test_a_function_of_a_request_gets_all_its_beams_and_the_executors_id(executor: Executor) -> None:
    calls.clear()
    request = Request(PROMPT, 3, sampling_config=SamplingConfig(2), logits_post_processor=rather_42)
    request_id = executor.enqueue_request(request)
    (response,) = executor.await_responses(request_id, timedelta(seconds=60))
    assert response.result.output_token_ids[0] == [*PROMPT, 42, 42, 42]
    # The first step has one beam, and later ones both.
    assert [(caller, shape[:2]) for caller, _, _, shape in calls] == [(request_id, (1, width)) for width in (1, 2, 2)]
    beams = [[[]], [[42], [43]], [[42, 42], [42, 43]]]
    assert [sorted(beam[len(PROMPT) :] for beam in tokens) for _, _, tokens, _ in calls] == beams
    other = Executor.connect(executor._service.addresses)  # type: ignore[union-attr]
    with other, pytest.raises(UnsupportedError, match="logits_post_processor"):
        other.enqueue_request(Request(PROMPT, 3, logits_post_processor=only_42))


def test_an_exception_of_a_function_fails_only_its_request(executor: Executor) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no idea")

    request_id = executor.enqueue_request(Request(PROMPT, 3, logits_post_processor=fail))
    (response,) = executor.await_responses(request_id, timedelta(seconds=60))
    assert "no idea" in response.error_msg
    assert finish(executor, Request(PROMPT, 3, logits_post_processor=only_42)) == [[42] * 3]


def test_penalties_count_the_prompt_and_follow_the_temperature(executor: Executor) -> None:
    """A penalty of any size bans the tokens of the prompt and of the output, and a negative one repeats the prompt."""
    (plain,) = finish(executor, Request(PROMPT, 3))
    banned = SamplingConfig(presence_penalty=1e4, temperature=0.5)
    (other,) = finish(executor, Request([*PROMPT, *plain], 3, sampling_config=banned))
    assert not {*PROMPT, *plain} & {*other}
    assert len({*other}) == 3
    repeated = SamplingConfig(frequency_penalty=-1e4)
    assert finish(executor, Request([7, 9, 9, 9], 3, sampling_config=repeated)) == [[9] * 3]


def test_statistics_are_there_with_the_response(executor: Executor) -> None:
    """They come through another stream, which may be behind."""
    executor.get_latest_iteration_stats()
    last = 0
    for number in range(30):
        (response,) = executor.await_responses(executor.enqueue_request(Request([*PROMPT, number], 1)))
        assert response.result.is_final
        numbers = [stats.iter for stats in executor.get_latest_iteration_stats()]
        assert numbers
        assert numbers == list(range(last + 1 if last else numbers[0], numbers[-1] + 1))
        last = numbers[-1]


def test_the_best_beam_is_streamed_in_parts(executor: Executor) -> None:
    request = Request(PROMPT, 8, sampling_config=SamplingConfig(2))
    best, other = finish(executor, request)
    request.streaming = True
    request_id, found = executor.enqueue_request(request), [list[int](), list[int]()]
    num_responses, is_final = 0, False
    while not is_final:
        for response in executor.await_responses(request_id, timedelta(seconds=60)):
            assert not is_final
            for beam, tokens in zip(found, response.result.output_token_ids, strict=True):
                beam.extend(tokens)
            num_responses, is_final = num_responses + 1, response.result.is_final
    assert found == [best, other]
    assert num_responses > 1


def test_logits_without_a_limit_of_tokens_end_at_the_limit_of_bytes(executor: Executor) -> None:
    """256 MiB, the routers' limit, are 170 rows of 49,152 numbers for each of 8 sequences; they come in pieces."""
    addresses = executor._service.addresses  # type: ignore[union-attr]
    params = SamplingParams(n=8, top_p=1.0, max_tokens=None, ignore_eos=True, return_generation_logits=True)
    with GenerationExecutor.create(address=addresses) as other:
        outputs = other.generate(PROMPT, params).outputs
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(170, "length")] * 8
    assert all(output.generation_logits.shape == (170, 49152) for output in outputs)  # type: ignore[union-attr]


def test_blocks_are_reported_as_they_are_stored(executor: Executor) -> None:
    events = executor.get_kv_cache_event_manager()
    assert events is not None
    prompt = [5 + index % 7 for index in range(40)]
    finish(executor, Request(prompt, 2))
    stored: list[KVCacheEvent] = []
    while not any(tokens_of(event)[:32] == prompt[:32] for event in stored):
        stored += events.get_latest_events(timedelta(seconds=60))
    created = stored[0].data
    if stored[0].event_id == 0:
        assert isinstance(created, KVCacheCreatedData)
        assert created.num_blocks_per_cache_level == (128, 0)  # of 16 tokens each
    assert [event.event_id for event in stored] == list(range(stored[0].event_id, stored[0].event_id + len(stored)))
    # What is in the cache is not stored again; a longer prompt continues it.
    finish(executor, Request([*prompt[:32], *range(100, 140)], 2))
    (event,) = [item for item in events.get_latest_events(timedelta(seconds=60)) if tokens_of(item)]
    assert isinstance(event.data, KVCacheStoredData)
    first = next(item.data for item in stored if tokens_of(item)[:32] == prompt[:32])
    assert isinstance(first, KVCacheStoredData)
    assert event.data.parent_hash == first.blocks[1].block_hash
    other = Executor.connect(executor._service.addresses)  # type: ignore[union-attr]
    with other:
        assert other.get_kv_cache_event_manager() is None


def test_blocks_move_to_host_memory_and_back(model: Path) -> None:
    cache = KvCacheConfig(True, 96, host_cache_size=1 << 20, event_buffer_max_size=1000)
    config = ExecutorConfig(kv_cache_config=cache, max_batch_size=1, settings={"num_threads": 1})
    with Executor(model, ModelType.DECODER_ONLY, config) as executor:
        events = executor.get_kv_cache_event_manager()
        assert events is not None
        (created,) = events.get_latest_events(timedelta(seconds=60))
        assert isinstance(created.data, KVCacheCreatedData)
        num_blocks, num_host_blocks = created.data.num_blocks_per_cache_level
        values = 2 * 2 * 2 * 16 * 16  # layers, keys and values, heads, width, tokens
        assert num_blocks == 6
        assert (1 << 20) // (4 * values) < num_host_blocks <= (1 << 20) // (2 * values)  # of 2 bytes, with padding
        # Each prompt needs most of the pool. Blocks are copied to the host in the background.
        moves: set[tuple[int, int]] = set()
        for number in range(1000):
            finish(executor, Request([10 + number % 2] * 64, 2))
            found = [event.data for event in events.get_latest_events(timedelta())]
            levels = [data.cache_level for data in found if isinstance(data, KVCacheUpdatedData)]
            moves |= {(level.old_value, level.new_value) for level in levels if level is not None}
            if len(moves) == 2:
                break
    assert moves == {(0, 1), (1, 0)}


def tokens_of(event: KVCacheEvent) -> list[int]:
    if not isinstance(event.data, KVCacheStoredData):
        return []
    return [token.token_id for block in event.data.blocks for token in block.tokens]


def test_the_phases_of_a_request_run_one_after_the_other(executor: Executor) -> None:
    (whole,) = finish(executor, Request(PROMPT, 6))
    first = Request(PROMPT, 6, type=RequestType.REQUEST_TYPE_CONTEXT_ONLY, output_config=EXCLUDED)
    (response,) = executor.await_responses(executor.enqueue_request(first), timedelta(seconds=60))
    params = response.result.context_phase_params
    assert params is not None
    assert list(params.first_gen_tokens) == whole[:1] == response.result.output_token_ids[0]
    second = Request(PROMPT, 6, type=RequestType.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=params)
    assert finish(executor, second) == [whole]
    params.first_gen_tokens = [whole[0] + 1]
    (failed,) = executor.await_responses(executor.enqueue_request(second), timedelta(seconds=60))
    assert "the output begins with" in failed.error_msg


def test_lora_weights_as_tensors_equal_the_folder(executor: Executor, tmp_path: Path) -> None:
    folder = write_small_lora(tmp_path / "lora")
    tensors = load_file(folder / "adapter_model.safetensors")
    rows, config = [], []
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{{}}.weight"
        a, b = tensors[name.format("A")], tensors[name.format("B")]
        rows.append(torch.cat([a.flatten(), (b * 2).flatten()]))  # the scale is part of the weights
        config.append([1, layer, 4])
    lora = LoraConfig(0, torch.stack(rows), torch.tensor(config, dtype=torch.int32))
    found = finish(executor, Request(PROMPT, 8, lora_config=lora))
    assert found != finish(executor, Request(PROMPT, 8))
    assert finish(executor, Request(PROMPT, 8, lora_config=LoraConfig(0))) == found
    addresses = executor._service.addresses  # type: ignore[union-attr]
    with GenerationExecutor.create(address=addresses) as other:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        result = other.generate(PROMPT, params, lora_request=LoRARequest("folder", 1, str(folder)))
    assert [result.outputs[0].token_ids] == found


def test_a_model_from_memory_gives_the_same_tokens(executor: Executor, model: Path) -> None:
    weights, config = (model / "model.safetensors").read_bytes(), (model / "config.json").read_text()
    settings = ExecutorConfig(kv_cache_config=KvCacheConfig(True, 2048), settings={"num_threads": 1})
    with Executor(weights, config, ModelType.DECODER_ONLY, settings) as other:
        assert finish(other, Request(PROMPT, 4)) == finish(executor, Request(PROMPT, 4))


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(Exception, match="File does not exist"):
        Executor("Bla", ModelType.DECODER_ONLY, ExecutorConfig(1))
    with pytest.raises(UnsupportedError, match="DECODER_ONLY"):
        Executor("smollm2", ModelType.ENCODER_ONLY, ExecutorConfig(1))


def write_small_lora(folder: Path) -> Path:
    from tests.seeds.conftest import _write_lora

    _write_lora(folder)
    return folder
