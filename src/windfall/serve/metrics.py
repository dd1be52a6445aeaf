"""What a server has done, as numbers: counters and histograms, and their text for Prometheus.

One thread writes (the host's), any thread may read: a reader may see a number that is one step old.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper limits of the buckets of a histogram of times."""


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


@dataclass
class ServeMetrics:
    requests: Counter[str] = field(default_factory=Counter)
    """Requests that ended, by how: stop, length, canceled, rejected or overloaded."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    """One value for every request with at least two tokens, canceled ones too."""
    late_first_tokens: int = 0
    late_tokens: int = 0
    rollout_tokens: int = 0
    rollout_steps: int = 0
    rollout_waits: int = 0
    responses_returned: Counter[str] = field(default_factory=Counter)
    """By reason: memory or compute."""
    serving_seconds: float = 0.0
    rollout_seconds: float = 0.0
    """Time of all steps of a tenant. Not in /metrics."""


SHOWN = {
    "requests": ("serve_requests_total", "Requests that ended, by how.", "finish"),
    "responses_returned": ("lend_returned_total", "Responses returned to the controller, by reason.", "reason"),
    "prompt_tokens": ("serve_prompt_tokens_total", "Prompt tokens of all requests.", ""),
    "generated_tokens": ("serve_generated_tokens_total", "Tokens generated for requests.", ""),
    "ttft": ("serve_ttft_seconds", "Time to the first token.", ""),
    "tpot": ("serve_tpot_seconds", "Mean time per token after the first, by request.", ""),
    "late_first_tokens": ("serve_ttft_violations_total", "Requests whose first token was late.", ""),
    "late_tokens": ("serve_tpot_violations_total", "Requests with too long a time per token.", ""),
    "rollout_tokens": ("lend_generated_tokens_total", "Tokens generated for the run.", ""),
    "rollout_steps": ("lend_steps_total", "Engine steps for the run.", ""),
    "rollout_waits": ("lend_waits_total", "Turns in which the run had work and got no rows.", ""),
}
"""What /metrics shows: name, help and label of each number."""


def family(name: str, help: str, value: Mapping[str, float] | Histogram | float, label: str = "") -> Metric:
    """What Prometheus gets of a number. The name of a counter ends with `_total`, that of a gauge does not."""
    if isinstance(value, Histogram):
        buckets = zip([*map(str, SECONDS), "+Inf"], itertools.accumulate(value.counts), strict=True)
        return HistogramMetricFamily(f"windfall_{name}", help, list(buckets), value.sum)
    made = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return made(f"windfall_{name}", help, value)
    by_label = made(f"windfall_{name}", help, labels=[label])
    for key, number in sorted(value.items()):
        by_label.add_metric([key], number)
    return by_label


def render(metrics: ServeMetrics, state: Iterable[Metric]) -> str:
    """The text of /metrics. `state`: what to show beside the counts."""
    values = vars(metrics)
    counts = [family(name, help, values[key], label) for key, (name, help, label) in SHOWN.items()]
    return generate_latest(_Families([*counts, *state])).decode()  # pyright: ignore[reportArgumentType]


class _Families(NamedTuple):
    """What `generate_latest` needs of a registry."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families
