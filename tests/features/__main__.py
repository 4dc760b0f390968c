"""Write docs/features.md and docs/models.md."""

from __future__ import annotations

from tests.features import models_page
from tests.features.table import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
models_page.PAGE.write_text(models_page.page(), encoding="utf-8")
