"""`python -m tests.integration.wrong_worker`: a worker with a wrong weight in memory, and the identity of its files."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from gpu_worker.__main__ import main
from gpu_worker.models.loader import load_model


def _load_wrong(*arguments: Any) -> Any:
    model: Any = load_model(*arguments)
    model.decoder._layers[-1].weights.ffn_norm[3] += 0.01
    return model


if __name__ == "__main__":
    with mock.patch("gpu_worker.model_runner.load_model", _load_wrong):
        sys.exit(main())
