"""The same job on any Dask cluster: encrypted, with workers that come and go, and with no bulk data in the middle.

Those that wait for somebody to be given up, or for processes that `dask` starts, run with
`python -m pytest tests/driver/test_clusters.py -m slow`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Security
from distributed.comm import tcp

from daskps.config import make_job
from daskps.driver.dask import run_job
from daskps.errors import ConfigError, PeerError
from daskps.reports import Progress
from tests.clusters import cluster_in_process
from tests.driver.helpers import (
    CHECKED,
    FEW,
    SMALL,
    Alone,
    Settings,
    Trained,
    merged,
    model_bits,
    started_by_hand,
)

TWO: Settings = {"cluster": {"nodes": 2}}
SMALL_BATCHES: Settings = {"train": {"snapshot_every_batches": 2, "batch_examples": 500}}


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Client]:
    """Three workers in this process that speak TLS only."""
    security = Security.temporary()
    with (
        cluster_in_process(3, protocol="tls://", security=security) as cluster,
        Client(cluster, security=security, set_as_default=False) as client,
    ):
        yield client


def on(client: Client, path: Path, *changes: Settings, **options: Any) -> Any:
    settings = merged(SMALL, FEW, CHECKED, TWO, *changes, {"out": str(path)})
    return run_job(make_job(settings), client=client, **options)


def node_addresses(client: Client) -> dict[str, str]:
    """Where each worker's node listens for the others."""

    def address(dask_worker: Any) -> str:
        plugin = dask_worker.plugins.get("daskps")  # of a run's own workers alone
        return "" if plugin is None or plugin.node is None else str(plugin.node.link.address)

    return client.run(address)  # type: ignore[no-any-return]


def has_node(dask_worker: Any) -> bool:
    plugin = dask_worker.plugins.get("daskps")
    return plugin is not None and plugin.node is not None


def test_nodes_of_a_cluster_with_tls_talk_over_tls(encrypted: Client, alone: Alone, tmp_path: Path) -> None:
    seen: set[str] = set()
    on(encrypted, tmp_path / "m", on_progress=lambda _: seen.update(node_addresses(encrypted).values()))
    assert {address.split(":")[0] for address in seen - {""}} == {"tls"}
    assert model_bits(tmp_path / "m") == alone()[1]


