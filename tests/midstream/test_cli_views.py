from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from midstream.chunk import Chunk, FinishReason
from midstream.cli import doctor, main
from midstream.cli.demo_view import Answer, DemoView
from midstream.cli.display import RunDisplay
from midstream.cli.health import probe_health
from midstream.cli.logs import last_lines, last_message
from midstream.cli.pace import Pace
from midstream.cli.run_dir import ProcessPhase, ProcessState, RunState
from midstream.cli.status import ProcessStatus, _status, _table
from midstream.config import RouterConfig, SchedulerConfig, parse_config
from midstream.model.families import SERVED_FAMILIES
from protos.loads_pb2 import WorkerGroupInfo


def test_fast_responses_are_printed_line_by_line() -> None:
    output = io.StringIO()
    answers = [Answer("First?"), Answer("Second?")]
    with DemoView(answers, Console(file=output, width=200)) as view:
        answers[0].text = "word " * 20  # 99 characters: one full line, after which text may still be added
        view.advance(0)
        answers[1].text = "Short."
        view.advance(1)
        view.finish(1)
        answers[0].text += "end"
        view.finish(0)
    assert output.getvalue().splitlines() == [
        "1 > First?",
        "2 > Second?",
        "1 | " + " ".join(["word"] * 18),
        "2 | Short.",
        "1 | word word end",
    ]


def test_pace_is_counted_from_the_first_chunk() -> None:
    now = iter([10.0, 10.5, 11.5, 12.5])
    stream = Pace(_clock=lambda: next(now))
    assert str(stream) == "waiting"
    stream.note(Chunk(token_ids=[1, 2], text="a"))
    stream.note(Chunk(token_ids=[3, 4, 5], text="b"))
    stream.note(Chunk(token_ids=[6], finish_reason=FinishReason.STOP, is_final=True))
    assert (stream.num_tokens, stream.first_s, stream.tokens_per_s) == (6, 0.5, 2.0)
    assert str(stream) == "6 tokens, 2 tok/s, first after 0.50 s, stop"


def test_without_a_terminal_a_run_prints_lines() -> None:
    output = io.StringIO()
    process = ProcessState("worker-0", "gpu_worker", {}, "log", ProcessPhase.STARTING, detail="loading")
    state = RunState("model", ProcessPhase.STARTING, 1, 0.0, (process,))
    with RunDisplay(Console(file=output, width=200)) as display:
        display.show(state)
        display.show(state)
    assert [line.split()[2:] for line in output.getvalue().splitlines()] == [["worker-0", "starting", "loading"]]


def test_status_fits_a_terminal_of_80_columns() -> None:
    addresses = {"grpc": "127.0.0.1:50052", "zmq": "127.0.0.1:50053", "http": "127.0.0.1:24800"}
    process = ProcessState(
        "detokenizer-0",
        "detokenizer",
        addresses,
        "",
        ProcessPhase.READY,
        1_234_567,
        started_unix_s=time.time() - 99_999,
    )
    output = io.StringIO()
    Console(file=output, width=80).print(_table([ProcessStatus(process, "serving", 1882672033313062913)]))
    text = output.getvalue()
    parts = [f"{protocol} {address}" for protocol, address in addresses.items()]
    assert all(part in text for part in ("detokenizer-0", "1234567", "serving", "epoch 1882672033313062913", *parts))


def test_status_says_why_a_worker_gets_no_work() -> None:
    groups = {
        "worker-0": WorkerGroupInfo(group_id="worker-0", epoch=5, held_off="wrong results: token 3"),
        "worker-1": WorkerGroupInfo(group_id="worker-1", epoch=6),
    }
    epochs: dict[str, int | None] = {"scheduler-0": 7}
    found = [_status(ProcessState(name, "gpu_worker", {}, ""), "serving", epochs, groups) for name in groups]
    assert [(item.health, item.epoch) for item in found] == [("held off: wrong results: token 3", 5), ("serving", 6)]
    scheduler = _status(ProcessState("scheduler-0", "scheduler", {}, ""), "serving", epochs, groups)
    assert (scheduler.health, scheduler.epoch, scheduler.worker_kind) == ("serving", 7, "")
    stopped = _status(ProcessState("worker-0", "gpu_worker", {}, ""), "stopped", epochs, groups)
    assert stopped.health == "stopped"


