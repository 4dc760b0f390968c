"""Log lines about single requests, with their ids: failures always, arrivals and retries at debug level."""

from __future__ import annotations

import logging

from gpu_worker.batch.step import Step, StepOutput
from midstream.errors import UnavailableError

logger = logging.getLogger(__name__)


class RequestLog:
    """Maps rows to the ids of requests, for logging."""

    def __init__(self) -> None:
        self._request_ids: dict[int, str] = {}
        self._failed: set[int] = set()

    def clear(self) -> None:
        """Forget all rows."""
        self._request_ids.clear()
        self._failed.clear()

    def note(self, step: Step) -> None:
        """Record the requests whose sequences a step adds to rows; called before the step runs."""
        ids = self._request_ids
        for new in step.new_sequences:
            ids[new.row] = new.request_id
            self._failed.discard(new.row)
            logger.debug("added a sequence", extra={"request_id": new.request_id, "row": new.row})
        for fork in step.forks:
            ids[fork.to_row] = ids.get(fork.from_row, "")
            self._failed.discard(fork.to_row)

    def note_failures(self, output: StepOutput) -> None:
        """Log which sequences failed in a step, and why.

        Later failures of the same sequence are consequences in steps that were already in flight.
        """
        for row, error in output.errors:
            if row not in self._failed:
                self._failed.add(row)
                level = logging.DEBUG if isinstance(error, UnavailableError) else logging.WARNING
                logger.log(level, "a sequence failed: %s", error, extra={"request_id": self._request_ids.get(row, "")})

    def involved(self, step: Step) -> list[str]:
        """Return the requests that a step names; rows that generate as in the previous step are not included."""
        rows = {*step.context_rows.tolist(), *step.generation_rows.tolist(), *(new.row for new in step.new_sequences)}
        return sorted({self._request_ids.get(row, "") for row in rows} - {""})
