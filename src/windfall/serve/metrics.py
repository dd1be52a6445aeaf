"""What a server has done, as numbers: counters and histograms, and their text for Prometheus.

One thread writes (the host's), any thread may read: a reader may see a number that is one step old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for limit, count in zip((*self.limits, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


@dataclass
class ServeMetrics:
    requests: dict[str, int] = field(default_factory=dict)
    """Requests that ended, by how: stop, length, canceled, rejected or overloaded."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    """Mean time per token after the first, one value for every request with at least two tokens."""
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


def render(metrics: ServeMetrics, gauges: Mapping[str, tuple[str, Mapping[str, float] | float]]) -> str:
    """The text of /metrics. `gauges`: by name, a help text and the value, or values by the content of a label."""
    m, out = metrics, list[str]()

    def one(name: str, kind: str, help: str, lines: Iterable[str]) -> None:
        out.extend([f"# HELP windfall_{name} {help}", f"# TYPE windfall_{name} {kind}", *lines])

    def labeled(name: str, label: str, values: Mapping[str, float]) -> Iterator[str]:
        return (f'windfall_{name}{{{label}="{key}"}} {value}' for key, value in sorted(values.items()))

    ended = labeled("serve_requests_total", "finish", m.requests)
    one("serve_requests_total", "counter", "Requests that ended, by how.", ended)
    returned = labeled("lend_returned_total", "reason", m.responses_returned)
    one("lend_returned_total", "counter", "Responses returned to the controller, by reason.", returned)
    for name, help, value in (
        ("serve_prompt_tokens_total", "Prompt tokens of all requests.", m.prompt_tokens),
        ("serve_generated_tokens_total", "Tokens generated for requests.", m.generated_tokens),
        ("serve_ttft_violations_total", "Requests whose first token was late.", m.late_first_tokens),
        ("serve_tpot_violations_total", "Requests whose mean time per token was too long.", m.late_tokens),
        ("lend_generated_tokens_total", "Tokens generated for the run.", m.rollout_tokens),
        ("lend_steps_total", "Engine steps for the run.", m.rollout_steps),
        ("lend_waits_total", "Turns in which the run had work and got no rows.", m.rollout_waits),
    ):
        one(name, "counter", help, [f"windfall_{name} {value}"])
    one("serve_ttft_seconds", "histogram", "Time to the first token.", m.ttft.lines("windfall_serve_ttft_seconds"))
    tpot = m.tpot.lines("windfall_serve_tpot_seconds")
    one("serve_tpot_seconds", "histogram", "Mean time per token after the first, by request.", tpot)
    for name, (help, value) in gauges.items():
        lines = [f"windfall_{name} {value}"] if isinstance(value, int | float) else labeled(name, "of", value)
        one(name, "gauge", help, lines)
    return "\n".join(out) + "\n"
