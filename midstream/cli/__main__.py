"""Run the `midstream` command: `python -m midstream.cli`."""

from __future__ import annotations

from midstream.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
