"""Run a model's chat template in a separate process: `python -m router.pipeline.template_renderer`.

Templates come with models and are not trusted. Jinja's sandbox isolates them from Python's objects; this process limits
the effect of a sandbox escape: its memory, output and CPU time per rendering are limited, and it cannot open files or
sockets. It reads the template once, then renders conversations until its input ends.

A message in either direction consists of four bytes with the length, followed by JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

import jinja2
import jinja2.debug  # Jinja imports this module on errors, when files can no longer be opened
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_LIMIT_S = 1.0
MEMORY_LIMIT_BYTES = 512 << 20
MAX_OUTPUT_CHARACTERS = 8 << 20
LENGTH = struct.Struct("<I")


class _GenerationBlocks(Extension):
    """Accepts blocks of `{% generation %}`, which mark the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block has its own scope, as in transformers.
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class Renderer:
    """One compiled chat template."""

    def __init__(self, source: str) -> None:
        # The extensions, filters and functions that transformers gives to templates.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, object]) -> dict[str, str]:
        """Return the rendered `text`, or an `error`."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_OUTPUT_CHARACTERS:
                    return {"error": "produces too much output"}
                parts.append(part)
            return {"text": "".join(parts)}
        except jinja2.TemplateError as error:
            return {"error": f"refuses: {str(error)[:500]}"}
        except MemoryError:
            parts.clear()
            return {"error": "uses too much memory"}
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            return {"error": f"fails: {str(error)[:500] or type(error).__name__}"}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would be wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _confine() -> None:
    # Trigger errors now, so that the modules that Jinja and Python import only on errors are loaded while files can
    # still be opened.
    Renderer("{% for m in messages %}{{ m.x.y | tojson }}{% endfor %}").render({"messages": [{}]})
    Renderer("{{ raise_exception('x') ~ strftime_now('%B') }}").render({})
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # files that are already open are unaffected
    ):
        resource.setrlimit(limit, (value, value))


def _read(stream_number: int) -> dict[str, object] | None:
    head = _read_exactly(stream_number, LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(stream_number, LENGTH.unpack(head)[0])
    message: dict[str, object] | None = None if body is None else json.loads(body)
    return message


def _read_exactly(stream_number: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(stream_number, size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _write(stream_number: int, message: Mapping[str, str]) -> None:
    body = json.dumps(message).encode()
    view = memoryview(LENGTH.pack(len(body)) + body)
    while view:
        view = view[os.write(stream_number, view) :]


def main() -> int:
    """Render conversations until the input ends."""
    # Only a signal can interrupt a rendering that is stuck in one call; this one kills the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _confine()
    renderer: Renderer | None = None
    while (message := _read(0)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        if renderer is None:
            try:
                renderer = Renderer(str(message["source"]))
                answer = {"text": ""}
            except Exception as error:  # noqa: BLE001 (as above)
                answer = {"error": f"does not compile: {str(error)[:500] or type(error).__name__}"}
        else:
            answer = renderer.render(message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(1, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
