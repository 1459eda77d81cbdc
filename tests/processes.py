"""Runs modules of the tests in processes of their own, also on ptxrun.

ptxrun interprets the kernels' PTX where there is no GPU, behind stand-ins for CuPy and cuDF. DASKPS_PTXRUN names its
folder. A test that needs it starts a process with that folder on PYTHONPATH; there `import fakecudf` finds the
stand-ins, and the process of the tests never sees them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]  # of the repository: `python -m tests.folder.module` works there

needs_ptxrun = pytest.mark.skipif(
    "DASKPS_PTXRUN" not in os.environ, reason="DASKPS_PTXRUN does not name a folder of ptxrun"
)


def ptxrun_environment() -> dict[str, str]:
    """Return the environment of a process that imports the stand-ins of ptxrun, which need not be there."""
    folders = [os.environ.get("DASKPS_PTXRUN", ""), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module; for one of the tests the working directory must be `ROOT`."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def run_module(module: str, *arguments: object) -> str:
    """Run a module of the tests, with ptxrun where there is one, and return what it printed; fail if it fails."""
    command, environment = module_command(module, *arguments), ptxrun_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests_on_ptxrun(where: str, keyword: str, seed: int) -> str:
    """Run the tests at `where` whose names contain `keyword` once more, on ptxrun; return pytest's output.

    The other process has DASKPS_TEST_BACKEND=ptxrun and the seed in DASKPS_TEST_SEED; it installs the stand-ins itself.
    """
    command = module_command("pytest", "-q", "-p", "no:cacheprovider", "-k", keyword, where)
    environment = {**ptxrun_environment(), "DASKPS_TEST_BACKEND": "ptxrun", "DASKPS_TEST_SEED": str(seed)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout
