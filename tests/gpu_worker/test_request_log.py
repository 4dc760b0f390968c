"""Log lines about single requests."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from gpu_worker.batch.step import NewSequence, SamplingParams, Step, StepOutput
from gpu_worker.scheduler_link.request_log import RequestLog
from midstream.errors import InvalidArgumentError, MidstreamError, UnavailableError
from tests.gpu_worker.tiny_models import ints


def output(*errors: tuple[int, MidstreamError]) -> StepOutput:
    return StepOutput(np.zeros(0, dtype=np.int32), (), errors, 0.0)


def added(row: int, request_id: str) -> Step:
    new = NewSequence(
        row=row, token_ids=ints([1]), num_prompt_tokens=1, sampling=SamplingParams(), request_id=request_id
    )
    return Step(new_sequences=(new,))


def test_a_sequence_that_fails_is_logged_once_and_one_that_is_retried_only_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, wrong = RequestLog(), InvalidArgumentError("is wrong")
    with caplog.at_level(logging.INFO):
        log.note(added(0, "retried"))
        log.note_failures(output((0, UnavailableError("is not ready"))))
        log.note_failures(output((0, wrong)))  # in the next step, as a consequence of the first failure
        log.note(added(0, "failed"))
        log.note_failures(output((0, wrong)))
        log.note_failures(output((0, wrong)))
    assert [(record.levelname, record.request_id) for record in caplog.records] == [("WARNING", "failed")]  # type: ignore[attr-defined]
