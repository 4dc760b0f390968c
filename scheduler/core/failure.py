"""Failures of the core, with gRPC status codes as plain numbers because the core does not import gRPC."""

from __future__ import annotations

from midstream.record import record

INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
ALREADY_EXISTS = 6
RESOURCE_EXHAUSTED = 8
INTERNAL = 13
UNAVAILABLE = 14


@record
class Failure:
    """Why a request was rejected or ended in error. `code` is a gRPC status code."""

    code: int
    message: str
    field: str = ""
