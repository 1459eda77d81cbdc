"""What every test shares: one compute pool of two threads, one stand-in for S3."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from daskps.device.pool import ComputePool

settings.register_profile("no deadline", deadline=None)  # other work on the machine must not fail a test
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def pool() -> Iterator[ComputePool]:
    with ComputePool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3() -> Iterator[object]:
    """An S3 stand-in on this machine, as an fsspec file system; s3:// URLs lead there. One for all tests: s3fs keeps
    its connections, and the stand-in its buckets, for as long as the process lives."""
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield s3fs.S3FileSystem()
    server.stop()
