"""What a server has done, as numbers: counters and histograms, and their text for Prometheus.

One thread writes (the host's), any thread may read: a reader may see a number that is one step old.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prometheus_client import Metric as PrometheusMetric
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper limits of the buckets of a histogram of times."""


class Histogram:
    def __init__(self, limits: tuple[float, ...] = SECONDS) -> None:
        self.limits, self.counts = limits, [0] * (len(limits) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def family(self, name: str, help: str) -> HistogramMetricFamily:
        limits = [*map(str, self.limits), "+Inf"]
        buckets = list(zip(limits, itertools.accumulate(self.counts), strict=True))
        return HistogramMetricFamily(f"windfall_{name}", help, buckets, self.sum)


@dataclass
class ServeMetrics:
    requests: dict[str, int] = field(default_factory=dict)
    """Requests that ended, by how: stop, length, canceled, rejected or overloaded."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    """Mean time per token after the first, one value for every request with at least two tokens, canceled ones too."""
    late_first_tokens: int = 0
    """Requests whose first token came later than the objective."""
    late_tokens: int = 0
    """Requests whose mean time per token was above the objective."""
    serving_seconds: float = 0.0
    """Time of all serving steps."""
    rollout_seconds: float = 0.0
    """Time of all rollout steps."""
    rollout_tokens: int = 0
    rollout_steps: int = 0
    rollout_waits: int = 0
    """Turns in which the rollout had work but got no rows."""
    responses_returned: dict[str, int] = field(default_factory=dict)
    """Responses that went back to the controller, by reason: memory or compute."""

    def ended(self, how: str) -> None:
        self.requests[how] = self.requests.get(how, 0) + 1

    def returned(self, why: str, count: int) -> None:
        self.responses_returned[why] = self.responses_returned.get(why, 0) + count


class Metric(NamedTuple):
    """A number, or several by the content of a label. The name of a counter ends with `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: Mapping[str, float] | float
    label: str = ""

    def family(self) -> PrometheusMetric:
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        if isinstance(self.value, int | float):
            return made(f"windfall_{self.name}", self.help, self.value)
        family = made(f"windfall_{self.name}", self.help, labels=[self.label])
        for key, value in sorted(self.value.items()):
            family.add_metric([key], value)
        return family


def render(m: ServeMetrics, state: Iterable[Metric]) -> str:
    """The text of /metrics. `state`: what to show beside the counts."""
    counters = [
        Metric("serve_requests_total", "counter", "Requests that ended, by how.", m.requests, "finish"),
        Metric(
            "lend_returned_total", "counter", "Responses returned to the controller, by reason.",
            m.responses_returned, "reason",
        ),
        Metric("serve_prompt_tokens_total", "counter", "Prompt tokens of all requests.", m.prompt_tokens),
        Metric("serve_generated_tokens_total", "counter", "Tokens generated for requests.", m.generated_tokens),
        Metric("serve_ttft_violations_total", "counter", "Requests whose first token was late.", m.late_first_tokens),
        Metric("serve_tpot_violations_total", "counter", "Requests with too long a time per token.", m.late_tokens),
        Metric("lend_generated_tokens_total", "counter", "Tokens generated for the run.", m.rollout_tokens),
        Metric("lend_steps_total", "counter", "Engine steps for the run.", m.rollout_steps),
        Metric("lend_waits_total", "counter", "Turns in which the run had work and got no rows.", m.rollout_waits),
    ]  # fmt: skip
    families = [metric.family() for metric in [*counters, *state]]
    families.append(m.ttft.family("serve_ttft_seconds", "Time to the first token."))
    families.append(m.tpot.family("serve_tpot_seconds", "Mean time per token after the first, by request."))
    return generate_latest(_Families(families)).decode()  # pyright: ignore[reportArgumentType]


class _Families(NamedTuple):
    """What `generate_latest` needs of a registry."""

    families: list[PrometheusMetric]

    def collect(self) -> list[PrometheusMetric]:
        return self.families
