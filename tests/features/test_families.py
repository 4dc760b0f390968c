"""Every cell of the feature table for a model family, and the generated page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.features import models_page, proofs
from tests.features.families import CHECKS, MODELS, POST_PROCESSORS, Family, outcome
from tests.features.table import NOT_APPLICABLE, PAGE, page, read

TABLE = read()


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Family]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(POST_PROCESSORS)
        family = Family(request.param, tmp_path_factory.mktemp(request.param))
        yield request.param, family
        family.close()


@pytest.mark.parametrize("feature", CHECKS)
def test_a_feature_of_a_family(family: tuple[str, Family], feature: str) -> None:
    name, model = family
    assert outcome(model, feature) == TABLE.features[feature].families[name]


def test_every_cell_is_run() -> None:
    assert set(MODELS) == set(TABLE.families)
    applicable = {name for name, row in TABLE.features.items() if set(row.families.values()) != {NOT_APPLICABLE}}
    assert applicable == set(CHECKS)


def test_the_pages_are_the_generated_ones() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.features`"
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(), "run `python -m tests.features`"


def test_the_page_is_linked() -> None:
    docs = Path(PAGE).parent
    assert "features.md" in (docs / "requests.md").read_text(encoding="utf-8")


def test_every_family_is_compared_with_transformers() -> None:
    for title, on_cpu, *_ in proofs.rows():
        assert on_cpu != "no", title
