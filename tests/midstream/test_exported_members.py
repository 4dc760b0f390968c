"""The public packages export the names that they import for users, and no others."""

from __future__ import annotations

from types import ModuleType

import pytest

import midstream.client
import midstream.executor

PUBLIC = [midstream.client, midstream.executor]


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: str(package.__name__))
def test_all_public_names_are_exported(package: ModuleType) -> None:
    names = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    names |= {name for name in package.__all__ if isinstance(getattr(package, name), ModuleType)}
    assert set(package.__all__) == names


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: str(package.__name__))
def test_exported_classes_are_documented(package: ModuleType) -> None:
    assert len(package.__all__) == len(set(package.__all__))
    classes = [getattr(package, name) for name in package.__all__ if isinstance(getattr(package, name), type)]
    assert classes
    assert [item.__name__ for item in classes if not item.__doc__] == []