def test_the_end_of_a_log_is_readable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (last_message(log), last_lines(log, 3)) == ("", "")
    log.write_text(
        '{"level": "info", "message": "loading"}\nTraceback:\n{"level": "error", "message": "no folder"}\nbye\n'
    )
    assert last_message(log) == "no folder"
    assert last_lines(log, 3) == "  Traceback:\n  error: no folder\n  bye"


@pytest.mark.parametrize("words", [["sideways"], ["up", "--routers", "many"], ["up", "--unknown"]])
def test_a_wrong_command_line_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: midstream" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert "run a single worker" in capsys.readouterr().out


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["up", "--workers", "0", "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "midstream up: --workers: 0 is not in 1..64\n"


@pytest.mark.parametrize("command", ["up", "status", "down", "generate", "chat", "prepare", "demo", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: midstream {command}" in capsys.readouterr().out


def test_a_service_replaces_the_command_so_that_signals_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[list[str]] = []

    def replace(_: str, command: list[str], environment: dict[str, str]) -> None:
        replaced.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", replace)
    with pytest.raises(SystemExit):
        main(["scheduler", "--port", "0"])
    assert replaced[0][-4:] == ["-m", "scheduler", "--port", "0"]


def test_characters_that_the_terminal_lacks_are_replaced() -> None:
    program = "import sys; from midstream.cli import main; main(['models', '--json']); print('caf\u00e9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert done.stdout.endswith(b"\ncaf?\n")


@pytest.mark.parametrize(("width", "has_all_columns"), [(80, False), (160, True)])
def test_no_word_about_the_models_is_cut(
    width: int, has_all_columns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    main(["models"])
    printed = capsys.readouterr().out
    assert all(name in printed for family in SERVED_FAMILIES for name in family.types)
    assert ("safetensors" in printed) == has_all_columns
    assert "…" not in printed


@pytest.mark.parametrize("config", [RouterConfig, SchedulerConfig])
def test_help_is_shown_whatever_the_variables_are(
    config: type[RouterConfig | SchedulerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(config, ["--help"], {"MIDSTREAM_NO_SUCH": "1", "MIDSTREAM_PORT": "x"}, program="p")
    assert caught.value.code == 0
    assert "usage: p" in capsys.readouterr().out


def test_brackets_in_paths_and_messages_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "[a]" / "[" / "b]"
    assert main(["down", "--run-dir", str(folder)]) == 0
    assert capsys.readouterr().out == f"No Midstream service is running in {folder}.\n"
    output = io.StringIO()
    console = Console(file=output, width=300)
    console.print(doctor._table([doctor.Finding("model", doctor.Verdict.FAULT, str(folder))]))
    address = "[fe80::1]:8000"
    process = ProcessState("router-0", "router", {"http": address}, "", detail="unknown [/INST]")
    console.print(_table([ProcessStatus(process, "unknown [/INST]", None)]))
    with RunDisplay(console) as display:
        display.show(RunState("model", ProcessPhase.STARTING, 1, 0.0, (process,)))
    assert str(folder) in output.getvalue()
    assert address in output.getvalue()
    assert output.getvalue().count("unknown [/INST]") == 2


def test_no_certificate_replaces_the_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certificates", "ca", "--output", str(tmp_path)]) == 1
    assert "ca is the authority" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


async def test_the_health_of_a_service_on_an_ipv6_address_is_found() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    try:
        listening = await asyncio.start_server(answer, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with listening as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe_health(f"[::1]:{port}") is None
