"""The feature table: which features work with which model family and which API."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("features.toml")
PAGE = Path(__file__).parents[2] / "docs" / "features.md"
WORKS, NOT_APPLICABLE = "works", "-"
_HEAD = """# Features

This page shows which features a request may use with each family of models and through each API. It is generated
from `tests/features/features.toml` by `python -m tests.features`. Tests verify every cell: every family with a tiny
random model (`tests/features/test_families.py`), and every API on a real service, whose response must equal that
of the native call (`tests/integration/test_feature_apis.py`).

- ✓ means that the feature works.
- ✗ means that it is rejected with `UNIMPLEMENTED`, or with the given status, and that the error names the field.
- – means that it does not apply: the protocol has no field for it, or the feature does not involve the model.

Families marked (t) use the transformers implementation, and the others use our own. [requests.md](requests.md)
describes the features, and [adapters.md](adapters.md) the APIs.

"""
_SIGNS = {WORKS: "✓", NOT_APPLICABLE: "–", "refused": "✗", "refused UNIMPLEMENTED": "✗"}


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    Attributes:
        families, apis: The row's cells, by the name of the model family or API.
    """

    name: str
    title: str
    families: dict[str, str]
    apis: dict[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """The whole table, with the titles of its columns."""

    families: dict[str, str]
    apis: dict[str, str]
    features: dict[str, Feature]


def read() -> Table:
    """Return the table from its data file."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    families, apis = data["families"], data["apis"]
    return Table(families, apis, {name: _feature(name, row, families, apis) for name, row in data["features"].items()})


def _feature(name: str, row: dict[str, Any], families: dict[str, str], apis: dict[str, str]) -> Feature:
    refused = row.get("refused_families", [])
    usual = row.get("families", WORKS)
    cells = {family: "refused" if family in refused else usual for family in families}
    return Feature(name, row["title"], cells, dict(zip(apis, row["apis"], strict=True)))


def page() -> str:
    """Return the text of docs/features.md."""
    table = read()
    titles = [*table.families.values(), *table.apis.values()]
    lines = [f"| feature | {' | '.join(titles)} |", f"| --- |{' :---: |' * len(titles)}"]
    for feature in table.features.values():
        cells = [*feature.families.values(), *feature.apis.values()]
        lines.append(f"| {feature.title} | {' | '.join(_sign(cell) for cell in cells)} |")
    return _HEAD + "\n".join(lines) + "\n"


def _sign(cell: str) -> str:
    return _SIGNS.get(cell) or f"✗ `{cell.removeprefix('refused ')}`"
