"""Libraries built for other CPUs give the same bits, so a model can move between machines."""

import os
import subprocess

import pytest

from daskps.device.compile import variants
from daskps.device.native import library_folder, runnable_variants
from tests.processes import ROOT, module_command


def digests(variant: str) -> list[str]:
    environment = {**os.environ, "DASKPS_VARIANT": variant}
    result = subprocess.run(
        module_command("tests.kernels.kernel_digest"),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def baseline() -> list[str]:
    return digests(next(iter(variants())))


@pytest.mark.parametrize("variant", list(variants())[1:])
def test_a_variant_gives_the_bits_of_the_baseline(variant: str, baseline: list[str]) -> None:
    if variant not in runnable_variants():
        pytest.skip(f"this CPU cannot run {variant}")
    if not (library_folder() / f"daskps-{variant}.so").exists():
        pytest.skip(f"{variant} is not built: python -m daskps.device.compile")
    assert len(baseline) == 59
    assert digests(variant) == baseline
