"""Embeddings: each input is a native request for one token, of which only the hidden state is used.

So inputs are batched with all other requests, their prefixes are cached, and the loss of any part is recovered from.
The vector is the model's last hidden state, normed, at the input's last token (last-token pooling), or its mean over
all tokens of the input (mean pooling, for which no cached prefix is used).
"""

from __future__ import annotations

import asyncio
import json
import math
import operator
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from midstream.chunk import Chunk, Usage
from midstream.errors import ConfigError, ExecutionError, InvalidArgumentError, MidstreamError, UnsupportedError
from midstream.extras import join_tensors
from protos import generation_pb2 as pb
from router.pipeline.generation import FrontDoor
from router.pipeline.idempotency import keep

MAX_INPUTS = 2048
# Inputs of one call that run at once.
_NUM_CONCURRENT = 64
_INPUT_FIELDS = ("input", "prompt", "token_ids")

Vector = Sequence[float]


class Pooling(StrEnum):
    """Which of an input's tokens its vector is made of."""

    LAST = "last"
    MEAN = "mean"


def pooling_of(folder: Path) -> Pooling | None:
    """Return the pooling that the model was trained for, by sentence-transformers' `1_Pooling/config.json`.

    Returns:
        None if it is neither of ours; LAST without that file.

    Raises:
        ConfigError: The file is not JSON.
    """
    file = folder / "1_Pooling" / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Pooling.LAST
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}", field="model") from None
    modes = {key.removeprefix("pooling_mode_") for key, value in config.items() if value is True}
    known = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN}
    chosen = modes & {*known, "cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"}
    return known.get(chosen.pop()) if len(chosen) == 1 else None


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One input.

    Attributes:
        field: Its name in the client's request, for errors.
        prompt: Text or token ids.
    """

    field: str
    prompt: str | Sequence[int]


@dataclass(frozen=True, slots=True)
class VectorShape:
    """How a hidden state is returned.

    Attributes:
        dimensions: Number of values, the first ones; None: all.
        normalizes: Whether they are scaled to length 1.
    """

    dimensions: int | None = None
    normalizes: bool = True

    def of(self, state: Vector) -> Vector:
        """Return the vector of a hidden state."""
        values = state[: self.dimensions]
        if not self.normalizes:
            return values
        length = math.sqrt(dot(values, values))
        return [value / length for value in values] if length > 0 else values


def dot(left: Vector, right: Vector) -> float:
    """Return the inner product."""
    return math.fsum(map(operator.mul, left, right))


class Embedder:
    """Computes embeddings for all APIs."""

    def __init__(self, front: FrontDoor) -> None:
        self.front = front
        self._model = front.runner.model
        self._output = f"hidden_states.{self._model.num_layers}"
        self._pooling = pooling_of(self._model.path)

    async def embed(
        self,
        base: pb.GenerateRequest,
        inputs: Sequence[EmbedInput],
        shape: VectorShape,
        *,
        pooling: Pooling | None = None,
        timeout_s: float | None = None,
        key: str = "",
    ) -> tuple[list[Vector], Usage]:
        """Return the vectors of the inputs and their total usage.

        Args:
            base: The native request of each input, without its prompt and output options. With several inputs, a number
                is added to its request id.
            inputs: At least one.
            shape: How each hidden state is returned.
            pooling: None: the model's own.
            timeout_s: Time left until the call's deadline.
            key: The idempotency key that the request id was derived from; empty for none.

        Raises:
            MidstreamError: An input failed; the others are aborted.
        """
        pooling = pooling or self._pooling
        if pooling is None:
            raise UnsupportedError("must be set: the model's own (1_Pooling/config.json) is not known", field="pooling")
        if len(inputs) > MAX_INPUTS:
            raise InvalidArgumentError(f"has {len(inputs)}; at most {MAX_INPUTS}", field=inputs[0].field.split("[")[0])
        if shape.dimensions is not None and not 1 <= shape.dimensions <= self._model.hidden_size:
            raise InvalidArgumentError(f"must be in 1..{self._model.hidden_size}", field="dimensions")
        requests = list(self._requests(base, inputs, pooling, is_kept=bool(key)))
        vectors: list[Vector] = [()] * len(inputs)
        usages: list[Usage] = []
        waiting = iter(range(len(inputs)))

        async def work() -> None:
            for index in waiting:
                state, usage = await self._run(requests[index], inputs[index].field, pooling, timeout_s, key)
                vectors[index] = shape.of(state)
                usages.append(usage)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(inputs), _NUM_CONCURRENT)):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            failed = errors.subgroup(MidstreamError)
            if failed is None:
                raise
            raise _first(failed) from None
        prompt, cached = sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
        return vectors, Usage(prompt, 0, cached)

    def _requests(
        self, base: pb.GenerateRequest, inputs: Sequence[EmbedInput], pooling: Pooling, *, is_kept: bool
    ) -> Iterator[pb.GenerateRequest]:
        for index, item in enumerate(inputs):
            request = pb.GenerateRequest()
            request.CopyFrom(base)
            if isinstance(item.prompt, str):
                request.prompt = item.prompt
            else:
                request.token_ids.values.extend(item.prompt)
            request.max_tokens, request.streaming = 1, False
            request.sampling.temperature = 0
            request.output.detokenize = False
            request.output.additional_outputs.add(name=self._output, gather_context=pooling is Pooling.MEAN)
            if request.request_id and len(inputs) > 1:
                request.request_id += f"-{index}"
            if is_kept:
                keep(request)
            yield request

    async def _run(
        self, request: pb.GenerateRequest, field: str, pooling: Pooling, timeout_s: float | None, key: str
    ) -> tuple[Vector, Usage]:
        chunks: list[Chunk] = []
        try:
            output = await self.front.start(request, timeout_s, key)
            async with output:
                while not output.is_final:
                    chunks += await output.take()
            output.raise_failure()
        except InvalidArgumentError as error:
            if error.field not in _INPUT_FIELDS:
                raise
            raise InvalidArgumentError(error.message, field=field) from None
        pieces = [piece for chunk in chunks if chunk.extras is not None for piece in chunk.extras.tensors]
        is_mean = pooling is Pooling.MEAN
        tensor = join_tensors(pieces).get(f"context_{self._output}" if is_mean else self._output)
        usage = chunks[-1].usage
        num_states = usage.prompt_tokens if is_mean and usage is not None else 1
        if tensor is None or usage is None or len(tensor.data) != 4 * num_states * self._model.hidden_size:
            raise ExecutionError("the request ended without its hidden states")
        # A long input has millions of values.
        state = await asyncio.to_thread(_mean, tensor.data, num_states)
        if not all(map(math.isfinite, state)):
            raise ExecutionError("the model's hidden state is not finite")
        return state, usage


def _mean(data: bytes, num_states: int) -> Vector:
    """Return the mean of float32 vectors, rounded once for each value."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    width = len(values) // num_states
    return [math.fsum(values[column::width]) / num_states for column in range(width)]


def _first(errors: BaseExceptionGroup[MidstreamError]) -> MidstreamError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MidstreamError)
    return error
