"""The configurations in deploy/proxies are valid, and docs/deployment.md names their limits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.proxies.proxy import PROGRAMS, Program, placed

ROUTERS = ("127.0.0.1:50061", "127.0.0.1:50062")
URLS = ("http://127.0.0.1:8061", "http://127.0.0.1:8062")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_program_accepts_its_configuration(program: Program, tmp_path: Path) -> None:
    file = tmp_path / program.file
    file.write_text(placed(program, program.configuration(), (50060, 8060), ROUTERS, URLS, tmp_path))
    checked = subprocess.run(program.check_command(file), capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    # nginx and HAProxy report settings that they ignore as warnings.
    assert "[warn]" not in checked.stderr
    assert "[WARNING]" not in checked.stderr
