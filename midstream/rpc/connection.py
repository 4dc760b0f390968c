"""A connection between two services that carries messages, whatever its transport, and its handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from google.protobuf.message import Message


class FrameHandler(Protocol):
    """Callbacks of a connection.

    Attributes:
        message_class: Class of the messages that it takes.
    """

    @property
    def message_class(self) -> type[Message]: ...

    def take(self, message: Any) -> None:
        """Handle a message, which it may keep; an error closes the connection."""

    def resume(self) -> None:
        """Handle a connection that is writable again."""

    def lose(self, error: Exception | None) -> None:
        """Handle the end of the connection, whether it failed or was closed. It is called once."""


class Connection(Protocol):
    """One end of a connection.

    Attributes:
        handler: Handles what arrives.
        is_open: Whether messages can be sent.
        on_read: Called after the messages that were read together have been handled.
    """

    handler: FrameHandler
    is_open: bool
    on_read: Callable[[], None]

    @property
    def is_writable(self) -> bool:
        """Whether messages can be sent and the peer keeps up with them."""

    def send(self, message: Message) -> None:
        """Send a message, which must not be changed afterwards. Within a process, the peer handles it before this
        returns.
        """

    def post(self, message: Message) -> None:
        """Like `send`, but at the end of this event-loop iteration, together with other messages."""

    def fail(self, error: Exception) -> None:
        """Close the connection immediately because of an error; unsent data is dropped."""

    def close(self) -> None:
        """Close the connection once all data has been written."""
