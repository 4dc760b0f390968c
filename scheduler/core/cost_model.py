"""Predicts how long a step takes: a fixed time, a time per context token, and a time per generating row.

It is fitted to recorded steps by least squares; no coefficient is negative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Round-trip time to the worker.
WIRE_US = 200.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in microseconds; the defaults are typical of a small model on a large GPU.

    Attributes:
        block_us: Time to move a KV block from a prefill to a decode worker.
    """

    step_us: float = 4_000.0
    context_token_us: float = 15.0
    generation_row_us: float = 20.0
    wire_us: float = WIRE_US
    block_us: float = 300.0

    def step_ns(self, num_context_tokens: int, num_generation_rows: int) -> int:
        """Return the compute time of a step."""
        cost = self.context_token_us * num_context_tokens + self.generation_row_us * num_generation_rows
        return int(1_000 * (self.step_us + cost))


@dataclass(slots=True)
class StepExtent:
    """The largest of some steps."""

    num_context_tokens: int = 0
    num_generation_rows: int = 0

    def add(self, num_context_tokens: int, num_generation_rows: int) -> None:
        """Add a step."""
        self.num_context_tokens = max(self.num_context_tokens, num_context_tokens)
        self.num_generation_rows = max(self.num_generation_rows, num_generation_rows)


class CostFit:
    """A least-squares fit to recorded steps, in constant memory.

    Attributes:
        extent: The largest of these steps; the costs of larger ones are extrapolated.
    """

    def __init__(self, kept_weight: float = 1.0) -> None:
        """Create an empty fit; with `kept_weight` below 1, each new step multiplies the weight of all earlier steps by
        it.
        """
        self.num_steps = 0
        self.extent = StepExtent()
        self._kept_weight = kept_weight
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3

    def add(self, num_context_tokens: int, num_generation_rows: int, duration_us: float) -> None:
        """Add a recorded step."""
        self.num_steps += 1
        self.extent.add(num_context_tokens, num_generation_rows)
        kept, targets = self._kept_weight, self._targets
        features = (1.0, float(num_context_tokens), float(num_generation_rows))
        first, second, third = features
        for row, left in enumerate(features):
            targets[row] = targets[row] * kept + left * duration_us
            products = self._products[row]
            products[:] = (
                products[0] * kept + left * first,
                products[1] * kept + left * second,
                products[2] * kept + left * third,
            )

    def model(self, wire_us: float = WIRE_US) -> CostModel:
        """Return the best-fitting model without negative coefficients; the default model if no steps were added."""
        if not self.num_steps:
            return CostModel(wire_us=wire_us)
        used = [index for index in range(3) if self._products[index][index] > 0]
        while True:
            values = dict(zip(used, self._solve(used), strict=True))
            negative = [index for index in used if values[index] < 0]
            if not negative:
                return CostModel(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0), wire_us)
            used = [index for index in used if index not in negative]

    def _solve(self, used: Iterable[int]) -> list[float]:
        """Solve the normal equations for some features, with a small ridge term in case all steps are equal."""
        rows = list(used)
        matrix = [[self._products[r][c] * (1 + 1e-9 * (r == c)) for c in rows] + [self._targets[r]] for r in rows]
        for pivot in range(len(rows)):
            for row in range(len(rows)):
                if row != pivot:
                    factor = matrix[row][pivot] / matrix[pivot][pivot]
                    matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
        return [matrix[index][-1] / matrix[index][index] for index in range(len(rows))]
