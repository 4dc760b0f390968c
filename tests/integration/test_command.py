"""The `midstream` command with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

from tests.integration.service import Service, eventually, midstream

NAMES = [
    "detokenizer-0",
    "detokenizer-1",
    "router-0",
    "router-1",
    "scheduler-0",
    "worker-0",
    "worker-1",
]


def test_generate_knows_the_capital_of_france(service: Service) -> None:
    question = "What is the capital of France?"
    result = midstream(
        "generate", "--max-tokens", "24", "--temperature", "0", question, "--run-dir", str(service.run_dir)
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert result.stderr == ""


def test_generate_raw_continues_the_text(service: Service) -> None:
    flags = ("--raw", "--max-tokens", "4", "--temperature", "0", "--run-dir", str(service.run_dir))
    result = midstream("generate", "One, two, three, four,", *flags)
    assert result.stdout.strip().startswith("five")


def test_generate_steers_as_its_flags_say(service: Service) -> None:
    flags = ("--raw", "--max-tokens", "8", "--temperature", "0", "--run-dir", str(service.run_dir))
    steered = midstream(
        "generate", "One, two, three, four,", *flags, "--bad-word", "five", "--no-repeat-ngram-size", "3"
    )
    assert steered.returncode == 0, steered.stderr
    assert steered.stdout.strip()
    assert "five" not in steered.stdout
    missing = midstream("generate", "hi", *flags, "--lora", "unheard-of")
    assert missing.returncode == 1
    assert "unheard-of" in missing.stderr


def test_generate_names_the_bad_field(service: Service) -> None:
    result = midstream("generate", "hi", "--temperature", "nan", "--run-dir", str(service.run_dir))
    assert result.returncode == 1
    assert "sampling.temperature" in result.stderr
    assert "Traceback" not in result.stderr


def test_status_shows_every_process(service: Service) -> None:
    status = service.status_once_serving()
    processes = status["processes"]
    assert sorted(process["name"] for process in processes) == NAMES
    assert {process["health"] for process in processes} == {"serving"}
    assert all(Path(f"/proc/{process['pid']}").exists() for process in processes)
    with_epoch = {process["name"] for process in processes if process["epoch"]}
    assert with_epoch == {"scheduler-0", "worker-0", "worker-1"}
    text = midstream("status", "--run-dir", str(service.run_dir)).stdout
    assert all(name in text for name in NAMES)


def test_top_shows_every_part_through_a_router_alone(service: Service) -> None:
    deadline = time.monotonic() + 240
    while True:
        result = midstream("top", "--once", "--run-dir", str(service.run_dir), COLUMNS="120")
        assert result.returncode == 0, result.stderr
        # On a busy machine, a worker may not send anything for a moment.
        missing = [name for name in NAMES if not re.search(rf"{name} +● serving", result.stdout)]
        if not missing or time.monotonic() > deadline:
            break
    assert not missing, result.stdout
    assert re.search(r"worker-1 +\d+ of \d+ sequences", result.stdout)


def test_the_dashboard_gets_a_state(service: Service) -> None:
    address = service.processes("router")[0]["addresses"]["http"]
    with urllib.request.urlopen(f"http://{address}/dashboard/feed", timeout=240) as feed:
        state = json.loads(feed.readline().removeprefix(b"data: "))
    assert sorted(part["name"] for part in state["parts"]) == NAMES
    assert {len(group["blockMap"]["held"]) for group in state["groups"]} <= set(range(1, 513))


def test_a_second_up_in_the_same_directory_is_refused(service: Service) -> None:
    result = midstream("up", "--detach", "--run-dir", str(service.run_dir))
    assert result.returncode == 1
    assert "already running" in result.stderr


async def test_a_killed_worker_comes_back(service: Service) -> None:
    first, second = await service.all_serving("gpu_worker")
    num_restarts = second["num_restarts"] + 1
    os.kill(second["pid"], signal.SIGKILL)
    after = await eventually(
        lambda: service.serving("gpu_worker"),
        lambda workers: [worker["num_restarts"] for worker in workers][1:] == [num_restarts],
        120,
    )
    assert [worker["name"] for worker in after] == ["worker-0", "worker-1"]
    assert after[1]["num_restarts"] == num_restarts
    assert after[1]["pid"] != second["pid"]
    assert after[0]["pid"] == first["pid"]


def test_with_nothing_running_commands_say_how_to_start(tmp_path: Path) -> None:
    for command in (["generate", "hi"], ["chat"], ["status"]):
        result = midstream(*command, "--run-dir", str(tmp_path))
        assert result.returncode == 1
        assert "midstream up" in result.stdout + result.stderr
    assert midstream("down", "--run-dir", str(tmp_path)).returncode == 0


def test_a_model_folder_that_lacks_a_file_stops_the_start_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    result = midstream(
        "up",
        "--detach",
        "--port",
        "0",
        "--http-port",
        "0",
        "--run-dir",
        str(tmp_path / "run"),
        "--model",
        str(tmp_path / "model"),
    )
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_setting_stops_the_start_and_is_named(tmp_path: Path) -> None:
    result = midstream(
        "up",
        "--detach",
        "--port",
        "0",
        "--http-port",
        "0",
        "--run-dir",
        str(tmp_path / "run"),
        MIDSTREAM_MAX_BATCH_SIZ="8",
    )
    assert result.returncode == 1
    assert "MIDSTREAM_MAX_BATCH_SIZE" in result.stdout + result.stderr
    assert midstream("status", "--run-dir", str(tmp_path / "run")).returncode == 1


def test_chat_remembers_the_conversation(service: Service) -> None:
    flags = ("--temperature", "0", "--max-tokens", "16", "--run-dir", str(service.run_dir))
    once = midstream("chat", *flags, stdin="What is the capital of France?\n/quit\n").stdout
    twice = midstream("chat", *flags, stdin="What is the capital of France?\nAnd of Italy?\n").stdout
    assert "Paris" in once
    assert "Rome" in twice
