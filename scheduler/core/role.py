"""Roles of worker groups."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """A prefill group computes prompts and hands the requests over; a decode group takes over such requests.

    Roles are preferences: while no group of one kind can run a request, a group of the other kind does all of its work.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
