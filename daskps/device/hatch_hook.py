"""Build hook of Hatchling: compiles the native libraries into the wheel and sets the wheel's platform tag.

If no C++ compiler is on the PATH, it requests the ``ziglang`` wheel as a build dependency. It runs before the package
can be imported, so it loads `compile.py` by its path.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _compile_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("daskps_compile", Path(__file__).with_name("compile.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface[Any]):
    """Hook that builds the shared libraries just before the wheel is packed."""

    def dependencies(self) -> list[str]:
        return [] if _compile_module().system_compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        _compile_module().build()
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag}"  # plain C interface: works with any Python 3 of this platform
