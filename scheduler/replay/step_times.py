"""Times of recorded steps, and how well a cost model predicts them."""

from __future__ import annotations

from array import array

from scheduler.core.cost_model import CostFit, CostModel
from scheduler.replay.measures import quantile


class StepTimes:
    """Recorded steps.

    Attributes:
        fit: The cost model that is fitted to them.
    """

    def __init__(self) -> None:
        self.fit = CostFit()
        self._steps: array[float] = array("d")  # context tokens, generating rows and microseconds of each step

    def add(self, num_context_tokens: int, num_generation_rows: int, duration_us: float) -> None:
        """Add a step."""
        self.fit.add(num_context_tokens, num_generation_rows, duration_us)
        self._steps.extend((num_context_tokens, num_generation_rows, duration_us))

    def __len__(self) -> int:
        return self.fit.num_steps

    def error_of(self, model: CostModel) -> tuple[float, float, float]:
        """Return by which share of the measured time a step's prediction is wrong, as median and 95th percentile, and
        by which share the predicted sum of all steps exceeds the measured one.
        """
        steps = iter(self._steps)
        errors, measured, predicted = [], 0.0, 0.0
        for tokens, rows, duration_us in zip(steps, steps, steps, strict=True):
            expected_us = model.step_ns(int(tokens), int(rows)) / 1_000
            measured, predicted = measured + duration_us, predicted + expected_us
            if duration_us > 0:
                errors.append(abs(expected_us / duration_us - 1))
        return quantile(errors, 0.5), quantile(errors, 0.95), predicted / measured - 1 if measured else 0.0
