"""A release is built from a commit, and the same inputs make the same bytes. tests/deploy/e2e builds a whole one."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy.release import compatibility
from deploy.release.archives import digest_of, repack, write_sums
from deploy.release.provenance import write_provenance
from deploy.release.source import ReleaseError, commit_of, git, refuse_other_machines
from tests.deploy.rendering import ROOT

TIME_S = 1_700_000_000


def pack(path: Path, members: list[tuple[str, bytes, int]], mtime: int, owner: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content, mode in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime, member.uname, member.uid = len(content), mode, mtime, owner, mtime
            archive.addfile(member, io.BytesIO(content))


def test_archives_of_equal_files_are_equal(tmp_path: Path) -> None:
    members = [("a/x.py", b"x", 0o664), ("a/run.sh", b"run", 0o775)]
    first, second = tmp_path / "first.tgz", tmp_path / "second.tgz"
    pack(first, members, 1, "me")
    pack(second, members[::-1], 2, "you")
    assert digest_of(first) != digest_of(second)
    for path in (first, second):
        repack(path, TIME_S)
    assert digest_of(first) == digest_of(second)
    with tarfile.open(first) as archive:
        found = [(it.name, it.mode, it.mtime, it.uid, it.uname, it.isfile()) for it in archive]
        assert found == [
            ("a/run.sh", 0o755, TIME_S, 0, "", True),
            ("a/x.py", 0o644, TIME_S, 0, "", True),
        ]
        assert archive.extractfile("a/x.py").read() == b"x"  # type: ignore[union-attr]


def test_links_are_not_repacked(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
        archive.addfile(link)
    with pytest.raises(ValueError, match=r"a\.tgz: link is neither a file nor a folder"):
        repack(path, TIME_S)


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one")
    write_sums(tmp_path)
    write_sums(tmp_path)  # does not count itself
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "a: OK\nb: OK\n")


def test_the_provenance_has_the_commit_and_the_digest_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "midstream.whl").write_text("wheel")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    base = inputs / "base.tar"
    base.write_text("base")
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "midstream.whl").write_text("wheel")
    write_provenance(folder / "x.provenance.json", "1.2.3", TIME_S, {"gitCommit": "c0ffee"}, {"base.tar": base})
    statement = json.loads((folder / "x.provenance.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {"name": "midstream.whl", "digest": {"sha256": digest_of(folder / "midstream.whl")}}
    ]
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"version": "1.2.3", "SOURCE_DATE_EPOCH": TIME_S}
    assert definition["resolvedDependencies"] == [
        {"uri": "git", "digest": {"gitCommit": "c0ffee"}},
        {"name": "base.tar", "digest": {"sha256": digest_of(base)}},
    ]


def test_other_processors_are_refused_with_the_reason() -> None:
    refuse_other_machines("x86_64")
    with pytest.raises(ReleaseError, match="releases are built for x86_64, and this machine is aarch64"):
        refuse_other_machines("aarch64")


def test_only_a_commit_is_released(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "Begin")
    commit, time_s = commit_of(tmp_path, {})
    assert (commit, time_s) == (git(tmp_path, "rev-parse", "HEAD"), int(git(tmp_path, "log", "-1", "--format=%ct")))
    assert commit_of(tmp_path, {"SOURCE_DATE_EPOCH": "7"}) == (commit, 7)
    (tmp_path / "a").write_text("2")
    with pytest.raises(ReleaseError, match=r"(?s)built from a commit, and these files differ from it:\n M a$"):
        commit_of(tmp_path, {})


def test_the_compatibility_page_is_generated() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert page == compatibility.page(), "run python -m deploy.release.compatibility"


def test_what_nobody_tested_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    (tmp_path / "results.json").write_text('{"tests": [], "kubernetes": []}')
    versions = {
        "python": "3.12.1",
        "torch": "2.13.0",
        "cuda": None,
        "postgres": None,
        "machine": "x86_64",
        "tests": "all",
    }
    compatibility.record_tests(versions, num_passed=1, num_failed=9)
    compatibility.record_tests(versions, num_passed=5, num_failed=0)  # replaces the one before
    compatibility.record_kubernetes(["1.31"])
    lines = (tmp_path / "page.md").read_text().splitlines()
    where = "5 passed (all; python 3.12.1, torch 2.13.0, machine x86_64)"
    for line in (f"| 3.12 | {where} |", "| 3.13 | untested |", "| 1.31 | validated |", "| 1.30 | untested |"):
        assert line in lines
    assert lines.count(f"| x86_64 | {where} |") == lines.count("| aarch64 | untested |") == 1
    assert f"| 2.13.0 | {where} |" in lines
    assert "| any | untested |" in lines  # CUDA
    assert "| 15 | untested |" in lines  # PostgreSQL
