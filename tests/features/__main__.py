"""Writes docs/features.md."""

from __future__ import annotations

from tests.features.table import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
