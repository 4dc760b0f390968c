"""Embeddings, scores and classes: each input becomes a native request for one token, from whose output only a tensor is
used.

As a result, inputs are batched with all other requests, their prefixes are cached, and they survive the loss of any
process. The vector is the model's last hidden state, after the final norm, at the input's last token (last-token
pooling), or its mean over all tokens of the input (mean pooling, for which no cached prefix is used). The workers pool
the states of encoders themselves, in more ways. A score is the probability of one of two tokens as the answer to a
query and a document, or that of a class.
"""

from __future__ import annotations

import asyncio
import math
import operator
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from midstream.chunk import Chunk, Usage
from midstream.errors import (
    ContextLengthError,
    ExecutionError,
    InvalidArgumentError,
    UnsupportedError,
)
from midstream.extras import join_tensors
from midstream.model.sentence_transformers import CLASS_SCORES, POOLED_STATES, read_text_encoder
from protos import generation_pb2 as pb
from router.pipeline.answers import Answers, answers_of
from router.pipeline.concurrent import run_all
from router.pipeline.generation import FrontDoor
from router.pipeline.idempotency import keep
from router.pipeline.prompt import PromptOptions

MAX_INPUTS = 2048
# Maximum number of concurrent inputs of one call.
_NUM_CONCURRENT = 64
_INPUT_FIELDS = ("input", "prompt", "token_ids", "chat")

Vector = Sequence[float]
_T = TypeVar("_T")


