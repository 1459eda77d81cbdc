"""Prometheus metrics of runs, at the /metrics endpoint of Dask's scheduler.

Input: a `Collector`. Output: a collector of prometheus_client, registered in the registry that the endpoint serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from daskps.types import Stage
from daskps.view.figures import TIERS

if TYPE_CHECKING:
    from daskps.view.dask import Collector


class RunMetrics:
    """Prometheus collector that reads the figures of `collector` on every scrape."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def register(self) -> None:
        """Add these metrics to /metrics."""
        prometheus_client.REGISTRY.register(self)

    def unregister(self) -> None:
        """Remove these metrics from /metrics."""
        prometheus_client.REGISTRY.unregister(self)

    def describe(self) -> list[Metric]:
        """Return no descriptions, so that the registry does not refuse the names of a second scheduler.

        Several schedulers may live in one process, one after the other.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        totals = self._collector.totals
        yield CounterMetricFamily("daskps_examples", "Examples trained", value=totals.get("examples", 0))
        yield CounterMetricFamily("daskps_batches", "Batches trained", value=totals.get("batches", 0))
        for way, words in (("read", "read from SSD-PS for misses"), ("written", "written back to SSD-PS")):
            value = totals.get(f"disk_{way}_bytes", 0)
            yield CounterMetricFamily(f"daskps_disk_{way}_bytes", f"Bytes {words}", value=value)
        for kind, words in (("seconds", "working"), ("waited", "waiting for rows")):
            counter = CounterMetricFamily(
                f"daskps_stage_{'busy' if kind == 'seconds' else 'waited'}_seconds",
                f"Seconds of each stage {words}, of the slowest node",
                labels=["stage"],
            )
            for stage in Stage:
                counter.add_metric([stage], totals.get(f"{kind} {stage}", 0))
            yield counter
        tasks = GaugeMetricFamily("daskps_stage_tasks", "Tasks of each stage, waiting or running", labels=["stage"])
        for stage, count in self._collector.tasks.items():
            tasks.add_metric([stage], count)
        yield tasks
        if self._collector.batches:
            yield from self._last_batch()

    def _last_batch(self) -> Iterator[Metric]:
        batch, job = self._collector.batches.last, self._collector.job
        values = {
            "daskps_position_rows": ("Examples of the data read so far", batch["position"]),
            "daskps_stop_position_rows": ("Examples of the data when the run ends", batch["stop_position"]),
            "daskps_examples_per_second": ("Rate over the last few batches", batch["examples_per_second"]),
            "daskps_compactions": ("Segments compacted by the run", batch["levels"].get("compactions", 0)),
            "daskps_stale_rows": ("Rows on disk that newer rows have replaced", batch["levels"].get("stale_rows", 0)),
        }
        for name, (words, value) in values.items():
            gauge = GaugeMetricFamily(name, words, labels=["job"])
            gauge.add_metric([job], value)
            yield gauge
        metrics = GaugeMetricFamily("daskps_metric", "Progressive metrics", labels=["job", "metric"])
        for name, value in batch["metrics"].items():
            metrics.add_metric([job, name], value)
        yield metrics
        rates = GaugeMetricFamily("daskps_hit_ratio", "Where the last batch found its rows", labels=["job", "tier"])
        for tier in TIERS:
            rates.add_metric([job, tier], batch["rates"][tier])
        yield rates
        for unit in ("bytes", "rows"):
            gauge = GaugeMetricFamily(f"daskps_tier_{unit}", f"Rows in each tier, in {unit}", labels=["job", "tier"])
            for tier in ("hbm", "memory", "disk"):
                gauge.add_metric([job, tier], batch["levels"].get(f"{tier}_{unit}", 0))
            yield gauge
