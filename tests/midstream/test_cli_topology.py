from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midstream.cli.topology import Topology, command_of, is_free_port, plan_processes, reserve_port
from midstream.cli.up import memory_shares, named_models
from midstream.config import RouterConfig
from midstream.config.models import model_configs
from midstream.errors import ConfigError


def flag(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_every_part_knows_the_addresses_of_those_it_dials() -> None:
    specs = {spec.name: spec for spec in plan_processes(Topology("a-model", 2, 3, 2), num_cores=4)}

    assert sorted(specs) == [
        "detokenizer-0", "detokenizer-1", "detokenizer-2", "router-0", "router-1", "scheduler-0", "worker-0",
        "worker-1",
    ]  # fmt: skip
    scheduler = specs["scheduler-0"].addresses
    detokenizers = ",".join(specs[f"detokenizer-{index}"].addresses["grpc"] for index in range(3))
    for index in range(2):
        router = specs[f"router-{index}"].flags
        assert flag(router, "--schedulers") == scheduler["grpc"]
        assert flag(router, "--detokenizers") == detokenizers
        worker = specs[f"worker-{index}"].flags
        assert flag(worker, "--scheduler") == f"tcp://{scheduler['zmq']}"
        assert flag(worker, "--group-id") == f"worker-{index}"
    assert flag(specs["detokenizer-2"].flags, "--schedulers") == scheduler["grpc"]
    assert all(flag(spec.flags, "--model") == "a-model" for spec in specs.values())


def test_no_address_is_given_twice() -> None:
    specs = plan_processes(Topology("a-model", 3, 3, 3))
    addresses = [address for spec in specs for address in spec.addresses.values()]
    assert len(set(addresses)) == len(addresses) == 3 * 2 + 3 * 2 + 3 + 3


@pytest.mark.parametrize(("num_cores", "num_workers", "num_threads"), [(2, 1, 2), (2, 2, 1), (2, 5, 1), (16, 3, 5)])
def test_workers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_workers: int, num_threads: int
) -> None:
    monkeypatch.delenv("MIDSTREAM_NUM_THREADS")
    specs = plan_processes(Topology(num_workers=num_workers), num_cores)
    workers = [spec for spec in specs if spec.kind == "gpu_worker"]
    assert [flag(spec.flags, "--num-threads") for spec in workers] == [str(num_threads)] * num_workers


def test_a_number_of_threads_that_the_user_sets_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_NUM_THREADS", "7")
    assert all("--num-threads" not in spec.flags for spec in plan_processes(Topology(num_workers=2), num_cores=16))


def test_each_worker_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIDSTREAM_NUM_THREADS")
    topology = Topology(num_workers=2, tensor_parallel=2, pipeline_parallel=2)
    workers = [spec for spec in plan_processes(topology, num_cores=16) if spec.kind == "gpu_worker"]
    assert [spec.name for spec in workers[:4]] == ["worker-0", "worker-0-rank-1", "worker-0-rank-2", "worker-0-rank-3"]
    assert [spec.environment["RANK"] for spec in workers] == ["0", "1", "2", "3"] * 2
    assert {spec.environment["WORLD_SIZE"] for spec in workers} == {"4"}
    first, second = (spec.environment["MASTER_PORT"] for spec in workers[::4])
    assert [spec.environment["MASTER_PORT"] for spec in workers] == [first] * 4 + [second] * 4
    assert first != second
    for spec in workers:
        assert flag(spec.flags, "--tensor-parallel") == flag(spec.flags, "--pipeline-parallel") == "2"
        assert flag(spec.flags, "--num-threads") == "2"


def test_default_ports_are_taken_where_they_are_free() -> None:
    specs = {spec.name: spec for spec in plan_processes(Topology(num_routers=2), is_free=lambda port: port != 50052)}
    assert specs["router-0"].addresses == {"grpc": "127.0.0.1:50051", "http": "127.0.0.1:8000"}
    assert specs["router-1"].addresses["grpc"] != "127.0.0.1:50051"
    assert specs["scheduler-0"].addresses["grpc"] != "127.0.0.1:50052"
    assert specs["scheduler-0"].addresses["zmq"] == "127.0.0.1:50053"


def test_routers_do_not_use_default_ports_if_others_are_given() -> None:
    specs = plan_processes(Topology(num_routers=2, port=0, http_port=0), is_free=lambda _: True)
    ports = {
        address.rpartition(":")[2] for spec in specs if spec.kind == "router" for address in spec.addresses.values()
    }
    assert ports.isdisjoint({"50051", "8000"})


def test_a_port_with_a_listener_is_not_free() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        assert not is_free_port(port)
    assert is_free_port(port)


