"""Build everything that a release publishes, from a commit: `make release`, which writes build/release.

midstream-VERSION-py3-none-manylinux*.whl   the package, with the CPU kernels of every instruction set
midstream-VERSION.tar.gz                    the sources of the package
midstream-chart-VERSION.tgz                 the Helm chart
midstream-images-VERSION-amd64.tar.gz       the four images, for `podman load` or `docker load`
midstream-VERSION.cdx.json, midstream-images-VERSION.cdx.json   bills of materials (CycloneDX 1.6)
THIRD-PARTY-LICENSES.txt, CHANGELOG.md, LICENSE
midstream-VERSION.provenance.json           the commit and the inputs, and the digests of all files (in-toto, SLSA)
SHA256SUMS

The same commit, the same versions of packages and the same root file system for the images make the same bytes. For
this, the time of all files is that of the commit, or SOURCE_DATE_EPOCH. IMAGE_FLAGS has further flags for `buildah
build`, for example volumes with wheels.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from deploy.release.archives import repack, write_gzip, write_sums
from deploy.release.contents import (
    container,
    debian_components,
    packages_in,
    python_components,
    script_components,
    write_bill,
    write_licences,
)
from deploy.release.provenance import write_provenance
from deploy.release.source import ReleaseError, commit_of, copy_commit, refuse_other_machines

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("midstream-router", "midstream-scheduler", "midstream-detokenizer", "midstream-gpu-worker")
ENVIRONMENT = "opt/midstream"  # of the images


class Release:
    """One build. Steps write into `output`; `sources` is a copy of the commit."""

    def __init__(self, sources: Path, output: Path, commit: str, time_s: int) -> None:
        self.sources = sources
        self.output = output
        self.commit = commit
        self.time_s = time_s
        text = (sources / "midstream" / "__init__.py").read_text(encoding="utf-8")
        (self.version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
        self.tools = Path(sys.executable).parent
        self.environment = os.environ | {
            "SOURCE_DATE_EPOCH": str(time_s),
            "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONHASHSEED": "0",
        }
        self.environment.pop("PYTHONPATH", None)

    def run(self, *command: str | Path, **more: str) -> str:
        """Run a command among the sources; return its output. Raises ReleaseError if it fails."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=self.sources, env=self.environment | more, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ReleaseError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr).strip()[-4000:]}")
        return done.stdout

    def wheel(self) -> Path:
        """Build the wheel for every Linux of this platform; return its path."""
        raw = self.sources / "dist"
        python = self.tools / "python"
        self.run(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", raw, WHEEL_KERNELS="1")
        (built,) = raw.glob("*.whl")
        self.run("auditwheel", "repair", "--wheel-dir", self.output, built)
        (wheel,) = self.output.glob("*.whl")
        return wheel

    def source_archive(self) -> None:
        """Pack the sources of the package."""
        self.run(self.tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", self.output)
        repack(self.output / f"midstream-{self.version}.tar.gz", self.time_s)

    def chart(self) -> None:
        """Pack the Helm chart."""
        self.run("helm", "package", "deploy/helm/midstream", "--destination", self.output)
        packed = self.output / f"midstream-{self.version}.tgz"
        repack(packed, self.time_s)
        packed.rename(self.output / f"midstream-chart-{self.version}.tgz")

    def packages(self, wheel: Path) -> None:
        """Install the wheel with all services as pinned; describe what that installs."""
        folder = self.sources.parent / "environment"
        venv.create(folder, with_pip=True)
        pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-compile"]
        self.run(*pip, "--constraint", "constraints.txt", f"{wheel}[all]")
        (site,) = folder.glob("lib/python*/site-packages")
        found = packages_in(site)
        scripts = self.sources / "router" / "pages" / "static" / "vendor"
        others = [it for it in found if it.name != "midstream"]
        write_licences(self.output / "THIRD-PARTY-LICENSES.txt", others, scripts)
        components = [*script_components(scripts), *python_components(others)]
        write_bill(self.output / f"midstream-{self.version}.cdx.json", self.version, self.time_s, components)

    def images(self, base: Path) -> None:
        """Build the images from a root file system, pack them into one archive, and describe what they contain."""
        flags = ["--no-cache", *os.environ.get("IMAGE_FLAGS", "").split()]
        self.run("deploy/containers/build.sh", *flags, TAG=self.version, BASE_ARCHIVE=str(base))
        names = [f"localhost/{name}:{self.version}" for name in IMAGES]
        packed = self.sources.parent / "images.tar"
        self.run("podman", "save", "--quiet", "--multi-image-archive", "--output", packed, *names)
        with packed.open("rb") as file:
            write_gzip(file, self.output / f"midstream-images-{self.version}-amd64.tar.gz")
        packed.unlink()
        with tarfile.open(base) as archive:
            status = archive.extractfile("./var/lib/dpkg/status")
            assert status is not None
            debian = debian_components(status.read().decode())
        containers = [container(name, self.version, self._packages_of(name)) for name in IMAGES]
        path = self.output / f"midstream-images-{self.version}.cdx.json"
        write_bill(path, self.version, self.time_s, [*debian, *containers])

    def _packages_of(self, image: str) -> list[Any]:
        name = self.run("buildah", "from", "--pull-never", f"localhost/{image}:{self.version}").strip()
        try:
            root = Path(self.run("buildah", "mount", name).strip())
            return python_components(packages_in(*(root / ENVIRONMENT).glob("lib/python*/site-packages")), f"{image}/")
        finally:
            self.run("buildah", "rm", name)


def build(output: Path, base: Path | None, *, with_images: bool) -> None:
    """Build the release into a folder, which is replaced. Raises ReleaseError."""
    refuse_other_machines(platform.machine())
    commit, time_s = commit_of(ROOT, os.environ)
    os.umask(0o022)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="midstream-release-") as folder:
        sources = Path(folder) / "sources"
        copy_commit(ROOT, commit, sources)
        release = Release(sources, output, commit, time_s)
        inputs = {"constraints.txt": sources / "constraints.txt"}
        report(f"Midstream {release.version} from {commit[:12]}")
        wheel = release.wheel()
        report(wheel.name)
        release.source_archive()
        release.chart()
        report("sources and chart")
        release.packages(wheel)
        report("bill of materials and licences")
        if with_images:
            if base is None:
                base = Path(folder) / "base.tar"
                release.run("deploy/containers/base.sh", base)
                shutil.copy(base, output.parent / "base.tar")
                report(f"base of the images: {output.parent / 'base.tar'}; with BASE_ARCHIVE, it makes the same images")
            inputs["base.tar"] = base
            release.images(base)
            report("images")
        for name in ("LICENSE", "CHANGELOG.md"):
            shutil.copyfile(sources / name, output / name)
        provenance = output / f"midstream-{release.version}.provenance.json"
        write_provenance(provenance, release.version, time_s, {"gitCommit": commit}, inputs)
    write_sums(output)


_started_s = time.monotonic()


def report(step: str) -> None:
    """Print a finished step with the time so far."""
    print(f"{time.monotonic() - _started_s:4.0f} s  {step}", flush=True)


def main() -> int:
    """Run the command; return 1 if the release cannot be built."""
    parser = argparse.ArgumentParser(
        prog="make release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--base", type=Path, help="root file system of the images (.tar); made by mmdebstrap if unset")
    parser.add_argument("--no-images", action="store_true", help="leave out the images, which need buildah and podman")
    arguments = parser.parse_args()
    base = arguments.base.resolve() if arguments.base else None
    try:
        build(arguments.output.resolve(), base, with_images=not arguments.no_images)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print((arguments.output / "SHA256SUMS").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
