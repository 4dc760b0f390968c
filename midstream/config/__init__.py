"""Configuration of all services: one frozen dataclass per service, filled from flags and MIDSTREAM_* variables."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from midstream.config.detokenizer import DetokenizerConfig
from midstream.config.loading import parse_config
from midstream.config.router import RouterConfig
from midstream.config.scheduler import SchedulerConfig
from midstream.config.service import ServiceConfig
from midstream.config.worker import WorkerConfig
from midstream.errors import ConfigError

__all__ = [
    "API_KEY_VARIABLE",
    "KNOWN_SETTINGS",
    "DetokenizerConfig",
    "RouterConfig",
    "SchedulerConfig",
    "WorkerConfig",
    "check_environment",
    "load_config",
    "parse_config",
]

ServiceConfigT = TypeVar("ServiceConfigT", bound=ServiceConfig)

# The key that clients send, and that `midstream serve` requires.
API_KEY_VARIABLE = "MIDSTREAM_API_KEY"
# Services may share an environment, so the variables of all services are allowed; so are MIDSTREAM_HOME (model cache),
# MIDSTREAM_TOKEN_FILE and MIDSTREAM_API_KEY (command line and clients).
_CONFIG_CLASSES: tuple[type[ServiceConfig], ...] = (RouterConfig, SchedulerConfig, WorkerConfig, DetokenizerConfig)
KNOWN_SETTINGS = frozenset(
    item.name for config_class in _CONFIG_CLASSES for item in dataclasses.fields(config_class)
) | {"home", "token_file", "api_key"}


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown or invalid variable."""
    for config_class in _CONFIG_CLASSES:
        parse_config(config_class, (), environment, program="midstream", known=KNOWN_SETTINGS)


def load_config(
    config_class: type[ServiceConfigT], program: str, arguments: Sequence[str] | None = None
) -> ServiceConfigT:
    """Return the configuration of a service, from `arguments`, by default those of this process, and the environment.
    Raises ConfigError if a variable is unknown, or a value cannot be parsed.
    """
    if os.environ.get(API_KEY_VARIABLE):  # ignored, it would leave routers open to everyone
        raise ConfigError(
            "is the key that clients send; a router has its keys in a file: MIDSTREAM_AUTH=token and "
            "MIDSTREAM_AUTH_TOKENS=FILE, with lines of KEY CLIENT_ID",
            field=API_KEY_VARIABLE,
        )
    words = sys.argv[1:] if arguments is None else arguments
    return parse_config(config_class, words, os.environ, program=program, known=KNOWN_SETTINGS)
