"""Messages between a service and its grammar process, sent with midstream.socket_messages."""

from __future__ import annotations

from dataclasses import dataclass

# The exit status of a grammar process for which a guide took too long.
OVERRUN_STATUS = 75
READY, WAITING, OVERRUN = "ready", "waiting", "overrun"


@dataclass(frozen=True, slots=True)
class Guide:
    """Constraint on the output.

    Attributes:
        kind: One of json, json_schema, regex and ebnf.
        text: Schema, expression or grammar; empty for json.
    """

    kind: str
    text: str = ""
