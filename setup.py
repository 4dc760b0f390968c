"""Build: the top-level folders of the repository become one package.

In a checkout `router`, `scheduler` and the others are imported by these names. An installation must not take such names
in site-packages, so there they are `midstream.router`, `midstream.scheduler`, and so on: folders are mapped here, and
imports rewritten. An editable installation uses the checkout unchanged.

WHEEL_KERNELS=1 compiles the CPU kernels into the wheel, which is then specific to this platform (`make
wheel`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PARTS = ("detokenizer", "gpu_worker", "kernels", "protos", "router", "scheduler")
IS_EDITABLE = "editable_wheel" in sys.argv
HAS_KERNELS = bool(os.environ.get("WHEEL_KERNELS"))

_NAMES = "|".join(PARTS)
_FROM = re.compile(rf"^(\s*)from ({_NAMES})(\.| import )", re.MULTILINE)
_IMPORT = re.compile(rf"^(\s*)import ({_NAMES})$", re.MULTILINE)
_IMPORT_MODULE = re.compile(rf"^(\s*)import ({_NAMES})\.", re.MULTILINE)
# Type stubs of generated code import protos.X_pb2 and use it by its full name.
_FULL_NAME = re.compile(r"(?<![\w./\"])protos\.(?=\w+_pb2)")


def rewrite_imports(source: str, name: str) -> str:
    """Return a module's source with imports of our top-level packages rewritten to imports from midstream."""
    if name.endswith(".pyi"):
        return _FROM.sub(r"\1from midstream.\2\3", _FULL_NAME.sub("midstream.protos.", source))
    if _IMPORT_MODULE.search(source):
        raise SystemExit(
            f"{name}: `import PACKAGE.MODULE` of one of our packages cannot be rewritten; use `from PACKAGE import "
            "MODULE`"
        )
    return _IMPORT.sub(r"\1from midstream import \2", _FROM.sub(r"\1from midstream.\2\3", source))


class BuildPackages(build_py):
    """Copies packages, rewrites their imports, and compiles the kernels if the wheel is to contain them."""

    def run(self):
        """Build the packages; an editable installation uses the checkout as it is."""
        super().run()
        if self.editable_mode:
            return
        root = Path(self.build_lib, "midstream")
        for file in [*root.rglob("*.py"), *root.rglob("*.pyi")]:
            source = file.read_text(encoding="utf-8")
            rewritten = rewrite_imports(source, file.name)
            if rewritten != source:
                file.write_text(rewritten, encoding="utf-8")
        if HAS_KERNELS:
            environment = {**os.environ, "PYTHONPATH": str(root / "kernels")}
            subprocess.run([sys.executable, "-m", "build"], check=True, env=environment, cwd=root / "kernels")
            for lock in (root / "kernels" / "_build").glob("*.lock"):
                lock.unlink()


class WheelOfAnyPython(bdist_wheel):
    """A wheel for any version of Python: the kernels are called through ctypes, so they depend only on the platform."""

    def get_tag(self):
        """Return tags for any version of Python 3 on this platform."""
        _, _, platform = super().get_tag()
        return ("py3", "none", platform)


class PlatformDistribution(Distribution):
    """A distribution that may contain machine code."""

    def has_ext_modules(self):
        """Return whether the wheel contains compiled kernels."""
        return HAS_KERNELS


def installed_name(package: str) -> str:
    """Return the name that a folder of the repository has in an installation."""
    return package if package.partition(".")[0] == "midstream" else f"midstream.{package}"


if __name__ == "__main__":
    folders = find_packages(include=[pattern for name in ("midstream", *PARTS) for pattern in (name, f"{name}.*")])
    setup(
        packages=folders if IS_EDITABLE else [installed_name(folder) for folder in folders],
        package_dir={} if IS_EDITABLE else {f"midstream.{part}": part for part in PARTS if Path(part).is_dir()},
        package_data={"": ["py.typed", "*.proto", "csrc/*", "static/*", "static/vendor/*"]},
        cmdclass={"build_py": BuildPackages, "bdist_wheel": WheelOfAnyPython},
        distclass=PlatformDistribution,
    )
