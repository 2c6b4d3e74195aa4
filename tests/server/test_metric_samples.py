"""What an inspection takes from the registry that Prometheus reads."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from teacher_logits.views import MetricView
from teacher_logits_server.metrics.samples import samples_of


def test_counts_come_under_the_names_and_labels_that_prometheus_has() -> None:
    registry = CollectorRegistry()
    counter = Counter("teacher_logits_x_total", "x", ("b", "a"), registry=registry)
    counter.labels("1", "2").inc(3)
    Gauge("teacher_logits_g", "g", registry=registry).set(4)

    assert samples_of(registry) == (
        MetricView(name="teacher_logits_x_total", labels=(("a", "2"), ("b", "1")), value=3.0),
        MetricView(name="teacher_logits_g", labels=(), value=4.0),
    )


def test_of_a_histogram_sum_and_count_come_and_no_bucket() -> None:
    registry = CollectorRegistry()
    Histogram("teacher_logits_h", "h", registry=registry).observe(0.25)

    assert {each.name: each.value for each in samples_of(registry)} == {
        "teacher_logits_h_sum": 0.25,
        "teacher_logits_h_count": 1.0,
    }


def test_what_is_not_the_servers_stays_away() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Counter("other_total", "o", registry=registry).inc()

    assert samples_of(registry) == ()
