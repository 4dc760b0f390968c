"""The executor of TensorRT-LLM's LLM API: `GenerationExecutor`, whose results are futures.

The executor forgets a request that has been read completely; the caller's GenerationResult keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, overload

from midstream.chunk import Chunk, FinishReason
from midstream.client.request import Array
from midstream.errors import InvalidArgumentError, UnsupportedError
from midstream.executor.config import ExecutorConfig
from midstream.executor.engine_folder import one_tokenizer
from midstream.executor.generation_request import (
    GenerationRequest,
    LoRARequest,
    MultimodalParams,
    PromptAdapterRequest,
)
from midstream.executor.generation_result import GenerationResult
from midstream.executor.lifecycle import RequestState
from midstream.executor.post_processor_server import Call
from midstream.executor.request import DEFAULT_PRIORITY
from midstream.executor.request_parts import DraftTargetDecodingConfig, KvCacheRetentionConfig, NGramDecodingConfig
from midstream.executor.sampling_params import SamplingParams
from midstream.executor.service import LocalService
from midstream.executor.session import Owner, Session
from midstream.executor.stats import IterationStats
from midstream.model.folder import EMBEDDED_MODEL
from protos import generation_pb2 as pb

Prompt = Sequence[int] | str
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class GenerationExecutor:
    """Runs requests on a service. Use it as a context manager, or call `shutdown`."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: LocalService | None = None,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """Connect to the service; see `create`."""
        self._service = service
        self._config = executor_config or ExecutorConfig()
        self._session = Session(addresses, service)
        self._results: dict[int, GenerationResult] = {}
        if service is not None:
            service.find_function = self._function_of
        try:
            check_stop_tokens(self._config, self._session)
        except BaseException:
            self.shutdown()
            raise

    @staticmethod
    def create(
        model: str = EMBEDDED_MODEL,
        *,
        engine_dir: str | None = None,
        tokenizer_dir: str | None = None,
        address: str | Sequence[str] | None = None,
        num_workers: int = 1,
        num_postprocess_workers: int = 1,
        postprocess_tokenizer_dir: str | None = None,
        executor_config: ExecutorConfig | None = None,
    ) -> GenerationExecutor:
        """Start the services on this machine, or connect to those at `address`.

        Args:
            model: Model folder, GGUF file, or `smollm2` for the embedded model.
            engine_dir: Another name for `model`.
            tokenizer_dir: Folder of the tokenizer, if it is not the model's.
            address: Routers of a running service. No service is started, and services cannot be configured.
            num_workers: Number of worker groups, each with the ranks of `executor_config.parallel_config`.
            num_postprocess_workers: Number of detokenizers; at least one runs.
            postprocess_tokenizer_dir: Folder of the detokenizers' tokenizer, which must equal that of tokenizer_dir.
            executor_config: Settings of the services.

        Raises:
            InvalidArgumentError: Arguments conflict.
            UnsupportedError: A setting is not implemented.
            ExecutionError: The services did not start.
        """
        if address is not None:
            if executor_config is not None:
                raise InvalidArgumentError("a running service cannot be configured", field="executor_config")
            return GenerationExecutor([address] if isinstance(address, str) else address)
        config = executor_config or ExecutorConfig()
        tokenizer = one_tokenizer(tokenizer_dir, postprocess_tokenizer_dir)
        service = LocalService(
            engine_dir or model,
            config,
            tokenizer_dir=tokenizer,
            num_workers=num_workers,
            num_detokenizers=max(num_postprocess_workers, 1),
        )
        return GenerationExecutor(service.addresses, service, config)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Assign an id to the request and run it.

        Raises:
            InvalidArgumentError: A value is invalid for its field. If the service rejects the request, the result
                raises.
        """
        message = self._to_proto(request)
        self._session.check_open()
        # The result keeps a copy, since the same request may be submitted again.
        request.set_id(self._session.new_id())
        request = replace(request)
        result = GenerationResult(request, self._forget, self._ask_state)
        self._results[request.id] = result

        def put(chunk: Chunk) -> None:
            # The error of a failed request follows its last chunk.
            chunk.is_final &= chunk.finish_reason not in _FAILURES
            result.put(chunk)

        self._session.run(request.id, message, Owner(put, result.end), request.timeout_s)
        return result

    def _to_proto(self, request: GenerationRequest) -> pb.GenerateRequest:
        message = request.to_proto()
        if self._service is None and callable(request.sampling_params.logits_processor):
            raise UnsupportedError(
                "functions run only with services that this executor has started; name a post-processor of the workers",
                field="logits_processor",
            )
        fill_defaults(message, self._config)
        return message

    def generate_async(
        self,
        prompt_token_ids: Prompt | None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        max_tokens: int | None = None,
        query_token_ids: Sequence[int] | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        multimodal_params: MultimodalParams | None = None,
        arrival_time: float | None = None,
        priority: float = DEFAULT_PRIORITY,
        client_id: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        prompt_tuning_table: Array | None = None,
        prompt_embeddings: Array | None = None,
        speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None,
    ) -> GenerationResult:
        """Run one prompt, given as tokens or text; see GenerationRequest for the arguments."""
        return self.submit(
            GenerationRequest(
                prompt_token_ids,
                sampling_params or SamplingParams(),
                max_tokens=max_tokens,
                query_token_ids=query_token_ids,
                lora_request=lora_request,
                prompt_adapter_request=prompt_adapter_request,
                streaming=streaming,
                kv_cache_retention_config=kv_cache_retention_config,
                multimodal_params=multimodal_params,
                arrival_time=arrival_time,
                priority=priority,
                client_id=client_id,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                prompt_tuning_table=prompt_tuning_table,
                prompt_embeddings=prompt_embeddings,
                speculative_config=speculative_config,
            )
        )

    @overload
    def generate(
        self, prompt_token_ids: Sequence[int] | str, sampling_params: SamplingParams | None = None, **options: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int] | str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt_token_ids: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Run one prompt or several prompts concurrently, and wait until all have ended.

        Args:
            prompt_token_ids: One prompt, or a sequence of them.
            sampling_params: Parameters for all prompts, or a sequence with those of each.
            options: As in `generate_async`; they apply to all prompts.

        Raises:
            InvalidArgumentError: The numbers of prompts and parameters differ.
            MidstreamError: A request failed.
        """
        is_one = isinstance(prompt_token_ids, str) or not any(
            isinstance(item, str | Sequence) for item in prompt_token_ids
        )
        prompts: list[Any] = [prompt_token_ids] if is_one else list(prompt_token_ids)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
        if len(params) != len(prompts):
            raise InvalidArgumentError(f"{len(params)} for {len(prompts)} prompts", field="sampling_params")
        results = [self.generate_async(prompt, item, **options) for prompt, item in zip(prompts, params, strict=True)]
        for result in results:
            result.result()
        return results[0] if is_one else results

    def abort_request(self, request_id: int) -> None:
        """End a request with finish reason `abort`; no effect if it has already ended."""
        self._session.abort(request_id)

    def get_latest_stats(self) -> IterationStats:
        """Return the statistics of the latest iteration, summed over all cells."""
        return self._session.latest_stats()

    def shutdown(self) -> None:
        """Abort running requests, whose results raise AbortedError, and stop the services that `create` started. No
        effect in a forked process.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _ask_state(self, request_id: int) -> RequestState:
        stats = self._session.request_stats([request_id])
        # If the service does not know the request, it may not have arrived yet.
        return stats[0].state if stats else RequestState.PENDING

    def _forget(self, result: GenerationResult) -> None:
        self._results.pop(result.request.id, None)

    def _function_of(self, wire_id: str) -> Call:
        request = self._results[self._session.request_id(wire_id)].request
        params = request.sampling_params
        return Call(request.id, request.client_id or None, params.num_beams > 1, params.logits_processor)


def check_stop_tokens(config: ExecutorConfig, session: Session) -> None:
    """Raise InvalidArgumentError if a guided decoding configuration has stop tokens that are not the model's."""
    stop_token_ids = config.guided_decoding_config.stop_token_ids if config.guided_decoding_config else None
    unknown = set(stop_token_ids or ()) - set(session.model.end_ids if stop_token_ids else ())
    if unknown:
        raise InvalidArgumentError(
            f"{sorted(unknown)} are not end ids of the model: {list(session.model.end_ids)}",
            field="guided_decoding_config.stop_token_ids",
        )


def fill_defaults(message: pb.GenerateRequest, config: ExecutorConfig) -> None:
    """Add what the executor's configuration sets for all requests."""
    known = {item.name for item in message.output.additional_outputs}
    for item in config.additional_model_outputs or ():
        if item.name not in known:
            message.output.additional_outputs.add(name=item.name, gather_context=item.gather_context)
    drafts = config.drafts
    if drafts is not None and not message.HasField("speculative"):
        message.speculative.CopyFrom(drafts.to_proto())
