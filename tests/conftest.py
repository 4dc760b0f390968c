from __future__ import annotations

import os

import pytest

# Triton's kernels run in its interpreter here. It reads this when it is first imported, by whichever package that is.
os.environ["TRITON_INTERPRET"] = "1"

_REAL_PROCESSES = "tests/integration/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: whole services start only when their parts work."""
    items.sort(key=lambda item: item.nodeid.startswith(_REAL_PROCESSES))
