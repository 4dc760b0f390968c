"""Read the end of a process's log."""

from __future__ import annotations

import json
from pathlib import Path

_TAIL_BYTES = 16 << 10


def last_lines(log: Path, count: int) -> str:
    """Return the last lines; JSON lines are reduced to their level and message."""
    return "\n".join("  " + _readable(line) for line in _tail(log)[-count:])


def last_message(log: Path) -> str:
    """Return the message of the last log line; empty if there is none."""
    for line in reversed(_tail(log)):
        record = _record(line)
        if record is not None:
            return str(record.get("message", ""))
    return ""


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _record(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _readable(line: str) -> str:
    record = _record(line)
    if record is None:
        return line
    text = f"{record.get('level', '')}: {record.get('message', '')}"
    exception = record.get("exception")
    return f"{text}\n{exception}" if exception else text
