"""Validates finished outputs whose schemas were not fully enforced: `strict: false`, and tools that are not `strict`.

A sequence is validated when its final chunk is taken, in an isolated process with time and memory limits, since schemas
are untrusted. A stream that does not begin with the first token, or whose request this router does not know, reads the
whole sequence again for that.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from midstream.chunk import Chunk, Validation
from midstream.errors import MidstreamError
from midstream.grammar.process import LIMIT_S, ValidationProcess
from protos import generation_pb2 as pb
from router.pipeline.fair_threads import FairThreads

_MAX_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an output that must match a schema.

    Attributes:
        name: What errors call it; empty for the whole output.
        schema: The JSON text of the schema.
        text: The part, which should be JSON.
    """

    name: str
    schema: str
    text: str


# Returns the parts of a sequence's text.
Divide = Callable[[str], list[Part]]


class Constraints(Protocol):
    """What an API demands of a request's output."""

    @property
    def divide(self) -> Divide | None:
        """Returns the parts of a text that must be validated; None if its grammar enforces everything."""

    def guide_parts(self) -> Mapping[str, pb.GuidedDecodingConfig]:
        """Return the parts of the request's guide, by field."""

    def leave_out(self, fields: Collection[str]) -> bool:
        """Change the request's guide so that these parts, which do not compile, restrict nothing. Return False if they
        must not be left out.
        """


class OutputValidator:
    """Validates outputs one at a time, and of each client in turn; the process starts with the first output."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: ValidationProcess | None = None
        self._thread = FairThreads(1, "validation")

    def close(self) -> None:
        """Stop the thread and the process."""
        self._thread.close()
        self._drop()

    async def validate(self, parts: list[Part]) -> Validation:
        """Return whether all parts match their schemas; errors may also say why this could not be found out."""
        try:
            found = await self._thread.run(lambda: self._problems(parts))
        except MidstreamError as error:
            return Validation((f"cannot be validated: {error.message}",))
        errors = [
            f"{part.name}: {problem}" if part.name else problem
            for part, problems in zip(parts, found, strict=True)
            for problem in problems
        ]
        return Validation(tuple(errors[:_MAX_ERRORS]))

    def _problems(self, parts: list[Part]) -> list[list[str]]:
        try:
            if self._process is None:
                self._process = ValidationProcess(limit_s=self._limit_s)
            return self._process.problems([(part.schema, part.text) for part in parts])
        except OSError:
            is_overrun = self._process is not None and self._process.was_overrun()
            self._drop()
            reason = f"takes more than {self._limit_s:g} s" if is_overrun else "needs too much memory"
            return [[f"cannot be validated: {reason}"], *([[]] * (len(parts) - 1))]

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class Inspection:
    """Validates the sequences of one stream."""

    def __init__(
        self,
        validator: OutputValidator,
        find: Callable[[], Awaitable[Divide | None]],
        read: Callable[[int], Awaitable[str]] | None,
    ) -> None:
        """Prepare for a stream.

        Args:
            find: Returns how to divide the output; None if there is nothing to validate.
            read: Returns the whole text of a sequence, if the stream may lack its beginning; otherwise None.
        """
        self._validator = validator
        self._find = find
        self._read = read
        self._texts: dict[int, str] = {}
        self._offsets: dict[int, int] = {}
        self._results: dict[int, Validation | None] = {}

    async def note(self, chunk: Chunk) -> None:
        """Add a chunk; set `validation` if it ends its sequence."""
        index = chunk.sequence_index
        if self._read is None and index not in self._results:
            is_repeated = bool(chunk.token_ids) and chunk.token_offset < self._offsets.get(index, 0)
            self._texts[index] = chunk.text if is_repeated else self._texts.get(index, "") + chunk.text
            self._offsets[index] = chunk.next_offset
        if not chunk.is_sequence_final or (chunk.finish_reason is not None and chunk.finish_reason.is_failure):
            return
        if index not in self._results:
            self._results[index] = await self._result(index)
        chunk.validation = self._results[index]

    async def _result(self, index: int) -> Validation | None:
        try:
            divide = await self._find()
        except MidstreamError:
            return None
        if divide is None:
            return None
        try:
            text = self._texts.pop(index, "") if self._read is None else await self._read(index)
        except MidstreamError as error:
            return Validation((f"cannot be validated: {error.message}",))
        parts = divide(text)
        return await self._validator.validate(parts) if parts else None


def divide_native(request: pb.GenerateRequest, prompt: Callable[[], str]) -> Divide | None:
    """Return how to divide the output of a native request, which is one part if its schema is lenient; None if it is
    not. `prompt` returns the text of the prompt.
    """
    guide = request.guided_decoding
    if guide.guide_type != pb.GUIDE_TYPE_JSON_SCHEMA or not is_lenient(guide.guide):
        return None
    schema = guide.guide
    is_echoed = request.output.HasField("exclude_input_from_output") and not request.output.exclude_input_from_output

    def divide(text: str) -> list[Part]:
        return [Part("", schema, text.removeprefix(prompt()) if is_echoed else text)]

    return divide


def is_lenient(schema: str) -> bool:
    """Return whether a JSON schema says that it is enforced only as far as possible."""
    if '"lenient"' not in schema:
        return False
    try:
        fields = json.loads(schema)
    except (ValueError, RecursionError):
        return False
    guidance = fields.get("x-guidance") if isinstance(fields, dict) else None
    return isinstance(guidance, dict) and bool(guidance.get("lenient"))
