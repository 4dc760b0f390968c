"""Router discovery, and the flags shared by all commands that talk to a service."""

from __future__ import annotations

import argparse

from midstream.cli.credentials import add_credentials, credentials_of
from midstream.cli.run_dir import RunDir, not_running, orphans
from midstream.cli.up import add_run_dir
from midstream.client import AsyncClient, SamplingParams
from midstream.errors import UnavailableError
from midstream.rpc.target import check_target

# Sampling parameters that are unset by default: name, type, placeholder and help of the flag.
_SAMPLING = (
    ("temperature", float, "T", "0 is greedy. [model default]"),
    ("top_p", float, "P", "Sample from the most likely tokens up to this cumulative probability. [model default]"),
    ("top_k", int, "K", "Sample from the K most likely tokens; 0: all. [model default]"),
    ("min_p", float, "P", "Sample only from tokens at least P times as likely as the most likely one. [model default]"),
    ("repetition_penalty", float, "R", "Values above 1 discourage repetition. [model default]"),
    ("presence_penalty", float, "P", "Penalty on each token already generated. [0]"),
    ("frequency_penalty", float, "P", "Penalty per occurrence of each generated token. [0]"),
    ("no_repeat_ngram_size", int, "N", "Never repeat a sequence of N tokens; 0: no limit. [0]"),
    ("min_tokens", int, "N", "Generate at least N tokens. [0]"),
    ("seed", int, "N", "Seed for reproducible sampling. [random]"),
)


def add_connection(parser: argparse._ActionsContainer) -> None:
    """Add the flags that select the service."""
    parser.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help="Address of a router; repeatable. [the routers started by `midstream up`]",
    )
    add_credentials(parser)
    add_run_dir(parser)


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the sampling and stop flags; for a flag that is not given (None), the service's default applies."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"[{max_tokens}]")
    for name, kind, metavar, text in _SAMPLING:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="Stop before this text; repeatable."
    )
    parser.add_argument("--bad-word", action="append", default=[], metavar="TEXT", help="Text to forbid; repeatable.")
    parser.add_argument("--lora", default="", metavar="NAME", help="Name of a loaded adapter (see `midstream lora`).")
    parser.add_argument("--system", default="", metavar="TEXT", help="System message, for models with a chat template.")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters given by the flags of `add_sampling`."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        bad_words=tuple(arguments.bad_word),
        **{name: getattr(arguments, name) for name, *_ in _SAMPLING},
    )


def router_addresses(arguments: argparse.Namespace) -> list[str]:
    """Return the addresses of the routers.

    Raises:
        InvalidArgumentError: An address is not HOST:PORT.
        UnavailableError: No address was given and no service is running.
    """
    if arguments.address:
        return [check_target(address) for address in arguments.address]
    run_dir = RunDir(arguments.run_dir)
    state = run_dir.read_state()
    if state is None or not (run_dir.is_supervised() or orphans(state)):
        raise UnavailableError(not_running(run_dir.path))
    return [router.addresses["grpc"] for router in state.of_kind("router")]


def open_client(arguments: argparse.Namespace) -> AsyncClient:
    """Return a client of the selected service; the caller closes it. Raises UnavailableError if no service is running,
    or ConfigError if the certificates or the token cannot be used.
    """
    return AsyncClient(router_addresses(arguments), **credentials_of(arguments))
