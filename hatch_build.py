"""What a wheel has beside Python: the kernels, compiled for kinds of processors, so that who installs it needs no
compiler. Built without one, or elsewhere than on Linux and x86, it is a wheel without them for any machine."""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Kernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiling = _compiling(Path(self.root))
        compiler = compiling.compiler()
        if version == "editable" or compiler is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        self._made = tempfile.TemporaryDirectory()
        try:
            for kind, (flags, _) in compiling.KINDS.items():
                path = Path(self._made.name) / f"{kind}.so"
                compiling.compile_into(path, compiler, *flags)
                build_data["force_include"][str(path)] = f"leftward/kernels/prebuilt/{kind}.so"
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the wheel has not all kernels: {error}")
        if build_data["force_include"]:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _compiling(root: Path) -> Any:
    """The package's own module, without the package, whose dependencies are not here."""
    spec = importlib.util.spec_from_file_location("compiling", root / "src/leftward/kernels/compiling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