def test_nodes_of_a_cluster_with_tls_talk_nothing_else(encrypted: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires encryption: set it to tls"):
        on(encrypted, tmp_path / "m", {"cluster": {"protocol": "ucx"}})


@pytest.mark.slow
def test_workers_started_by_hand_with_certificates_talk_over_tls(alone: Alone, tmp_path: Path) -> None:
    def ciphers(dask_worker: Any) -> list[str]:
        """What protects each connection of this worker's node to another one."""
        node = dask_worker.plugins["daskps"].node
        connections = [] if node is None else list(node.link._transport._connections.values())
        sockets = [connection.comm.stream.socket for connection in connections]
        return [socket.version() if hasattr(socket, "version") else "nothing" for socket in sockets]

    made, certificate, key = Security.temporary(), tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text(made.tls_client_cert)  # signed by itself, one for all
    key.write_text(made.tls_client_key)
    files = {"--tls-ca-file": certificate, "--tls-cert": certificate, "--tls-key": key}
    options = ["--protocol", "tls", *(part for option, file in files.items() for part in (option, str(file)))]
    seen: set[str] = set()
    with started_by_hand(tmp_path, 2, options) as (address, _):
        assert address.startswith("tls://")
        security = Security(
            tls_ca_file=str(certificate),
            tls_client_cert=str(certificate),
            tls_client_key=str(key),
            require_encryption=True,
        )
        with Client(address, security=security, set_as_default=False) as client:
            client.wait_for_workers(2)
            on(client, tmp_path / "m", on_progress=lambda _: seen.update(*client.run(ciphers).values()))
    assert {version[:3] for version in seen} == {"TLS"}
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.mark.slow
def test_a_run_goes_on_without_a_worker_that_retires(encrypted: Client, alone: Alone, tmp_path: Path) -> None:
    retired: list[threading.Thread] = []

    def retire(progress: Progress) -> None:
        if progress.batch == 2 and not retired:
            first = sorted(encrypted.scheduler_info(n_workers=-1)["workers"])[0]
            retired.append(threading.Thread(target=encrypted.retire_workers, args=([first],)))
            retired[0].start()

    outcome = on(encrypted, tmp_path / "m", SMALL_BATCHES, on_progress=retire)
    retired[0].join()
    assert outcome.progress.restarts == 1
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.mark.slow
def test_a_stuck_node_stops_the_run_and_nothing_is_lost(
    workers: Client, on_nodes: Trained, alone: Alone, tmp_path: Path
) -> None:
    impatient: Settings = {"cluster": {"wait_seconds": 2.0, "restarts": 0}}
    processes = workers.run(os.getpid)
    stuck = processes[sorted(processes)[1]]
    stopped: list[int] = []

    def stop(progress: Progress) -> None:
        if progress.batch == 3 and not stopped:
            os.kill(stuck, signal.SIGSTOP)
            stopped.append(stuck)

    try:
        stuck_at = (
            r"node 0, stage \w+, batch \d+: waited 2 s for node 1|node 1, stage [a-z ]+, batch \d+: the worker .* stuck"
        )
        with pytest.raises(PeerError, match=stuck_at) as raised:
            on_nodes(2, SMALL_BATCHES, impatient, out=tmp_path / "m", on_progress=stop)
        assert "cluster.wait_seconds" in str(raised.value)
        others = [worker for worker in processes if processes[worker] != stuck]
        assert not any(workers.run(has_node, workers=others).values())
    finally:
        os.kill(stuck, signal.SIGCONT)
    on_nodes(2, SMALL_BATCHES, out=tmp_path / "m")
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.fixture
def bytes_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes that this process, with the scheduler and the client in it, has sent and received over Dask's comms."""
    counted = [0]
    write, read = tcp.TCP.write, tcp.read_bytes_rw

    async def counting_write(self: Any, *args: Any, **kwargs: Any) -> int:
        count: int = await write(self, *args, **kwargs)
        counted[0] += count
        return count

    async def counting_read(stream: Any, count: int) -> Any:
        counted[0] += count
        return await read(stream, count)

    monkeypatch.setattr(tcp.TCP, "write", counting_write)
    monkeypatch.setattr(tcp, "read_bytes_rw", counting_read)
    return lambda: counted[0]


def test_bulk_data_passes_neither_scheduler_nor_client(on_nodes: Trained, bytes_here: Callable[[], int]) -> None:
    """As many batches and steps of ten times the examples: nothing that comes with examples goes there."""

    def passed(step: int) -> tuple[int, float]:
        settings: Settings = {
            "data": {"synthetic": {"examples": 20 * step, "keys_per_slot": 100_000}},
            "train": {"minibatch_examples": step, "batch_examples": 10 * step},
        }
        before = bytes_here()
        counts = on_nodes(2, settings)[0].progress.counts
        return bytes_here() - before, counts["distinct_keys"]

    (few_bytes, few_keys), (many_bytes, many_keys) = passed(200), passed(2_000)
    more_keys = many_keys - few_keys
    assert more_keys > 100_000
    assert few_bytes > 0
    assert many_bytes - few_bytes < more_keys  # heartbeats of a longer run; a key alone is 8 bytes, a row 52


@pytest.mark.slow
def test_a_slow_scheduler_costs_time_and_nothing_else(workers: Client, on_nodes: Trained, alone: Alone) -> None:
    over = threading.Event()

    def block() -> None:
        while not over.wait(0.02):
            workers.run_on_scheduler(time.sleep, 0.2)

    thread = threading.Thread(target=block)
    thread.start()
    try:
        outcome, path = on_nodes(3, {"train": {"depth": 4}})
    finally:
        over.set()
        thread.join()
    assert outcome.progress.restarts == 0
    assert model_bits(path) == alone()[1]


def test_a_script_that_trains_where_every_process_imports_it_is_told_so(tmp_path: Path) -> None:
    data = {"format": "synthetic", "synthetic": {"examples": 500, "slots": 2, "keys_per_slot": 50}}
    job = {"out": str(tmp_path / "m"), "data": data, "cluster": {"nodes": 2}, "budget": {"memory_bytes": "16MB"}}
    (tmp_path / "script.py").write_text(f"import daskps\ndaskps.train({job!r})\n")
    ended = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert ended.returncode == 1
    assert 'under `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("Traceback") == 1
    assert "Nanny" not in ended.stderr
