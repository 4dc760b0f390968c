"""Lines in the log about single requests, under their ids: what failed always, what came where it is asked for."""

from __future__ import annotations

import logging

from gpu_worker.batch.step import Step, StepOutput

logger = logging.getLogger(__name__)


class RequestLog:
    """Knows whose rows are whose."""

    def __init__(self) -> None:
        self._request_ids: dict[int, str] = {}

    def clear(self) -> None:
        """All rows are empty."""
        self._request_ids.clear()

    def note(self, step: Step) -> None:
        """Take in whose rows a step fills; before it is run."""
        ids = self._request_ids
        for new in step.new_sequences:
            ids[new.row] = new.request_id
            logger.debug("took a sequence", extra={"request_id": new.request_id, "row": new.row})
        for fork in step.forks:
            ids[fork.to_row] = ids.get(fork.from_row, "")

    def note_failures(self, output: StepOutput) -> None:
        """Say which requests failed in a step, and why."""
        for row, error in output.errors:
            logger.warning("a sequence failed: %s", error, extra={"request_id": self._request_ids.get(row, "")})

    def involved(self, step: Step) -> list[str]:
        """Requests that a step names; those that generate as in the step before are not among them."""
        rows = {*step.context_rows.tolist(), *step.generation_rows.tolist(), *(new.row for new in step.new_sequences)}
        return sorted({self._request_ids.get(row, "") for row in rows} - {""})
