"""Metrics of runs at Dask's own /metrics endpoint of the scheduler.

In: a `Collector`. Out: a collector of prometheus_client, in the registry that the endpoint writes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from daskps.view.figures import STAGES, TIERS

if TYPE_CHECKING:
    from daskps.view.collector import Collector


class RunMetrics:
    """Reads the collector whenever somebody scrapes."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def register(self) -> None:
        """Be part of /metrics."""
        prometheus_client.REGISTRY.register(self)

    def unregister(self) -> None:
        """Not any more."""
        prometheus_client.REGISTRY.unregister(self)

    def describe(self) -> list[Metric]:
        """Nothing in advance: several schedulers may live in one process, one after the other."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What is known now."""
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
            for stage in STAGES:
                counter.add_metric([stage], totals.get(f"{kind} {stage}", 0))
            yield counter
        tasks = GaugeMetricFamily("daskps_stage_tasks", "Tasks of each stage, waiting or running", labels=["stage"])
        for stage, count in self._collector.tasks.items():
            tasks.add_metric([stage], count)
        yield tasks
        if self._collector.batches:
            yield from self._last_batch()

    def _last_batch(self) -> Iterator[Metric]:
        batch, job = self._collector.batches[-1], self._collector.job
        values = {
            "daskps_position_rows": ("Rows of the data behind the run", batch["position"]),
            "daskps_stop_position_rows": ("Rows of the data that the run will see", batch["stop_position"]),
            "daskps_examples_per_second": ("Rate over the last few batches", batch["examples_per_second"]),
            "daskps_compactions": ("Parameter files compacted by the run", batch["levels"].get("compactions", 0)),
            "daskps_stale_rows": ("Rows on disk that newer ones replace", batch["levels"].get("stale_rows", 0)),
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