def test_two_supervisors_that_start_at_once_take_different_ports() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    program = f"from midstream.cli.topology import reserve_port; print(reserve_port({port}), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        assert is_free_port(port)
        assert not reserve_port(port)
        other.communicate(b"\n")
    assert reserve_port(port)
    assert reserve_port(port)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_an_invalid_count_names_its_flag(count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(num_detokenizers=count)
    assert caught.value.field == "--detokenizers"


@pytest.mark.parametrize(
    ("fields", "num_cores", "is_shared"),
    [
        ({"shared_process": "off"}, 1, False),
        ({"shared_process": "on"}, 64, True),
        ({"shared_process": "on", "num_routers": 2, "num_detokenizers": 2}, 2, True),
        ({"shared_process": "auto"}, 4, True),
        ({"shared_process": "auto"}, 5, False),
        ({"shared_process": "auto", "num_workers": 2}, 2, True),
        ({"shared_process": "auto", "num_routers": 2}, 2, False),
        ({"shared_process": "auto", "num_detokenizers": 2}, 2, False),
        ({}, 2, False),
    ],
)
def test_one_scheduler_detokenizer_and_router_may_share_a_process(
    fields: dict[str, Any], num_cores: int, is_shared: bool
) -> None:
    specs = plan_processes(Topology(**fields), num_cores, lambda _: True)
    sharing = [spec for spec in specs if spec.shared]
    if not is_shared:
        assert not sharing
        return
    assert [spec.name for spec in sharing] == ["scheduler-0", "detokenizer-0", "router-0"]
    command = command_of(sharing)
    sections = " ".join(command[command.index("midstream.parts") + 1 :]).split(" + ")
    assert sections == [" ".join(spec.words) for spec in sharing]
    assert sections[2].startswith("router --name router-0 --model")
    others = [spec for spec in specs if not spec.shared]
    assert [command_of([spec]) for spec in others] == [spec.command for spec in others]


def test_an_unknown_choice_for_the_shared_process_names_its_flag() -> None:
    with pytest.raises(ConfigError, match="'yes' is not one of auto, on, off") as caught:
        Topology(shared_process="yes")
    assert caught.value.field == "--shared-process"


def test_the_path_of_the_journal_is_configurable() -> None:
    specs = {spec.name: spec for spec in plan_processes(Topology(), journal_path="/run/journal")}
    assert specs["scheduler-0"].flags[-2:] == ("--journal-path", "/run/journal")
    assert "--journal-path" not in specs["router-0"].flags


def test_the_environment_sets_the_folder_of_kv_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_SHARED_KV_FOLDER", "")
    flags = [flag for spec in plan_processes(Topology(), 2, lambda _: True) for flag in spec.flags]
    assert "--shared-kv-folder" not in flags


def test_the_first_workers_are_prefill_workers() -> None:
    specs = plan_processes(Topology(num_workers=3, num_prefill_workers=2), is_free=lambda _: True)
    roles = [spec.flags[spec.flags.index("--role") + 1] for spec in specs if spec.kind == "gpu_worker"]
    assert roles == ["prefill", "prefill", "decode"]
    with pytest.raises(ConfigError, match="leaves none to decode"):
        Topology(num_workers=2, num_prefill_workers=2)


def test_each_of_several_models_has_parts_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MIDSTREAM_NUM_THREADS", raising=False)
    path = tmp_path / "models.toml"
    topology = Topology(num_routers=2, models={"org/a": ("/a", 0.75), "b": ("/b", 0.25)}, shared_process="on")
    specs = {spec.name: spec for spec in plan_processes(topology, 8, journal_path="/run/journal", models_file=path)}

    assert sorted(specs) == [
        "detokenizer-0.b", "detokenizer-0.org_a", "router-0", "router-1", "scheduler-0.b", "scheduler-0.org_a",
        "worker-0.b", "worker-0.org_a",
    ]  # fmt: skip
    assert not any(spec.shared for spec in specs.values())
    addresses = [address for spec in specs.values() for address in spec.addresses.values()]
    assert len(set(addresses)) == len(addresses)
    for name, suffix, share in (("org/a", "org_a", 0.75), ("b", "b", 0.25)):
        scheduler, worker = specs[f"scheduler-0.{suffix}"], specs[f"worker-0.{suffix}"]
        assert flag(scheduler.flags, "--served-model-name") == name
        assert flag(scheduler.flags, "--journal-path") == f"/run/journal-{suffix}"
        assert flag(worker.flags, "--scheduler") == f"tcp://{scheduler.addresses['zmq']}"
        assert flag(worker.flags, "--num-threads") == str(int(8 * share))
        assert float(flag(worker.flags, "--free-memory-fraction")) == pytest.approx(0.9 * share)
    for index in range(2):
        [config_a, config_b] = model_configs(RouterConfig(models=flag(specs[f"router-{index}"].flags, "--models")))
        assert (config_a.served_model_name, config_a.model) == ("org/a", "/a")
        assert config_a.schedulers == specs["scheduler-0.org_a"].addresses["grpc"]
        assert config_b.detokenizers == specs["detokenizer-0.b"].addresses["grpc"]


@pytest.mark.parametrize(
    ("text", "shares"), [("", [0.5, 0.5]), ("3,1", [0.75, 0.25]), ("1", None), ("1,x", None), ("1,0", None)]
)
def test_models_share_the_memory_as_the_split_says(text: str, shares: list[float] | None) -> None:
    if shares is not None:
        assert memory_shares(text, 2) == shares
        return
    with pytest.raises(ConfigError, match="must be 2 positive numbers"):
        memory_shares(text, 2)


def test_a_model_may_be_given_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    words = ["smollm2", "small=ORG/NAME@main", str(folder)]
    assert named_models(words) == [("", "smollm2"), ("small", "ORG/NAME@main"), ("", str(folder))]
