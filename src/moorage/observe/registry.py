"""The registry of a daemon's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import moorage


class _Now(Collector):
    """Metrics that are read off when somebody asks."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        return []


def make(component: str, read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry with the process's own metrics, ``moorage_build_info``, and what ``read`` gives at each scrape."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(_Now(lambda: [_build(component), *read()]))
    return registry


def _build(component: str) -> Metric:
    family = GaugeMetricFamily("moorage_build_info", "The release that runs.", labels=["component", "version"])
    family.add_metric([component, moorage.__version__], 1)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def by_label(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    """A gauge with one label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
