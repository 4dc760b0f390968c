"""Runs the requests of one job, and writes their output as JSON or as server-sent events.

Each event's id encodes the reader's position (positions.py). If a client sends the same body with that id as
Last-Event-ID, to any router, the stream resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cached_property, partial

from starlette.responses import JSONResponse, Response

from midstream.chunk import Chunk, PerfMetrics, Usage
from midstream.errors import InvalidArgumentError, MidstreamError, OutOfRangeError
from protos import generation_pb2 as pb
from router.pipeline.concurrent import run_all
from router.pipeline.generation import FrontDoor, Output, Prepare
from router.pipeline.kept_requests import KeptRequests
from router.pipeline.prompt import PromptOptions
from router.protocols.fields import ignored_header
from router.protocols.openai.echo import EchoedPrompt
from router.protocols.openai.endpoints import error_response, id_header
from router.protocols.openai.errors import error_body
from router.protocols.openai.jobs import Job, request_ids
from router.protocols.openai.positions import Position, event_prefix, read_event_id
from router.protocols.openai.shapes import usage_fields
from router.protocols.streaming import COMMENT, EventStream, StreamedResponse, dump


class Reply(StreamedResponse):
    """The response to one job; a dropped connection aborts its requests."""

    def __init__(self, front: FrontDoor, job: Job, last_event_id: str | None, kept: KeptRequests) -> None:
        super().__init__(front.keep_alives, is_stream=job.is_stream)
        self._front = front
        self._prompts = front.runner.prompts
        self._kept = kept
        self._job = job
        self._last_event_id = last_event_id
        self._is_resumed = last_event_id is not None
        self._positions = [Position() for _ in job.requests]
        self._echoed: list[EchoedPrompt | None] = []
        self._usages: list[Usage] = []
        self._metrics: list[PerfMetrics] = []  # set if there was a prediction
        self._num_reasoning = 0
        self._has_opened = False

    async def compute(self, events: EventStream) -> Response | None:
        """Return the complete response, or write it as events."""
        async with AsyncExitStack() as stack:
            outputs = await self._open(stack)
            if self._job.key:
                # If several calls with this key came at the same time, only the scheduler knows which was first.
                self._job.created = await self._kept.arrival_time(outputs[0].request_id)
            if not self._job.is_stream:
                return JSONResponse(await self._whole(outputs), headers=self.own_headers())
            await events.begin()
            await self._stream(outputs, events)
        return None

    def refusal(self, error: MidstreamError) -> Response:
        return error_response(error, self._job.names, self._job.request_id)

    def failure(self, error: MidstreamError) -> str:
        """Return the events that report the error and end the stream."""
        return f"data: {dump(error_body(error, self._job.names))}\n\ndata: [DONE]\n\n"

    def own_headers(self) -> dict[str, str]:
        return id_header(self._job.request_id) | ignored_header(self._job.ignored)

    def keep_alive(self) -> str:
        """Return an event without text of the first choice that has not ended; clients do not count comments."""
        num_choices = self._job.num_choices
        running = (
            number * num_choices + index
            for number, position in enumerate(self._positions)
            for index in range(num_choices)
            if index not in position.ended
        )
        shown = next(running, None)
        return self._event(shown, self._job.shape.empty(shown)) if self._has_opened and shown is not None else COMMENT

    async def _open(self, stack: AsyncExitStack) -> list[Output]:
        if self._last_event_id is not None:
            self._read_positions(self._last_event_id)
        self._job.shape.request_id = self._job.request_id
        # A stream that is resumed after the end of the prompt has no echoed prompt.
        self._echoed = [
            EchoedPrompt() if self._job.echoes_log_probs and not position.offsets.get(0) else None
            for position in self._positions
        ]
        outputs: list[Output] = []
        if self._is_resumed:
            await self._prepare_to_resume()
        names = request_ids(self._job.request_id, len(self._job.requests))
        try:
            for name, request, position in zip(names, self._job.requests, self._positions, strict=True):
                if self._is_resumed:
                    offsets = [] if self._job.reads_text else position.next_offsets
                    output = self._front.resume(name, 0, offsets, None, self._job.conversation)
                else:
                    if self._job.options.max_tokens is not None and request.WhichOneof("input") == "token_ids":
                        await self._tokenize(request)  # truncates the token ids before their number is checked
                    conversation = self._job.conversation
                    output = await self._front.start(
                        request,
                        None,
                        self._job.key,
                        self._preparation(request),
                        conversation,
                    )
                outputs.append(await stack.enter_async_context(output))
        except MidstreamError:
            self._abort(outputs)
            raise
        return outputs

    async def _prepare_to_resume(self) -> None:
        job = self._job
        if job.conversation is not None:
            # How the text is parsed depends on the prompt.
            await self._front.run_unstarted(job.requests[0], self._prepare)
        if job.counts_always or job.shape.details.returns_ids:
            for request in job.requests:
                await self._front.run_unstarted(request, partial(self._tokenize, request))

    def _preparation(self, request: pb.GenerateRequest) -> Prepare | None:
        if self._job.conversation is not None:
            return self._prepare
        return None if self._job.options == PromptOptions() else partial(self._tokenize, request)

    async def _tokenize(self, request: pb.GenerateRequest) -> None:
        request.token_ids.values[:] = await self._prompts.token_ids(request, self._job.options)

    async def _prepare(self) -> None:
        assert self._job.conversation is not None
        await self._job.conversation.prepare(self._prompts, self._front.runner.model)

    def _read_positions(self, text: str) -> None:
        if not self._job.is_stream:
            raise InvalidArgumentError("is set, but stream is false", field="Last-Event-ID")
        self._job.request_id, self._positions = read_event_id(text, len(self._job.requests))

    async def _whole(self, outputs: list[Output]) -> Mapping[str, object]:
        choices: list[dict[str, object]] = []
        for number, sequences in enumerate(await self._sequences(outputs)):
            ordered = [sequences[index] for index in sorted(sequences)]
            prompt = self._prompt_fields(number, ordered[0])
            if len(ordered) > self._job.num_choices:
                num_prompt = len(self._job.requests[number].token_ids.values) if self._job.echoes_prompt else 0
                ordered.sort(key=partial(mean_log_prob, num_prompt), reverse=True)
            for chunk in ordered[: self._job.num_choices]:
                choice = self._of_output(number, chunk, self._job.shape.whole(len(choices), chunk))
                choices.append(choice if self._job.shape.is_prompt_shared else choice | prompt)
        shared = prompt if self._job.shape.is_prompt_shared else {}
        await self._count_reasoning()
        return {**self._envelope(self._job.shape.name), "choices": choices, "usage": self._usage(), **shared}

    async def _sequences(self, outputs: list[Output]) -> list[dict[int, Chunk]]:
        """Return the complete sequences of each prompt, by index."""
        if len(outputs) == 1:
            return [await self._read(0, outputs[0])]
        try:
            # A scheduler aborts requests that nothing reads for a while, so all of them are read at once.
            return await run_all(self._read(number, output) for number, output in enumerate(outputs))
        except MidstreamError:
            self._abort(outputs)
            raise

    async def _read(self, number: int, output: Output) -> dict[int, Chunk]:
        sequences: dict[int, Chunk] = {}
        while not output.is_final:
            for chunk in await self._take(number, output):
                known = sequences.setdefault(chunk.sequence_index, chunk)
                if known is not chunk:
                    known.append(chunk)
        output.raise_unfinished()
        return sequences

    def _abort(self, outputs: list[Output]) -> None:
        """Abort the other requests of a job after one has failed: their output is useless, unless the client retries
        with its key.
        """
        for output in [] if self._job.key else outputs:
            if not output.is_final:
                self._front.abort_soon(output.request_id)

    def _prompt_fields(self, number: int, first: Chunk | None) -> dict[str, object]:
        """Return the fields about a prompt, whose log probabilities come with the first sequence."""
        rows = first.extras.prompt_log_probs if first is not None and first.extras is not None else None
        return self._job.shape.prompt(self._job.requests[number].token_ids.values, rows)

    async def _stream(self, outputs: list[Output], events: EventStream) -> None:
        self._has_opened = True
        if not self._is_resumed:
            for index in range(len(outputs) * self._job.num_choices):
                opening = self._job.shape.opening(index)
                if opening is not None:
                    await events.write(self._event(index, opening, self._prompt_fields(0, None)))
        if len(outputs) == 1:
            await self._relay(0, outputs[0], events)
        else:
            await run_all(self._relay(i, output, events) for i, output in enumerate(outputs))
        for output in outputs:
            output.raise_unfinished()
        if self._job.includes_usage:
            await self._count_reasoning()
            await events.write(self._event(0, None))
        await events.write("data: [DONE]\n\n", more=False)

    async def _relay(self, number: int, output: Output, events: EventStream) -> None:
        while not output.is_final:
            for chunk in await self._take(number, output):
                choice = self._choice(number, chunk)
                if choice is not None:
                    await events.write(self._event(number * self._job.num_choices + chunk.sequence_index, choice))

    async def _take(self, number: int, output: Output) -> list[Chunk]:
        """Return the next chunks of a prompt's output."""
        chunks, echoed = await output.take(), self._echoed[number]
        for chunk in chunks:
            self._count(chunk)
        return chunks if echoed is None else [item for chunk in chunks for item in echoed.release(chunk)]

    def _choice(self, number: int, chunk: Chunk) -> dict[str, object] | None:
        """Return the delta of one choice; None if the client already has it."""
        job, position, index = self._job, self._positions[number], chunk.sequence_index
        shown = number * job.num_choices + index
        if job.reads_text and self._is_resumed and chunk.is_sequence_final and not position.is_within(chunk):
            raise OutOfRangeError("lies beyond the end of the output", field="Last-Event-ID")
        if index in position.ended:
            if job.reads_text:
                job.shape.part(shown, chunk)  # so that the usage includes its reasoning
            return None
        if job.reads_text and self._is_resumed:
            known, chunk = position.known_part(chunk)
            job.shape.read_again(shown, known)
            if not (chunk.token_ids or chunk.text or chunk.is_sequence_final):
                return None
        if self._is_resumed and index in position.characters and not job.reads_text:
            job.shape.begin_at(shown, position.characters[index], position.partial.get(index, b""))
        is_first = index not in position.offsets
        position.advance(chunk, counts_characters=job.reads_text)
        part = job.shape.part(shown, chunk)
        if part is not None:
            part = self._of_output(number, chunk, part)
        if part is not None and is_first and not job.shape.is_prompt_shared:
            part |= self._prompt_fields(number, None)
        reached = job.shape.text_offset(shown)
        if reached is not None:
            position.characters[index], position.partial[index] = reached
        return part

    def _of_output(self, number: int, chunk: Chunk, choice: dict[str, object]) -> dict[str, object]:
        """Return a choice, or its delta, with the ids of output tokens only: those of an echoed prompt are in
        `prompt_token_ids`, as in vLLM.
        """
        if self._job.echoes_prompt and "token_ids" in choice:
            num_prompt = len(self._job.requests[number].token_ids.values)
            choice["token_ids"] = list(chunk.token_ids[max(num_prompt - chunk.token_offset, 0) :])
        return choice

    def _event(self, shown: int, choice: dict[str, object] | None, more: Mapping[str, object] | None = None) -> str:
        """Return the event with the delta of one choice, whose index is `shown`, or with the usage; `more` are fields
        of the event.
        """
        begin, end = self._around_choices
        choices = "" if choice is None else dump(choice)
        if choice is None or self._job.counts_always:
            end = f'],"usage":{dump(self._usage() if choice is None else self._usage_so_far(shown))}}}'
        if more:
            end = f"{end[:-1]},{dump(more)[1:]}"
        name = self._event_prefix + "/".join(map(str, self._positions))
        return f"id: {name}\ndata: {begin}{choices}{end}\n\n"

    @cached_property
    def _around_choices(self) -> tuple[str, str]:
        """The JSON before and after the choices of an event, which is the same for all events but the last."""
        begin = dump({**self._envelope(self._job.shape.chunk_name), "choices": []}).removesuffix("]}")
        return begin, '],"usage":null}' if self._job.includes_usage else "]}"

    @cached_property
    def _event_prefix(self) -> str:
        return event_prefix(self._job.request_id)

    def _envelope(self, name: str) -> dict[str, object]:
        job = self._job
        model = job.model or self._front.runner.model.name
        return {
            "id": job.shape.prefix + job.request_id,
            "object": name,
            "created": job.created,
            "model": model,
        } | job.shape.envelope

    def _count(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._usages.append(chunk.usage)
        if chunk.perf_metrics is not None:
            self._metrics.append(chunk.perf_metrics)

    def _usage_so_far(self, shown: int) -> dict[str, object]:
        """Return the usage of one choice up to now."""
        number, index = divmod(shown, self._job.num_choices)
        num_prompt = len(self._job.requests[number].token_ids.values)
        reached = self._positions[number].offsets.get(index, 0)
        num_output = max(reached - num_prompt, 0) if self._job.echoes_prompt else reached
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    async def _count_reasoning(self) -> None:
        """Count the tokens of the reasoning by tokenizing its text, as in the Responses API."""
        for pieces in self._job.shape.reasoning.values():
            text = pb.GenerateRequest(prompt="".join(pieces))
            self._num_reasoning += len(await self._prompts.token_ids(text, PromptOptions(adds_special_tokens=False)))

    def _usage(self) -> dict[str, object]:
        usages = self._usages
        num_output = sum(usage.completion_tokens for usage in usages)
        counts: dict[str, int] = {}
        if self._metrics:
            accepted = sum(metrics.num_accepted_tokens for metrics in self._metrics)
            rejected = sum(metrics.num_draft_tokens for metrics in self._metrics) - accepted
            counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if self._job.reasons:
            counts["reasoning_tokens"] = min(self._num_reasoning, num_output)
        details = {"completion_tokens_details": counts} if counts else {}
        return details | usage_fields(
            Usage(
                sum(usage.prompt_tokens for usage in usages),
                num_output,
                sum(usage.cached_tokens for usage in usages),
            )
        )


def mean_log_prob(num_prompt: int, chunk: Chunk) -> float:
    """Return the mean log probability of the tokens that follow an echoed prompt of `num_prompt` tokens."""
    return (chunk.cumulative_log_prob or 0.0) / max(chunk.next_offset - num_prompt, 1)
