"""The metrics that Prometheus reads at /metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

SECOND_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server; the names of those it defines begin with `bertkit_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bertkit_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"bertkit_{name}", text, labels, registry=self.registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], label: str = "model"
        ) -> Histogram:
            full = f"bertkit_{name}"
            return Histogram(full, text, [label], registry=self.registry, buckets=buckets)

        self.requests = counter("requests", "Requests answered.", "route", "status")
        self.inputs = counter("inputs", "Inputs of answered requests.", "model")
        self.seconds = histogram("request_seconds", "Until the response.", SECOND_BUCKETS, "route")
        self.in_flight = gauge("requests_in_flight", "Requests in progress or waiting.")
        self.queue_requests = gauge("queue_requests", "Requests waiting in the queue.", "model")
        self.queue_tokens = gauge("queue_tokens", "Tokens waiting or being computed.", "model")
        self.queue_seconds = histogram("queue_seconds", "Waiting in the queue.", SECOND_BUCKETS)
        self.batch_seconds = histogram("batch_seconds", "Computing a batch.", SECOND_BUCKETS)
        self.batch_tokens = histogram("batch_tokens", "Tokens in a batch.", TOKEN_BUCKETS)
        self.batch_requests = histogram("batch_requests", "Requests in a batch.", REQUEST_BUCKETS)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Record an answered request."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def computed(self, model: str, tokens: int, waits: Sequence[float], seconds: float) -> None:
        """Record a computed batch."""
        queue_seconds = self.queue_seconds.labels(model)
        for wait in waits:
            queue_seconds.observe(wait)
        self.batch_seconds.labels(model).observe(seconds)
        self.batch_tokens.labels(model).observe(tokens)
        self.batch_requests.labels(model).observe(len(waits))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
