"""One small trained model for all commands, and a way to call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daskps.cli import main
from tests.cli.helpers import JOB, Run


@pytest.fixture
def run() -> Run:
    """Call the command line; the exit code that is expected comes last."""

    def call(*arguments: str | Path, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output + result.stderr
        return result

    return call


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Call the command line with --json and read what it says."""

    def call(*arguments: str | Path, code: int = 0) -> Any:
        return json.loads(run(*arguments, "--json", code=code).stdout)

    return call


@pytest.fixture(scope="session")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "small.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="session")
def trained(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and what training said of it."""
    out = tmp_path_factory.mktemp("models") / "small"
    result = CliRunner().invoke(main, ["train", str(job_file), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output + result.stderr
    return out, json.loads(result.stdout)


@pytest.fixture
def model(trained: tuple[Path, dict[str, Any]]) -> Path:
    """To be read only."""
    return trained[0]
