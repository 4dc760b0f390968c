"""Logs each ended request with its id: failures always, others depending on the log level; and requests that move to
another kind of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from scheduler.core.effects import Accepted, Effect, KindSet, RequestEnded
from scheduler.core.events import Event
from scheduler.core.request import FinishReason

logger = logging.getLogger(__name__)


def log_requests(_: Event, effects: list[Effect]) -> None:
    """Log the requests that an event accepted or ended."""
    for effect in effects:
        log = _LOGS.get(type(effect))
        if log is not None:
            log(effect)


def _log_accepted(effect: Accepted) -> None:
    if not effect.is_attached:
        logger.debug("accepted a request", extra={"request_id": effect.request.request_id})


def _log_kind(effect: KindSet) -> None:
    if effect.has_changed:
        extra = {"request_id": effect.request.request_id, "kind": effect.kind.name, "from_token": effect.changed_at}
        logger.warning("a request continues on another kind of workers: %s", effect.kind.description, extra=extra)


def _log_end(effect: RequestEnded) -> None:
    request = effect.request
    found = [sequence.end.reason for sequence in request.sequences if sequence.end is not None]
    level = logging.WARNING if FinishReason.ERROR in found else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    failure, reasons = request.failure, sorted({reason.name.lower() for reason in found})
    logger.log(
        level,
        "a request ended: %s",
        failure.message if failure is not None else ", ".join(reasons),
        extra={
            "request_id": request.request_id,
            "finish_reason": ",".join(reasons),
            "num_tokens": request.num_output_tokens,
            "num_preemptions": request.counters.num_preemptions,
            "num_recoveries": request.counters.num_recoveries,
            "num_kind_changes": request.counters.num_kind_changes,
        },
    )


_LOGS: dict[type[Any], Callable[[Any], None]] = {Accepted: _log_accepted, KindSet: _log_kind, RequestEnded: _log_end}
