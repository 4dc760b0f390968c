"""`midstream up` and `midstream serve`: ports, hosts, keys and hints."""

from __future__ import annotations

import argparse
import os
import re
import socket
import stat
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from rich.text import Text

from midstream.cli import chat, generate, main, other_servers
from midstream.cli.api_keys import use_api_keys
from midstream.cli.connect import sampling_of
from midstream.cli.credentials import add_credentials, credentials_of
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunDir, RunState, default_run_dir
from midstream.cli.topology import Topology, check_ports, plan_processes
from midstream.cli.up import how_to_talk
from midstream.client import AsyncClient, SamplingParams, async_client
from midstream.config import KNOWN_SETTINGS, RouterConfig, parse_config
from midstream.errors import ConfigError, InvalidArgumentError
from midstream.rpc.target import check_target, is_local, plain_problem

KEY = "a-key-of-enough-characters"


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_only_routers_listen_outside_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_HOST", "0.0.0.0")
    specs = plan_processes(Topology(host="0.0.0.0", port=0, http_port=0))
    hosts = {spec.kind: flag(spec.flags, "--host") for spec in specs}
    assert hosts == {
        "router": "0.0.0.0", "scheduler": "127.0.0.1", "gpu_worker": "127.0.0.1", "detokenizer": "127.0.0.1",
    }  # fmt: skip
    # Commands on this machine use an address that they can connect to.
    assert all(address.startswith("127.0.0.1:") for spec in specs for address in spec.addresses.values())


@pytest.mark.parametrize("name", ["port", "http_port"])
def test_a_taken_port_is_an_error_with_its_cure(name: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        topology = Topology(**{"port": 0, "http_port": 0} | {name: listener.getsockname()[1]})
        for plan in (check_ports, plan_processes):
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: port .* in use.*0: any free") as caught:
                plan(topology)
            assert caught.value.field == f"--{name.replace('_', '-')}"


def test_a_port_is_exactly_the_one_that_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        free = listener.getsockname()[1]
    router = next(spec for spec in plan_processes(Topology(port=0, http_port=free)) if spec.kind == "router")
    assert router.addresses["http"] == f"127.0.0.1:{free}"


@pytest.mark.parametrize("port", [-1, 65_536, 75_000])
def test_a_port_out_of_range_is_refused(
    port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["up", f"--port={port}", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"midstream up: --port: {port} is not in 0..65535\n"
    monkeypatch.setenv("MIDSTREAM_WORKER_PORT", str(port))
    assert main(["up", "--run-dir", str(tmp_path)]) == 1
    assert "worker_port" in capsys.readouterr().err


def test_a_mistyped_setting_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_MAX_BATCH_SIZ", "8")
    assert main(["serve", "smollm2", "--detach", "--run-dir", str(tmp_path)]) == 1
    expected = "midstream serve: MIDSTREAM_MAX_BATCH_SIZ: no such setting; did you mean MIDSTREAM_MAX_BATCH_SIZE?\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--detahc"], "; did you mean --detach?"),
        (["--tensor-parallel-size=2"], "; did you mean --tensor-parallel?"),
        (["-tp", "2"], "; did you mean --tensor-parallel?"),
        (["--model"], "; the model is an argument without a flag: midstream serve MODEL"),
        (
            ["--max-batch-size", "8"],
            "; this is a setting of the services: MIDSTREAM_MAX_BATCH_SIZE=VALUE midstream serve …",
        ),
        (["--detac"], "; did you mean --detach?"),
        (
            ["--enable-prefix-caching"],
            "; prefixes are reused by default; MIDSTREAM_ENABLE_BLOCK_REUSE=false turns this off",
        ),
    ],
)
def test_an_unknown_flag_names_the_one_that_may_be_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "smollm2", *words])
    printed = capsys.readouterr().err
    assert printed.startswith("usage: midstream serve ")
    assert printed.endswith(f"midstream serve: error: unrecognized arguments: {' '.join(words)}{hint}\n")


def flags_of_other_servers() -> list[tuple[str, str]]:
    """Return pairs of another server's flag and our equivalent, from the table in docs/migration.md."""
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = page.partition("## Starting")[2].partition("\n## ")[0].splitlines()
    pairs = []
    for row in rows:
        *theirs, ours = (re.findall(r"`([^`]*)`", cell) for cell in row.split("|")[2:-1] or [""])
        pairs += [(flag, ours[0]) for names in theirs for name in names for flag in re.findall(r"--[\w-]+", name)]
    return pairs


