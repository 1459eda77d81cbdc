"""The package installs where no compiler is, and its kernels run. Run with ``pytest -m install`` (about a minute)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
RUN_A_KERNEL = """
import numpy as np
import daskps
from daskps.device.native import library
out = np.zeros(2, np.uint64)
library().mix_keys(keys=np.array([0, 2**64 - 1], np.uint64), n=2, seed=7, mixed=out)
print(daskps.__file__, out.all())
"""


@pytest.mark.install
def test_pip_install_needs_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()  # a PATH with nothing on it, so no compiler either
    environment = {name: value for name, value in os.environ.items() if name not in {"CXX", "CC", "PYTHONPATH"}}
    environment |= {"PATH": str(tmp_path / "bin")}
    target = tmp_path / "site"
    # From a copy: the checkout's own build must not be found.
    subprocess.run(["git", "clone", "-q", str(CHECKOUT), str(tmp_path / "clone")], check=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(target),
        str(tmp_path / "clone"),
    ]
    subprocess.run(install, env=environment, check=True)
    environment["PYTHONPATH"] = str(target)
    ran = subprocess.run(
        [sys.executable, "-c", RUN_A_KERNEL], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == [str(target / "daskps" / "__init__.py"), "True"]
