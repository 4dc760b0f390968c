"""Router discovery, and the flags shared by all commands that talk to a service."""

from __future__ import annotations

import argparse

from midstream.cli.credentials import add_credentials, credentials_of
from midstream.cli.run_dir import RunDir, not_running, orphans
from midstream.cli.up import add_run_dir
from midstream.client import AsyncClient, SamplingParams
from midstream.errors import UnavailableError
from midstream.rpc.target import check_target


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the service."""
    parser.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help="Address of a router; repeatable. [the routers started by `midstream up`]",
    )
    add_credentials(parser)
    add_run_dir(parser)


def add_sampling(parser: argparse.ArgumentParser, *, temperature: float | None, max_tokens: int) -> None:
    """Add the sampling and stop flags; for a flag that is not given (None), the service's default applies."""
    parser.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"[{max_tokens}]")
    default = "the model's" if temperature is None else str(temperature)
    parser.add_argument("--temperature", type=float, default=temperature, metavar="T", help=f"0 is greedy. [{default}]")
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="Sample from the most likely tokens up to this cumulative probability. [model default]",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="Sample from the K most likely tokens; 0: all. [model default]"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="Sample only from tokens that are at least P times as likely as the most likely one. [model default]",
    )
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="Values above 1 discourage repetition. [model default]"
    )
    parser.add_argument(
        "--presence-penalty", type=float, metavar="P", help="Penalty on each token already generated. [0]"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, metavar="P", help="Penalty per occurrence of each generated token. [0]"
    )
    parser.add_argument(
        "--no-repeat-ngram-size", type=int, metavar="N", help="Never repeat a sequence of N tokens; 0: no limit. [0]"
    )
    parser.add_argument("--min-tokens", type=int, metavar="N", help="Generate at least N tokens. [0]")
    parser.add_argument("--seed", type=int, metavar="N", help="Seed for reproducible sampling. [random]")
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
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        no_repeat_ngram_size=arguments.no_repeat_ngram_size,
        min_tokens=arguments.min_tokens,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        bad_words=tuple(arguments.bad_word),
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
    """Return a client of the selected service; the caller closes it.

    Raises:
        UnavailableError: No service is running.
        ConfigError: The certificates or the token cannot be used.
    """
    return AsyncClient(router_addresses(arguments), **credentials_of(arguments))
