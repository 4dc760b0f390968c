"""Run a service as if it were alone on its host, without Unix sockets: `python -m tests.fakes.distant SERVICE`."""

from __future__ import annotations

import asyncio
import runpy
import sys
from unittest import mock


def main() -> None:
    del sys.argv[0]
    unavailable = mock.AsyncMock(side_effect=NotImplementedError)
    loop = asyncio.SelectorEventLoop
    with mock.patch.multiple(loop, create_unix_connection=unavailable, create_unix_server=unavailable):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
