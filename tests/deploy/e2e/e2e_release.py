"""A release that is built twice, in fresh clones of the last commit, has the same bytes and describes its contents.

Run by `make e2e-release`. With BASE_ARCHIVE, the root file system of the images, the images are built as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from midstream import __version__
from tests.deploy.rendering import ROOT

pytestmark = pytest.mark.timeout(7200)
HAS_IMAGES = bool(os.environ.get("BASE_ARCHIVE"))


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two releases; their clones are in different folders."""
    folders = []
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in ("one", "another-clone"):
        clone = tmp_path_factory.mktemp(name) / "midstream"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "checkout", "-q", head.stdout.strip()], cwd=clone, check=True)
        flags = [] if HAS_IMAGES else ["NO_IMAGES=1"]
        subprocess.run(["make", "-s", "release", *flags], cwd=clone, check=True)
        folders.append(clone / "build" / "release")
    return folders


def test_both_have_the_same_sums(releases: list[Path]) -> None:
    one, another = ((folder / "SHA256SUMS").read_text() for folder in releases)
    assert one == another
    for folder in releases:
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_the_files_have_the_version(releases: list[Path]) -> None:
    names = {path.name for path in releases[0].iterdir()}
    expected = {
        "CHANGELOG.md",
        "LICENSE",
        "SHA256SUMS",
        "THIRD-PARTY-LICENSES.txt",
        f"midstream-{__version__}.cdx.json",
        f"midstream-{__version__}.provenance.json",
        f"midstream-{__version__}.tar.gz",
        f"midstream-chart-{__version__}.tgz",
    }
    if HAS_IMAGES:
        expected |= {f"midstream-images-{__version__}-amd64.tar.gz", f"midstream-images-{__version__}.cdx.json"}
    (wheel,) = names - expected
    assert wheel.startswith(f"midstream-{__version__}-py3-none-manylinux")
    assert names - {wheel} == expected


def test_the_sources_have_what_the_wheel_has(releases: list[Path]) -> None:
    (wheel,) = releases[0].glob("*.whl")
    prefix = f"midstream-{__version__}/"
    with tarfile.open(releases[0] / f"midstream-{__version__}.tar.gz") as archive:
        packed = {name.removeprefix(prefix) for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if not re.search(r"\.dist-info/|/_build/|/$", name)}
    folders = ("detokenizer", "gpu_worker", "kernels", "protos", "router", "scheduler")
    in_sources = {name.removeprefix("midstream/") if name.split("/")[1] in folders else name for name in modules}
    assert in_sources <= packed
    assert not [name for name in packed if name.startswith("tests/")]


def test_the_bill_of_materials_lists_the_pinned_packages(releases: list[Path]) -> None:
    bill = json.loads((releases[0] / f"midstream-{__version__}.cdx.json").read_text())
    assert bill["metadata"]["component"]["version"] == __version__
    found = {part["name"]: part["version"] for part in bill["components"]}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: found[name] for name in ("grpcio", "protobuf", "pyzmq", "starlette", "transformers")} == {
        name: pins[name] for name in ("grpcio", "protobuf", "pyzmq", "starlette", "transformers")
    }
    assert "pytest" not in found
    without = sorted(part["name"] for part in bill["components"] if not part.get("licenses"))
    assert without == []


def test_the_scripts_of_the_pages_are_listed_with_their_licences(releases: list[Path]) -> None:
    scripts = json.loads((ROOT / "router/pages/static/vendor/packages.json").read_text())
    bill = json.loads((releases[0] / f"midstream-{__version__}.cdx.json").read_text())
    purls = {part["purl"] for part in bill["components"]}
    assert {f"pkg:npm/{it['name']}@{it['version']}" for it in scripts} <= purls
    licences = (releases[0] / "THIRD-PARTY-LICENSES.txt").read_text()
    (wheel,) = releases[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for it in scripts:
            assert f"{it['name']} {it['version']} (npm): {it['licence']}" in licences
            assert f"midstream/router/pages/static/vendor/{it['name']}.LICENSE" in archive.namelist()
