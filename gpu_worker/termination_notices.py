"""Notices that this machine will be taken away, as clouds give them for spot machines.

A worker leaves at the first notice, like after SIGTERM: its requests continue on others at once, instead of when the
machine is gone. A notice is a file that appears, or what the cloud's metadata service says, which is asked once per
second; each cloud has a small class below. A metadata service that does not answer is no notice.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from midstream.config import WorkerConfig
from midstream.errors import ConfigError

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_ASK_S = 1.0
_TIMEOUT_S = 2.0
_MAX_BYTES, _MAX_TEXT = 1 << 20, 200


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a metadata service."""

    status: int
    text: str


class Metadata:
    """A metadata service, asked over plain HTTP and never through a proxy; redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Create the client. Raises ConfigError if the URL is not http://HOST or http://HOST:PORT."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
            raise ConfigError("must be http://HOST or http://HOST:PORT", field="notice_url")
        self._host, self._port = host, port or 80

    def ask(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Return the answer to a request. Raises OSError or http.client.HTTPException if there is none."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.read(_MAX_BYTES).decode(errors="replace"))
        finally:
            connection.close()


class Cloud(Protocol):
    """The metadata service of one cloud."""

    def notice(self) -> str:
        """Return the notice that is given to this machine, or an empty text.

        Raises OSError, ValueError or http.client.HTTPException if the service does not answer as documented.
        """


class Aws:
    """EC2: the instance action of a spot instance, which appears two minutes before it, with IMDSv2.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    url = "http://169.254.169.254"
    _PREFIX = "X-aws-ec2-metadata-token"
    _TTL_S = 21_600

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    def notice(self) -> str:
        """Return the action and its time; a session token is renewed once it has expired."""
        answer = self._ask()
        if answer.status == http.client.UNAUTHORIZED:
            self._token = ""
            answer = self._ask()
        if answer.status == http.client.NOT_FOUND:
            return ""
        action = json.loads(_text_of(answer))
        return f"EC2 will {action['action']} the instance at {action['time']}"

    def _ask(self) -> Answer:
        if not self._token:
            ttl = {f"{self._PREFIX}-ttl-seconds": str(self._TTL_S)}
            self._token = _text_of(self._metadata.ask("PUT", "/latest/api/token", ttl))
        return self._metadata.ask("GET", "/latest/meta-data/spot/instance-action", {self._PREFIX: self._token})


class Gcp:
    """Compute Engine: `preempted` becomes TRUE about 30 seconds before a spot machine ends.

    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    """

    url = "http://metadata.google.internal"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def notice(self) -> str:
        """Return whether the machine was preempted."""
        path = "/computeMetadata/v1/instance/preempted"
        preempted = _text_of(self._metadata.ask("GET", path, {"Metadata-Flavor": "Google"}))
        if preempted not in ("TRUE", "FALSE"):
            raise ValueError(f"`preempted` is {preempted[:40]!r}")
        return "Compute Engine has preempted the instance" if preempted == "TRUE" else ""


class Azure:
    """Azure: scheduled events for this machine; Preempt comes at least 30 seconds before a spot machine ends.

    The events of other machines of a scale set are in the same document. The event is not approved: the machine may
    have other work.
    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    url = "http://169.254.169.254"
    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 (never changed)
    _ENDING = frozenset(("Preempt", "Terminate", "Reboot", "Redeploy"))

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._name = ""

    def notice(self) -> str:
        """Return the first event that ends or restarts this machine."""
        if not self._name:
            self._name = self._ask("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        document = json.loads(self._ask("/metadata/scheduledevents?api-version=2020-07-01"))
        for event in document["Events"]:
            if event["EventType"] in self._ENDING and self._name in event["Resources"]:
                return f"Azure has scheduled {event['EventType']} not before {event.get('NotBefore') or 'now'}"
        return ""

    def _ask(self, path: str) -> str:
        return _text_of(self._metadata.ask("GET", path, self._HEADERS))


_CLOUDS: Mapping[str, type[Aws | Gcp | Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class TerminationNotices:
    """Looks for notices, in threads."""

    def __init__(self, config: WorkerConfig, on_notice: Callable[[], None]) -> None:
        """Create the object. Raises ConfigError if a setting is wrong.

        Args:
            on_notice: Called at the first notice, in another thread.
        """
        self._file = Path(config.notice_file) if config.notice_file else None
        self._cloud: Cloud | None = None
        if config.notice_metadata != "off":
            cloud = _CLOUDS[config.notice_metadata]
            self._cloud = cloud(Metadata(config.notice_url or cloud.url))
        self._on_notice = on_notice
        self._was_silent = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to look."""
        for look, pause_s in ((self._look, _LOOK_S), (self._ask, _ASK_S)):
            is_used = self._file is not None if look == self._look else self._cloud is not None
            if is_used:
                thread = threading.Thread(target=self._watch, args=(look, pause_s), name="notices", daemon=True)
                thread.start()

    def close(self) -> None:
        """Stop looking. A question that was asked is not waited for."""
        self._stopped.set()

    def _watch(self, look: Callable[[], str], pause_s: float) -> None:
        while not self._stopped.is_set():
            if notice := look():
                self._stopped.set()
                logger.warning("leaving: %s", notice[:_MAX_TEXT])
                self._on_notice()
                return
            self._stopped.wait(pause_s)

    def _look(self) -> str:
        assert self._file is not None
        return f"{self._file} exists" if self._file.exists() else ""

    def _ask(self) -> str:
        assert self._cloud is not None
        try:
            notice = self._cloud.notice()
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            if not self._was_silent:  # once, since it is asked every second
                logger.warning("the metadata service gives no answer: %s: %s", type(error).__name__, error)
            self._was_silent = True
            return ""
        self._was_silent = False
        return notice


def _text_of(answer: Answer) -> str:
    if answer.status != http.client.OK:
        raise OSError(f"status {answer.status}")
    return answer.text.strip()
