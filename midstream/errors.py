"""The error hierarchy. Every user-visible error is of one of these classes; each maps to one gRPC status."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from protos import generation_pb2 as pb


class StatusCode(IntEnum):
    """gRPC status codes; they are defined here because workers run without gRPC."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class MidstreamError(Exception):
    """Base of all errors of this project.

    Attributes:
        message: A sentence that says what is wrong and what to do.
        field: Path of the request field or flag that caused the error, such as `sampling.temperature`; empty if there
            is none.
    """

    code: ClassVar[StatusCode] = StatusCode.INTERNAL

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field

    def to_proto(self) -> pb.ErrorInfo:
        """Return the error as a message."""
        from protos import generation_pb2 as pb

        return pb.ErrorInfo(code=self.code.value, message=self.message, field=self.field)


class InvalidArgumentError(MidstreamError):
    """A field of a request is out of range or conflicts with another field."""

    code = StatusCode.INVALID_ARGUMENT


class ContextLengthError(InvalidArgumentError):
    """The prompt is longer than the model's context."""


class OutOfRangeError(InvalidArgumentError):
    """An offset lies beyond the end of the output."""

    code = StatusCode.OUT_OF_RANGE


class ConfigError(InvalidArgumentError):
    """A flag, an environment variable or a model folder is invalid; the service does not start."""


class ReceiptError(InvalidArgumentError):
    """A receipt is forged or damaged, or belongs to another request or answer."""


class NotFoundError(MidstreamError):
    """The model, adapter or request does not exist."""

    code = StatusCode.NOT_FOUND


class AlreadyExistsError(MidstreamError):
    """The request id is in use by a request with different contents."""

    code = StatusCode.ALREADY_EXISTS


class OverloadedError(MidstreamError):
    """A bounded queue is full.

    Attributes:
        retry_after_ms: How long to wait before a retry; sent as the trailing metadata `retry-after-ms`.
    """

    code = StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 1000) -> None:
        super().__init__(message, field=field)
        self.retry_after_ms = retry_after_ms


class UnavailableError(MidstreamError):
    """No worker, scheduler or detokenizer can accept the request now; retrying may succeed."""

    code = StatusCode.UNAVAILABLE


class DeadlineError(MidstreamError):
    """The request's deadline passed."""

    code = StatusCode.DEADLINE_EXCEEDED


class AbortedError(MidstreamError):
    """A client ended the request."""

    code = StatusCode.CANCELLED


class ConflictError(MidstreamError):
    """Another change is being made at the same time, or a change was made only in some cells."""

    code = StatusCode.ABORTED


class UnsupportedError(MidstreamError):
    """This model or worker does not support the requested feature."""

    code = StatusCode.UNIMPLEMENTED


class UnauthenticatedError(MidstreamError):
    """Credentials are missing or wrong."""

    code = StatusCode.UNAUTHENTICATED


class PermissionDeniedError(MidstreamError):
    """The caller is authenticated but not authorized."""

    code = StatusCode.PERMISSION_DENIED


class ExecutionError(MidstreamError):
    """A request failed during execution."""


_LEAVES: tuple[type[MidstreamError], ...] = (
    InvalidArgumentError,
    OutOfRangeError,
    NotFoundError,
    AlreadyExistsError,
    OverloadedError,
    UnavailableError,
    DeadlineError,
    AbortedError,
    ConflictError,
    UnsupportedError,
    UnauthenticatedError,
    PermissionDeniedError,
    ExecutionError,
)
_BY_CODE: dict[int, type[MidstreamError]] = {leaf.code.value: leaf for leaf in _LEAVES}


def from_status(code: int, message: str, field: str = "") -> MidstreamError:
    """Return the error for a gRPC status number; ExecutionError for unknown ones."""
    return _BY_CODE.get(code, ExecutionError)(message, field=field)


def from_proto(info: pb.ErrorInfo) -> MidstreamError:
    """Convert a message to an error."""
    return from_status(info.code, info.message, info.field)
