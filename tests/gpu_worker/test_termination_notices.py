"""Notices that a machine will be taken away, with local servers that answer as the clouds document."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from gpu_worker.termination_notices import Aws, Azure, Gcp, Metadata, TerminationNotices
from midstream.config import WorkerConfig
from midstream.errors import ConfigError
from tests.gpu_worker.scripted_scheduler import ScriptedScheduler, run_prompt, worker_process


@dataclass
class Server:
    """A metadata service.

    Attributes:
        url: Its address.
        answers: By method and path: the headers that a request needs, and the status and text of the answer.
        asked: Number of requests by method and path.
    """

    url: str
    answers: dict[tuple[str, str], tuple[dict[str, str], int, str]] = field(default_factory=dict)
    asked: dict[tuple[str, str], int] = field(default_factory=dict)


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = (self.command, self.path)
            service.asked[key] = service.asked.get(key, 0) + 1
            needed, status, text = service.answers.get(key, ({}, 404, "Not Found"))
            if any(self.headers[name] != value for name, value in needed.items()):
                status, text = (401 if "X-aws-ec2-metadata-token" in needed else 403), "a header is missing"
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815 (the name that the library calls)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Server(f"http://127.0.0.1:{http.server_port}")
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield service
    http.shutdown()
    thread.join()
    http.server_close()


AWS_TOKEN, AWS_ACTION = ("PUT", "/latest/api/token"), ("GET", "/latest/meta-data/spot/instance-action")
GCP = ("GET", "/computeMetadata/v1/instance/preempted")
AZURE_NAME = ("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text")
AZURE = ("GET", "/metadata/scheduledevents?api-version=2020-07-01")


def use_aws_token(server: Server, token: str) -> None:
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    server.answers[AWS_TOKEN] = (ttl, 200, token)
    needed = {"X-aws-ec2-metadata-token": token}
    server.answers[AWS_ACTION] = (needed, *server.answers.get(AWS_ACTION, ({}, 404, "Not Found"))[1:])


def set_aws_action(server: Server) -> None:
    action = {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    server.answers[AWS_ACTION] = (server.answers[AWS_ACTION][0], 200, json.dumps(action))


def set_azure_events(server: Server, *events: dict[str, Any]) -> None:
    document = json.dumps({"DocumentIncarnation": 2, "Events": events})
    server.answers[AZURE] = ({"Metadata": "true"}, 200, document)


def azure_event(kind: str, *machines: str) -> dict[str, Any]:
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def test_ec2_names_the_action_of_a_spot_instance(server: Server) -> None:
    use_aws_token(server, "first")
    aws = Aws(Metadata(server.url))
    assert [aws.notice(), aws.notice()] == ["", ""]
    assert server.asked[AWS_TOKEN] == 1
    set_aws_action(server)
    use_aws_token(server, "second")  # the first one has expired
    assert aws.notice() == "EC2 will terminate the instance at 2017-09-18T08:22:00Z"


def test_compute_engine_says_whether_it_has_preempted_the_machine(server: Server) -> None:
    needed = {"Metadata-Flavor": "Google"}
    server.answers[GCP] = (needed, 200, "FALSE")
    gcp = Gcp(Metadata(server.url))
    assert gcp.notice() == ""
    server.answers[GCP] = (needed, 200, "TRUE")
    assert gcp.notice() == "Compute Engine has preempted the instance"
    server.answers[GCP] = (needed, 200, "<html>TRUE</html>")  # of a proxy, for example
    with pytest.raises(ValueError, match="preempted"):
        gcp.notice()


def test_azure_lists_events_of_several_machines(server: Server) -> None:
    server.answers[AZURE_NAME] = ({"Metadata": "true"}, 200, "vm_0")
    set_azure_events(server)
    azure = Azure(Metadata(server.url))
    assert azure.notice() == ""
    set_azure_events(server, azure_event("Preempt", "vm_1"), azure_event("Freeze", "vm_0"))
    assert azure.notice() == ""
    set_azure_events(server, azure_event("Preempt", "vm_1"), azure_event("Preempt", "vm_1", "vm_0"))
    assert azure.notice() == "Azure has scheduled Preempt not before Mon, 11 Apr 2022 22:26:58 GMT"


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_service_that_does_not_answer_is_no_notice(server: Server, cloud: str) -> None:
    """It is asked again, and the notice is found once it answers."""
    found: queue.Queue[str] = queue.Queue()
    config = WorkerConfig(notice_metadata=cloud, notice_url=server.url)
    notices = TerminationNotices(config, lambda: found.put("notice"))
    notices.start()
    while not server.asked:
        pass
    assert found.empty()
    use_aws_token(server, "token")
    set_aws_action(server)
    server.answers[GCP] = ({}, 200, "TRUE")
    server.answers[AZURE_NAME] = ({}, 200, "vm_0")
    set_azure_events(server, azure_event("Terminate", "vm_0"))
    assert found.get(timeout=240) == "notice"


@pytest.mark.parametrize("url", ["https://a", "http://", "a:80", "http://a/path", "http://a:port", "file:///a"])
def test_the_url_of_a_service_is_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="notice_url"):
        TerminationNotices(WorkerConfig(notice_metadata="gcp", notice_url=url), lambda: None)


def test_a_worker_leaves_when_its_machine_is_to_end(server: Server, tiny_folder: Path) -> None:
    use_aws_token(server, "token")
    scheduler = ScriptedScheduler()
    flags = ("--notice-metadata", "aws", "--notice-url", server.url)
    with worker_process(scheduler.address, tiny_folder, *flags) as process:
        scheduler.register(epoch=1)
        run_prompt(scheduler, 2)
        set_aws_action(server)
        assert scheduler.receive("leave").epoch == 1
        assert process.wait(240) == 0
    scheduler.close()


def test_a_worker_leaves_when_a_file_appears(tiny_folder: Path, tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    notice = tmp_path / "notice"
    with worker_process(scheduler.address, tiny_folder, "--notice-file", str(notice)) as process:
        scheduler.register(epoch=1)
        run_prompt(scheduler, 2)
        notice.touch()
        assert scheduler.receive("leave").epoch == 1
        assert process.wait(240) == 0
    # A worker that is started again on such a machine gets no requests.
    with worker_process(scheduler.address, tiny_folder, "--notice-file", str(notice)) as process:
        assert process.wait(240) == 0
    scheduler.close()
