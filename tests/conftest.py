from __future__ import annotations

import pytest

_REAL_PROCESSES = "tests/integration/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: whole services start only when their parts work."""
    items.sort(key=lambda item: item.nodeid.startswith(_REAL_PROCESSES))