def test_flags_of_other_servers_are_accepted_or_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = flags_of_other_servers()
    assert len(pairs) > 50
    for theirs, ours in pairs:
        with pytest.raises(SystemExit, match="2"):
            main(["serve", "smollm2", theirs, "1", "--no-such-flag"])
        error = capsys.readouterr().err.partition("error: ")[2]
        if error == "unrecognized arguments: --no-such-flag\n":  # `serve` accepts the other server's flag
            assert theirs == ours or (theirs, ours) == ("--port", "--http-port")
        else:
            (line,) = (line for line in error.splitlines() if line.startswith(f"  {theirs}: "))
            assert ours in line


def test_all_flags_of_another_server_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a usual command for vLLM, of which `serve` knows three."""
    words = [
        *("--port", "8001", "--api-key", KEY, "--served-model-name", "m", "--dtype", "bfloat16", "--trust-remote-code"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--quantization=awq", "--max-model-len", "8192"),
        *("--speculative-config", "{}", "--enable-lora", "--no-such-flag"),
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "smollm2", *words])
    lines = capsys.readouterr().err.partition("error: unrecognized arguments: ")[2].splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "--dtype", "--trust-remote-code", "--enable-auto-tool-choice", "--tool-call-parser", "--quantization",
        "--max-model-len", "--speculative-config", "--enable-lora", "--no-such-flag",
    ]  # fmt: skip
    assert "MIDSTREAM_WEIGHTS selects another" in lines[0]
    assert "MIDSTREAM_TOOL_PARSER=VALUE midstream serve" in lines[3]
    assert lines[-1] == "  --no-such-flag: unknown"


def test_the_settings_that_the_advice_names_exist() -> None:
    for advice in other_servers._NOT_NEEDED:
        names = re.findall(r"MIDSTREAM_([A-Z_]+)", advice)
        assert {name.lower() for name in names} <= KNOWN_SETTINGS


@pytest.mark.parametrize("words", [["generate", "--max-tok", "3", "hi"], ["lora", "list", "--run-d", "x"]])
def test_abbreviated_flags_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_an_abbreviated_setting_is_refused_with_the_whole_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_config(RouterConfig, ["--anonymous-role", "observe"], {}, program="router")
    error = capsys.readouterr().err
    assert "--anonymous-role observe; did you mean --anonymous-roles?" in error
    assert error.count("\n") == 2


def test_two_ports_differ() -> None:
    with pytest.raises(ConfigError, match="8000 is the HTTP port as well; --port is for gRPC"):
        Topology(port=8000, http_port=8000)
    assert Topology(port=0, http_port=0).port == 0


def test_hints_contain_the_address_of_the_started_service(tmp_path: Path) -> None:
    router = ProcessState("router-0", "router", {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}, "")
    state = RunState("smollm2", ProcessPhase.READY, 1, 0.0, (router,))
    assert f"midstream chat --run-dir {tmp_path}" in how_to_talk(state, tmp_path)
    assert "--run-dir" not in how_to_talk(state, default_run_dir())
    remote = replace(router, addresses={"grpc": "[fe80::1]:1", "http": "[fe80::1]:2"})
    shown = Text.from_markup(how_to_talk(replace(state, processes=(remote,)), tmp_path)).plain
    assert "gRPC [fe80::1]:1, HTTP http://[fe80::1]:2" in shown
    assert "(or http://[fe80::1]:2/dashboard)" in shown
    with_space = tmp_path / "a b"
    assert f"--run-dir '{with_space}'" in how_to_talk(state, with_space)


@pytest.mark.parametrize("command", [["bench"], ["bench", "--quick"], ["generate", "hi"], ["status"]])
def test_without_a_service_commands_name_the_address(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("midstream.cli.bench.quick.ask_machine")  # the command must fail before it measures the machine
    assert main([*command, "--run-dir", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert f"No Midstream service is running in {tmp_path}" in output.out + output.err
    assert f"midstream up --detach --run-dir {tmp_path}" in output.out + output.err


def test_bench_fails_if_nothing_listens_on_the_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.cli.bench.measure._CONNECT_TIMEOUT_S", 0.2)
    assert main(["bench", "--address", "127.0.0.1:1", "--workload", "single"]) == 1
    assert "no router answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", [chat, generate])
def test_the_models_own_sampling_parameters_apply_by_default(command: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["a prompt"] if command is generate else []
    assert sampling_of(parser.parse_args(words)) == SamplingParams(max_tokens=256 if words else 512)
    assert sampling_of(parser.parse_args([*words, "--temperature", "0"])).temperature == 0


def run_dir_at(path: Path) -> RunDir:
    path.mkdir(exist_ok=True)
    return RunDir(path)


def test_api_keys_are_written_for_routers_and_for_this_user_alone(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    variables = use_api_keys(run_dir, [KEY], {})
    assert variables == {"MIDSTREAM_AUTH": "token", "MIDSTREAM_AUTH_TOKENS": str(run_dir.api_keys)}
    first, second = run_dir.api_keys.read_text().splitlines()
    assert first == f"{KEY} client-1"
    assert second == f"{run_dir.token.read_text().strip()} local generate,observe,admin"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run_dir.api_keys, run_dir.token)} == {0o600}
    # The detached service keeps its keys. The next service is started without keys, so it requires none, and commands
    # send none.
    assert use_api_keys(run_dir, [], variables) == {}
    assert run_dir.token.exists()
    assert run_dir.api_keys.exists()
    assert use_api_keys(run_dir, [], {}) == {}
    assert not run_dir.token.exists()
    assert not run_dir.api_keys.exists()


@pytest.mark.parametrize("key", ["short", "two words of a key", "schlüssel-mit-umlaut", "#starts-like-a-comment"])
def test_a_key_that_does_not_fit_a_header_is_rejected(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        use_api_keys(run_dir_at(tmp_path), [key], {})


def test_a_certificate_without_tls_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", "127.0.0.1:1", "--tls-ca", "ca.pem", "hi"]) == 1
    assert "--tls-ca: is given, but TLS is off; add --tls" in capsys.readouterr().err


def test_commands_send_the_key_of_the_environment_unless_the_service_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(*words: str) -> str:
        parser = argparse.ArgumentParser()
        parser.add_argument("--address")
        parser.add_argument("--run-dir", type=Path, default=tmp_path / "run")
        add_credentials(parser)
        return credentials_of(parser.parse_args(words))["token"]

    monkeypatch.setenv("MIDSTREAM_API_KEY", KEY)
    assert token() == token("--address", "10.0.0.5:50051") == KEY
    (tmp_path / "file").write_text("a-token-in-a-file\n")
    assert token("--token-file", str(tmp_path / "file")) == "a-token-in-a-file"
    run_dir = RunDir(tmp_path / "run")
    run_dir.token.parent.mkdir()
    use_api_keys(run_dir, [KEY], {})
    # The token of this user's commands may do more than a client's key.
    assert token() == run_dir.token.read_text().strip() != KEY
    assert token("--address", "10.0.0.5:50051") == KEY


def test_a_client_sends_the_key_of_the_environment_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(async_client, "open_channel", lambda *_, token, **__: sent.append(token))
    monkeypatch.setenv("MIDSTREAM_API_KEY", KEY)
    for client in (AsyncClient(), AsyncClient(token="another"), AsyncClient(token="")):
        client._open_channel("127.0.0.1:1")
    assert sent == [KEY, "another", ""]


@pytest.mark.parametrize("service", ["router", "scheduler"])
def test_a_service_refuses_the_key_of_clients(service: str) -> None:
    """Otherwise a router would seem to require it."""
    environment = os.environ | {"MIDSTREAM_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", service], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 2
    assert "MIDSTREAM_API_KEY" in done.stderr
    assert "MIDSTREAM_AUTH_TOKENS=FILE" in done.stderr
    assert KEY not in done.stderr


def test_keys_do_not_override_the_token_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MIDSTREAM_AUTH_TOKENS"):
        use_api_keys(run_dir_at(tmp_path), [KEY], {"MIDSTREAM_AUTH_TOKENS": "/elsewhere"})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://10.0.0.5:8000", "is a URL.*10.0.0.5:50051"),
        ("https://host", "is a URL.*host:50051"),
        ("localhost", "lacks a port.*localhost:50051"),
        ("::1", "lacks a port"),
        ("host:70000", "70000 .* is not a port"),
        ("host:0", "is not a port"),
        (":50051", "lacks a port"),
    ],
)
def test_an_invalid_address_is_rejected_with_a_clear_message(target: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        check_target(target)


@pytest.mark.parametrize(
    "target", ["host:1", "127.0.0.1:50051", "[::1]:50051", "dns:///router.midstream:50051", "unix:/run/socket"]
)
def test_addresses_in_grpc_syntax_are_accepted(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    ("target", "is_here"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/socket", True),
        ("10.0.0.1:1", False),
        ("dns:///router.midstream:1", False),
        ("[fe80::1]:1", False),
    ],
)
def test_targets_on_this_machine_are_recognized(target: str, is_here: bool) -> None:
    assert is_local(target) is is_here


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused",
            "nothing listens on 127.0.0.1:1;",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:8000: Connection refused",
            "nothing listens on [::1]:8000;",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (",
            "the server at 127.0.0.1:8000 does not speak gRPC",
        ),
        (
            "errors resolving no-such-host:50051: [field:hostname lookup error:address lookup failed]",
            "the host name no-such-host cannot be resolved",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8000: Tls: WRONG_VERSION_NUMBER",
            "the server at 127.0.0.1:8000 does not use TLS",
        ),
        ("the router drains", "the router drains"),
    ],
)
def test_connection_errors_of_grpc_are_readable(details: str, words: str) -> None:
    assert plain_problem(details).startswith(words)
