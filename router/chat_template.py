"""Renders a model's chat template: Jinja from a model folder, which is not trusted.

It runs in a sandbox without access to Python's objects, and within limits of time and size that are checked wherever a
template can spend them: in ranges, calls, look-ups, arithmetic on strings, and at each piece of output.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from midstream.errors import ConfigError, InvalidArgumentError

_TIME_LIMIT_S = 1.0
_MAX_OUTPUT_CHARACTERS = 8 << 20
_MAX_OPERAND = 1 << 20
_MAX_TEMPLATE_CHARACTERS = 1 << 20


class _LimitError(Exception):
    """The template took too long or wrote too much."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._local = threading.local()
        self.globals = {
            "range": self._range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": self.globals["namespace"],
            "dict": dict,
        }
        self.filters["tojson"] = _to_json

    def start_clock(self) -> None:
        """Gives this thread's rendering its time."""
        self._local.deadline = time.monotonic() + _TIME_LIMIT_S

    def check_clock(self) -> None:
        """Raises _LimitError once the time is over."""
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            raise _LimitError(f"takes longer than {_TIME_LIMIT_S:g} s")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check_clock()
        for operand in (left, right):
            too_large = isinstance(operand, int | float) and abs(operand) > _MAX_OPERAND
            if operator in ("*", "**") and (too_large or (hasattr(operand, "__len__") and len(operand) > 4096)):
                raise _LimitError("multiplies something too large")
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise _LimitError("raises to too high a power")
        result = super().call_binop(context, operator, left, right)
        if hasattr(result, "__len__") and len(result) > _MAX_OUTPUT_CHARACTERS:
            raise _LimitError("builds something too large")
        return result

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_clock()
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def _range(self, *bounds: int) -> Iterator[int]:
        for value in range(*bounds):
            self.check_clock()
            yield value


class ChatTemplate:
    """A compiled chat template; safe to use from several threads."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compiles it.

        Args:
            source: Jinja.
            tokens: Variables such as `bos_token` that templates expect.

        Raises:
            ConfigError: It does not compile.
        """
        if len(source) > _MAX_TEMPLATE_CHARACTERS:
            raise ConfigError("the chat template is too large", field="model")
        self._environment = _Environment()
        self._tokens = dict(tokens)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise ConfigError(f"the chat template does not compile: {error}", field="model") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidArgumentError: The template refuses the conversation, fails on it, or passes its limits.
        """
        values: dict[str, object] = {**self._tokens, **(variables or {})}
        values.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        self._environment.start_clock()
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(values):
                self._environment.check_clock()
                size += len(part)
                if size > _MAX_OUTPUT_CHARACTERS:
                    raise _LimitError("writes too much")
                parts.append(part)
        except _LimitError as error:
            raise InvalidArgumentError(f"the model's chat template {error}", field="chat") from error
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(f"the model's chat template refuses: {error}", field="chat") from error
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidArgumentError(f"the model's chat template fails: {error}", field="chat") from error
        return "".join(parts)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


def _to_json(value: object, *, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own escapes for HTML, which a prompt is not.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
