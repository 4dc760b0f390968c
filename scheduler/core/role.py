"""Roles of worker groups."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """A prefill group computes prompts and hands the requests over; a decode group takes over such requests.

    Roles are preferences: while there is no group of one kind that can run a request, the other kind does all of it.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
