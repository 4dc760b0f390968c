"""Logs each ended request with its id: failures always, others depending on the log level; and requests that move to
another kind of workers.
"""

from __future__ import annotations

import logging

from scheduler.core.effects import Accepted, Effect, KindSet, RequestEnded
from scheduler.core.events import Event
from scheduler.core.request import FinishReason, Request

logger = logging.getLogger(__name__)


def log_requests(_: Event, effects: list[Effect]) -> None:
    """Log the requests that an event accepted or ended."""
    for effect in effects:
        if isinstance(effect, RequestEnded):
            _log_end(effect.request)
        elif isinstance(effect, KindSet) and effect.has_changed:
            extra = {"request_id": effect.request.request_id, "kind": effect.kind.name, "from_token": effect.changed_at}
            logger.warning("a request continues on another kind of workers: %s", effect.kind.description, extra=extra)
        elif isinstance(effect, Accepted) and not effect.is_attached:
            logger.debug("accepted a request", extra={"request_id": effect.request.request_id})


def _log_end(request: Request) -> None:
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
