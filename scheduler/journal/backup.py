"""`midstream backup`: copy the journal and the documents of a running scheduler.

- **The log.** Segments are append-only, and files are created, renamed and deleted under the folder's lock. So the
  backup links all files into a new folder under this lock, which takes no time, and then copies the links. A copy ends
  with the last record that was written when its file was copied; a record that is torn there was not complete, and the
  scheduler drops it as after a power cut.
- **The documents** are copied by SQLite's online backup, and first: each of their requests is then in the copy of the
  journal, if it is still kept.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from midstream.cli.run_dir import RunDir, default_run_dir
from midstream.errors import ConfigError, MidstreamError
from scheduler.journal.paths import documents_of

JOURNAL, DOCUMENTS = "journal", "journal.documents"


def backup(path: Path, target: Path) -> None:
    """Copy the journal at `path` and the documents beside it into a new folder.

    Raises:
        ConfigError: The target exists, or there is no journal.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; name a new folder", field="OUTPUT")
    if not path.is_dir():
        raise ConfigError(f"there is no journal at {path}", field="--journal-path")
    target.mkdir(mode=0o700, parents=True)
    documents = documents_of(path)
    if documents.exists():
        _copy_documents(documents, target / DOCUMENTS)
    _copy_log(path, target / JOURNAL)


def _copy_log(path: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.backup-", dir=path.parent) as links:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file in path.iterdir():
                os.link(file, Path(links) / file.name)
        finally:
            os.close(lock)
        for link in sorted(Path(links).iterdir()):
            shutil.copy2(link, target / link.name)


def _copy_documents(path: Path, target: Path) -> None:
    with (
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)
    target.chmod(0o600)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if the backup failed."""
    parser = argparse.ArgumentParser(
        prog="midstream backup",
        description="Copy the journal and the documents of a scheduler, which may be running.",
        allow_abbrev=False,
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="New folder for the copy.")
    parser.add_argument("--run-dir", type=Path, default=default_run_dir(), metavar="DIR", help="Of `midstream up`.")
    parser.add_argument(
        "--journal-path", type=Path, metavar="PATH", help="The scheduler's. [that of the run directory]"
    )
    parsed = parser.parse_args(arguments)
    path = parsed.journal_path or Path(RunDir(parsed.run_dir).journal_path)
    try:
        backup(path.absolute(), parsed.output.absolute())
    except (MidstreamError, OSError, sqlite3.Error) as error:
        print(f"midstream backup: {error}", file=sys.stderr)
        return 1
    print(f"{path} is copied to {parsed.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
