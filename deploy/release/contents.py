"""What a release contains: CycloneDX bills of materials, and the licences of the Python packages that it requires."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

_TOOLS = ("pip", "setuptools", "wheel")  # those of a new environment, which Midstream does not need
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice|authors)", re.IGNORECASE)
_LICENCES = """\
Licences of the scripts that Midstream's pages contain, and of the Python packages that Midstream requires. Midstream's
own is in LICENSE. Debian packages of the images have theirs in /usr/share/doc/*/copyright there.
"""
_NAMESPACE = uuid.UUID("6f3b5f5e-8b0e-5d7f-9a34-0f2d1c0a7e62")


def packages_in(*folders: Path) -> list[Distribution]:
    """Return the Python packages installed in folders, by name; each once, without the installer's own."""
    found = {_name(it): it for it in distributions(path=[str(folder) for folder in folders])}
    return [found[name] for name in sorted(found) if name not in _TOOLS]


def python_components(packages: Iterable[Distribution], group: str = "") -> list[Component]:
    """Return a component for each Python package."""
    make = LicenseFactory()
    components = []
    for it in packages:
        licence = licence_of(it)
        components.append(
            Component(
                name=_name(it),
                version=it.version,
                bom_ref=f"{group}pypi:{_name(it)}",
                purl=PackageURL("pypi", None, _name(it), it.version),
                licenses=[make.make_from_string(licence)] if licence else [],
            )
        )
    return components


def script_components(folder: Path) -> list[Component]:
    """Return a component for each npm package that a folder's packages.json lists, of which the wheel has a file."""
    make = LicenseFactory()
    return [
        Component(
            name=it["name"],
            version=it["version"],
            bom_ref=f"npm:{it['name']}",
            purl=PackageURL("npm", None, it["name"], it["version"]),
            licenses=[make.make_from_string(it["licence"])],
        )
        for it in _scripts(folder)
    ]


def debian_components(status: str, release: str = "debian-12") -> list[Component]:
    """Return a component for each package that a dpkg status file lists as installed."""
    components = []
    for block in status.strip().split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", block, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            qualifiers = {"arch": fields["Architecture"], "distro": release}
            purl = PackageURL("deb", "debian", name, version, qualifiers)
            components.append(Component(name=name, version=version, bom_ref=f"deb:{name}", purl=purl))
    return components


def container(name: str, version: str, components: Sequence[Component]) -> Component:
    """Return an image that contains components."""
    return Component(
        name=name, version=version, type=ComponentType.CONTAINER, bom_ref=f"image:{name}", components=components
    )


def write_bill(path: Path, version: str, time_s: int, components: Sequence[Component]) -> None:
    """Write a bill of materials in CycloneDX 1.6 (JSON).

    Raises:
        ValueError: The result does not match CycloneDX's schema.
    """
    subject = Component(name="midstream", version=version, type=ComponentType.APPLICATION, bom_ref="midstream")
    bill = Bom(components=components, serial_number=uuid.uuid5(_NAMESPACE, f"{path.name} {time_s}"))
    bill.metadata.component = subject
    bill.register_dependency(subject, components)
    bill.metadata.timestamp = datetime.fromtimestamp(time_s, UTC)
    text = JsonV1Dot6(bill).output_as_string(indent=1)
    if (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"{path.name}: {problem}")
    path.write_text(text + "\n", encoding="utf-8")


def write_licences(path: Path, packages: Sequence[Distribution], scripts: Path) -> None:
    """Write the licences of Python packages, with their texts, and of the npm packages in the folder `scripts`."""
    parts = [_LICENCES]
    for script in _scripts(scripts):
        text = (scripts / f"{script['name']}.LICENSE").read_text(encoding="utf-8")
        parts.append(
            f"\n{'=' * 100}\n{script['name']} {script['version']} (npm): {script['licence']}\n\n{text.strip()}\n"
        )
    for it in packages:
        parts.append(f"\n{'=' * 100}\n{_name(it)} {it.version}: {licence_of(it) or 'not stated'}\n")
        parts.extend(f"\n--- {name}\n{text.strip()}\n" for name, text in _licence_texts(it))
    path.write_text("".join(parts), encoding="utf-8")


def licence_of(package: Distribution) -> str:
    """Return a package's licence as it states it: an SPDX expression, a name, or its classifiers; empty if none."""
    fields = package.metadata.json
    expression, name = str(fields.get("license_expression", "")), str(fields.get("license", "")).strip()
    if expression or (name and "\n" not in name and len(name) < 80 and name != "UNKNOWN"):
        return expression or name
    classifiers = [it for it in fields.get("classifier", []) if it.startswith("License ::")]
    return ", ".join(it.rpartition(" :: ")[2] for it in classifiers)


def _scripts(folder: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((folder / "packages.json").read_text(encoding="utf-8"))
    return found


def _licence_texts(package: Distribution) -> Iterator[tuple[str, str]]:
    for file in sorted(package.files or [], key=str):
        if ".dist-info" in str(file.parent) and _LICENCE_FILE.search(file.name) and Path(str(file.locate())).is_file():
            yield str(file), file.read_text(encoding="utf-8")


def _name(package: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