class Pooling(StrEnum):
    """How the hidden states of an input's tokens become its vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    MEAN_SQRT_LENGTH = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"

    @property
    def mode(self) -> str:
        """Its name in sentence-transformers."""
        return "lasttoken" if self is Pooling.LAST else str(self)


_POOLINGS = {pooling.mode: pooling for pooling in Pooling}
# Those of models that are not encoders.
_OF_DECODERS = (Pooling.LAST, Pooling.MEAN)


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One input.

    Attributes:
        field: Name of the input in the client's request, for error messages.
        prompt: Text or token ids.
    """

    field: str
    prompt: str | Sequence[int]

    def fill(self, request: pb.GenerateRequest) -> None:
        if isinstance(self.prompt, str):
            request.prompt = self.prompt
        else:
            request.token_ids.values.extend(self.prompt)


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document to score.

    Attributes:
        field: Name of the document in the client's request, for error messages.
    """

    field: str
    query: str
    document: str

    def fill(self, request: pb.GenerateRequest) -> None:
        for role, content in (("query", self.query), ("document", self.document)):
            request.chat.messages.add(role=role, content=content)


@dataclass(frozen=True, slots=True)
class VectorShape:
    """How a hidden state is returned.

    Attributes:
        dimensions: Return only this many leading values; None returns all.
        normalizes: Whether the vector is scaled to unit length.
    """

    dimensions: int | None = None
    normalizes: bool = True

    def of(self, state: Vector) -> Vector:
        """Return the vector for a hidden state."""
        values = state[: self.dimensions]
        if not self.normalizes:
            return values
        length = math.sqrt(dot(values, values))
        return [value / length for value in values] if length > 0 else values


def dot(left: Vector, right: Vector) -> float:
    """Return the inner product."""
    return math.fsum(map(operator.mul, left, right))


class Embedder:
    """Computes embeddings and scores for all APIs.

    Attributes:
        answers: The answer tokens, if the model was trained to score by its answer.
    """

    def __init__(self, front: FrontDoor) -> None:
        self.front = front
        self._model = front.runner.model
        self._output = f"hidden_states.{self._model.num_layers}"
        self._encoder = read_text_encoder(self._model.path, is_encoder=self._model.is_encoder)
        self.answers = answers_of(self._model)

    async def embed(
        self,
        base: pb.GenerateRequest,
        inputs: Sequence[EmbedInput],
        shape: VectorShape,
        *,
        pooling: Pooling | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
        key: str = "",
        truncate: int | None = None,
    ) -> tuple[list[Vector], Usage]:
        """Return the vectors of the inputs and their total usage.

        Args:
            base: The native request of each input, without its prompt and output options. With several inputs, a number
                is added to its request id.
            pooling: How to pool; None for the pooling that the model was trained for.
            prompt_name: The prompt of the model to put before texts; None for its default one, if it has any.
            timeout_s: Time left until the call's deadline.
            key: The idempotency key that the request id was derived from; empty if there is none.
            truncate: Number of tokens to which inputs are truncated, keeping their start; -1 means as many as the model
                takes, and None means that longer inputs are refused.

        Raises:
            MidstreamError: An input failed; the others are aborted.
        """
        self._check_modules()
        pooling = pooling or self._own_pooling()
        if pooling not in _OF_DECODERS and not self._model.is_encoder:
            raise UnsupportedError("must be last or mean for a model that is not an encoder", field="pooling")
        inputs = self._with_prompt(inputs, prompt_name, pooling)
        if shape.dimensions is not None and not 1 <= shape.dimensions <= self._model.hidden_size:
            raise InvalidArgumentError(f"must be in 1..{self._model.hidden_size}", field="dimensions")
        gathers = pooling is Pooling.MEAN and not self._model.is_encoder

        async def read(values: Vector, usage: Usage) -> Vector:
            num_states = usage.prompt_tokens if gathers else 1
            if len(values) != num_states * self._model.hidden_size:
                raise ExecutionError("the request ended without its hidden states")
            # The hidden states of a long input have millions of values, so a thread processes them.
            return shape.of(await asyncio.to_thread(_mean, values, num_states))

        name = POOLED_STATES[pooling.mode] if self._model.is_encoder else self._output
        output = pb.AdditionalOutput(name=name, gather_context=gathers)
        return await self._compute(base, inputs, output, read, timeout_s, key, truncate)

    async def classify(
        self, base: pb.GenerateRequest, inputs: Sequence[EmbedInput], key: str = "", truncate: int | None = None
    ) -> tuple[list[Vector], Usage]:
        """Return the scores of the classes for each input, and the total usage; arguments and errors are those of
        `embed`.
        """

        self._check_modules()

        async def read(values: Vector, usage: Usage) -> Vector:
            return values

        output = pb.AdditionalOutput(name=CLASS_SCORES)
        return await self._compute(base, inputs, output, read, None, key, truncate)

    def _check_modules(self) -> None:
        if self._encoder.other_modules:
            modules = ", ".join(self._encoder.other_modules)
            raise UnsupportedError(
                f"the results of this model need modules that are not computed: {modules}", field="model"
            )

    def _own_pooling(self) -> Pooling:
        """Return the pooling for which the model was trained. Raises UnsupportedError if it is not supported."""
        modes, file = self._encoder.pooling, self._encoder.pooling_file
        known = [pooling for pooling in Pooling if self._model.is_encoder or pooling in _OF_DECODERS]
        if len(modes) != 1 or _POOLINGS[modes[0]] not in known:
            found = f"{file} has {' and '.join(modes)}" if modes else "modules.json has no Pooling"
            raise UnsupportedError(f"must be set to {_one_of(known)}: the model's {found}", field="pooling")
        return _POOLINGS[modes[0]]

    def _with_prompt(
        self, inputs: Sequence[EmbedInput], prompt_name: str | None, pooling: Pooling
    ) -> Sequence[EmbedInput]:
        """Return the inputs with the prompt before those that are texts. Raises an error if there is no such prompt, or
        if its tokens would have to be excluded.
        """
        encoder = self._encoder
        name = encoder.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return inputs
        if name not in encoder.prompts:
            known = ", ".join(map(repr, encoder.prompts)) or "none"
            raise InvalidArgumentError(f"must be one of the model's prompts: {known}", field="prompt_name")
        prompt = encoder.prompts[name]
        if prompt and pooling not in (Pooling.LAST, Pooling.CLS) and not encoder.includes_prompt:
            raise UnsupportedError(
                f"{encoder.pooling_file} excludes the prompt from the {pooling} (include_prompt), which is not "
                "supported",
                field="prompt_name",
            )
        return [
            EmbedInput(item.field, prompt + item.prompt) if isinstance(item.prompt, str) else item for item in inputs
        ]

    async def score(
        self,
        answers: Answers,
        base: pb.GenerateRequest,
        pairs: Sequence[Pair],
        key: str = "",
        truncate: int | None = None,
        *,
        is_raw: bool = False,
    ) -> tuple[list[float], Usage]:
        """Return the scores of the pairs and their total usage; other arguments and errors are those of `embed`.

        Args:
            is_raw: Whether to return logits, without the activation.
        """

        self._check_modules()

        async def read(values: Vector, usage: Usage) -> float:
            return answers.score(values, is_raw=is_raw)

        output = pb.AdditionalOutput(name=answers.output)
        return await self._compute(base, pairs, output, read, None, key, truncate)

    async def _compute(
        self,
        base: pb.GenerateRequest,
        inputs: Sequence[EmbedInput | Pair],
        output: pb.AdditionalOutput,
        read: Callable[[Vector, Usage], Awaitable[_T]],
        timeout_s: float | None,
        key: str,
        truncate: int | None,
    ) -> tuple[list[_T], Usage]:
        """Apply `read` to the tensor `output` of each input; return the results and the total usage."""
        if len(inputs) > MAX_INPUTS:
            raise InvalidArgumentError(
                f"has {len(inputs)} inputs; must have at most {MAX_INPUTS}", field=inputs[-1].field.split("[")[0]
            )
        found: dict[int, _T] = {}
        usages: list[Usage] = []
        waiting, longest = iter(range(len(inputs))), self._encoder.max_tokens
        limit = self._limit(truncate)
        requests = list(_requests(base, inputs, output, limit, is_kept=bool(key)))

        async def work() -> None:
            for index in waiting:
                field = inputs[index].field
                values, usage = await self._run(requests[index], field, output, timeout_s, key, limit)
                if longest is not None and usage.prompt_tokens > longest:
                    raise ContextLengthError(
                        f"has {usage.prompt_tokens} tokens; the model's max_seq_length allows {longest}", field=field
                    )
                found[index] = await read(values, usage)
                usages.append(usage)

        await run_all(work() for _ in range(min(len(inputs), _NUM_CONCURRENT)))
        prompt, cached = sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
        return [found[index] for index in range(len(inputs))], Usage(prompt, 0, cached)

    def _limit(self, truncate: int | None) -> int | None:
        """Return the number of tokens to which inputs are truncated; None if they are not."""
        if truncate is None:
            return None
        most = min(self._model.max_sequence_length - 1, self._encoder.max_tokens or self._model.max_sequence_length)
        if truncate > most:
            raise InvalidArgumentError(
                f"is {truncate}; this model takes at most {most}", field="truncate_prompt_tokens"
            )
        return most if truncate == -1 else truncate

    async def _run(
        self,
        request: pb.GenerateRequest,
        field: str,
        output: pb.AdditionalOutput,
        timeout_s: float | None,
        key: str,
        limit: int | None,
    ) -> tuple[Vector, Usage]:
        """Return the values of the tensor `output`, and the request's usage."""
        chunks: list[Chunk] = []

        async def truncate() -> None:
            options = PromptOptions(max_tokens=limit, keeps_start=True)
            request.token_ids.values[:] = await self.front.runner.prompts.token_ids(request, options)

        prepare = None if limit is None else truncate
        try:
            async with await self.front.start(request, timeout_s, key, prepare, operation="embeddings") as stream:
                while not stream.is_final:
                    chunks += await stream.take()
            stream.raise_unfinished()
        except InvalidArgumentError as error:
            if error.field not in _INPUT_FIELDS:
                raise
            raise type(error)(error.message, field=field) from None
        pieces = [piece for chunk in chunks if chunk.extras is not None for piece in chunk.extras.tensors]
        tensor = join_tensors(pieces).get(f"context_{output.name}" if output.gather_context else output.name)
        usage = chunks[-1].usage
        if tensor is None or usage is None:
            raise ExecutionError(f"the request ended without its {output.name}")
        values = array("f", tensor.data)
        if sys.byteorder == "big":
            values.byteswap()
        if not await asyncio.to_thread(_are_finite, values):
            raise ExecutionError(f"the model's {output.name} is not finite")
        return values, usage


def _requests(
    base: pb.GenerateRequest,
    inputs: Sequence[EmbedInput | Pair],
    output: pb.AdditionalOutput,
    limit: int | None,
    *,
    is_kept: bool,
) -> Iterator[pb.GenerateRequest]:
    for index, item in enumerate(inputs):
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        item.fill(request)
        if limit is not None and request.WhichOneof("input") == "token_ids":
            del request.token_ids.values[limit:]
        request.max_tokens, request.streaming = 1, False
        request.sampling.temperature = 0
        request.output.detokenize = False
        request.output.additional_outputs.append(output)
        if request.request_id and len(inputs) > 1:
            request.request_id += f"-{index}"
        if is_kept:
            keep(request)
        yield request


def _one_of(poolings: Sequence[Pooling]) -> str:
    *others, last = map(str, poolings)
    return f"{', '.join(others)} or {last}"


def _are_finite(values: Vector) -> bool:
    return all(map(math.isfinite, values))


def _mean(values: Vector, num_states: int) -> Vector:
    """Return the mean of vectors; each value is rounded only once."""
    width = len(values) // num_states
    return [math.fsum(values[column::width]) / num_states for column in range(width)]
