"""The models behind one router: reads and writes the TOML file with a table for each."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from midstream.config.router import RouterConfig
from midstream.errors import ConfigError

_REQUIRED = ("model", "schedulers", "detokenizers")
_OPTIONAL = (
    "model_aliases", "generation_config", "tool_parser", "reasoning_parser", "adapter_root", "update_root",
)  # fmt: skip
_DEFAULTS = {item.name: item for item in dataclasses.fields(RouterConfig)}


def model_configs(config: RouterConfig) -> list[RouterConfig]:
    """Return the settings of each model behind a router, the first one's first; `served_model_name` is its name, if
    that is set.

    Raises:
        ConfigError: The file cannot be read, or an entry in it is invalid.
    """
    if not config.models:
        return [config]
    for name in ("served_model_name", *_REQUIRED, *_OPTIONAL):
        if getattr(config, name) != _DEFAULTS[name].default:
            raise ConfigError("must not be set together with --models, whose file sets it for each model", field=name)
    try:
        tables = tomllib.loads(Path(config.models).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {config.models}: {error.strerror}", field="models") from None
    except ValueError as error:
        raise ConfigError(f"{config.models} is not TOML: {error}", field="models") from None
    if not tables:
        raise ConfigError(f"{config.models} has no model", field="models")
    found = [_model_config(config, name, table) for name, table in tables.items()]
    _check_apart(found)
    return found


def aliases_of(config: RouterConfig) -> tuple[str, ...]:
    """Return the other names of a model."""
    return tuple(name.strip() for name in config.model_aliases.split(",") if name.strip())


def write_models(path: Path, tables: Mapping[str, Mapping[str, str]]) -> None:
    """Write a file that `model_configs` reads."""
    # Texts of TOML are written as those of JSON.
    lines = []
    for name, table in tables.items():
        lines += [f"[{_text(name)}]", *(f"{key} = {_text(value)}" for key, value in table.items()), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _model_config(config: RouterConfig, name: str, table: object) -> RouterConfig:
    place = f"models[{name}]"
    if not isinstance(table, dict):
        raise ConfigError("must be a table: [NAME], and its settings below it", field=place)
    for key, value in table.items():
        if key not in _REQUIRED + _OPTIONAL:
            close = difflib.get_close_matches(key, _REQUIRED + _OPTIONAL, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(_REQUIRED + _OPTIONAL)}"
            raise ConfigError(f"has no setting {key!r}{hint}", field=place)
        if not isinstance(value, str):
            raise ConfigError(f"is {value!r}; must be a text", field=f"{place}.{key}")
        choices = _DEFAULTS[key].metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"{value!r} is not one of {', '.join(choices)}", field=f"{place}.{key}")
    for key in _REQUIRED:
        if not table.get(key):
            raise ConfigError("must be set", field=f"{place}.{key}")
    if not name:
        raise ConfigError("a model needs a name", field="models")
    return dataclasses.replace(config, served_model_name=name, **table)


def _check_apart(configs: list[RouterConfig]) -> None:
    """Raise ConfigError if two models have the same name or the same component."""
    owners: dict[tuple[str, str], str] = {}
    for config in configs:
        own = config.served_model_name
        names = [("names", name) for name in dict.fromkeys((own, *aliases_of(config)))]
        for kind in ("schedulers", "detokenizers"):
            names += [(kind, item.strip()) for item in getattr(config, kind).split(",") if item.strip()]
        for key in names:
            other = owners.setdefault(key, own)
            if other != own:
                raise ConfigError(f"{key[1]!r} is among the {key[0]} of {other!r} as well", field=f"models[{own}]")
