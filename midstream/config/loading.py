"""Fills a configuration dataclass from flags and MIDSTREAM_* variables; unknown settings are errors."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from midstream.config.service import MAX_PORT
from midstream.errors import ConfigError

ENV_PREFIX = "MIDSTREAM_"
TRUE_WORDS = ("1", "true", "yes", "on")
# Kubernetes injects these variables for every Service in the namespace.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP).*)?$")

ConfigT = TypeVar("ConfigT")


def parse_config(
    config_class: type[ConfigT],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    known: frozenset[str] = frozenset(),
) -> ConfigT:
    """Build `config_class` from flags, then variables, then defaults.

    A field `max_num_tokens` is the flag `--max-num-tokens` and the variable `MIDSTREAM_MAX_NUM_TOKENS`.

    Args:
        config_class: A frozen dataclass with `setting` fields of type str, int, float or bool.
        arguments: Command-line arguments without the program's name.
        known: Fields of other services, whose variables are allowed in a shared environment.

    Raises:
        ConfigError: A variable is unknown, or a value is invalid.
    """
    fields = {item.name: item for item in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    types = get_type_hints(config_class)
    # An abbreviation could mean another setting in a later version. The usage would list a hundred settings.
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--SETTING VALUE ...]; --help lists the settings",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for name, item in fields.items():
        flag = "--" + name.replace("_", "-")
        text, choices = item.metadata["help"], item.metadata["choices"]
        if types[name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                flag,
                type=types[name],
                choices=choices or None,
                default=argparse.SUPPRESS,
                help=f"{text} [{item.default}]",
            )
    parsed, unknown = parser.parse_known_args(arguments)  # first, so that --help works even if variables are invalid
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(flag, [f"--{name.replace('_', '-')}" for name in fields], n=1)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {close[0]}?" if close else ""))
    flags = vars(parsed)
    values = _from_environment(fields, types, environment, known | frozenset(fields)) | flags
    for name, value in values.items():
        if name.split("_")[-1] == "port" and not 0 <= value <= MAX_PORT:
            raise ConfigError(f"{value} is not a port (0..{MAX_PORT})", field=name)
    return config_class(**values)


def _from_environment(
    fields: Mapping[str, dataclasses.Field[Any]],
    types: Mapping[str, type],
    environment: Mapping[str, str],
    known: frozenset[str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in fields:
            values[name] = _parse_value(variable, text, types[name], fields[name].metadata["choices"])
        elif name not in known and not _SERVICE_LINK.search(variable):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {ENV_PREFIX}{close[0].upper()}?" if close else ""
            raise ConfigError(f"no such setting{hint}", field=variable)
    return values


def _parse_value(variable: str, text: str, kind: type, choices: tuple[str, ...]) -> Any:
    if kind is bool:
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{text!r} is not a boolean; use true or false", field=variable)
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not of type {kind.__name__}", field=variable) from None
    if choices and value not in choices:
        raise ConfigError(f"{text!r} is not one of {', '.join(choices)}", field=variable)
    return value
