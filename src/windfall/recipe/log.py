"""The section [log] of a recipe: the page, the sample of responses, and the tools that also get the events."""

from __future__ import annotations

from pydantic import Field, field_validator

from windfall.recipe.section import Section


class Log(Section):
    page: bool = True
    """Serve a read-only page of the run on the controller's port. Its link, with a key, is printed at the start."""
    samples: int = Field(default=8, ge=0, le=256)
    """Responses per step to keep for the page, with the text, log-prob, version and worker of every token, in
    samples.jsonl. 0 keeps none: use it if tasks or responses are confidential."""
    samples_mb: float = Field(default=64.0, gt=0)
    """Upper limit for the size of samples.jsonl in MB. When it is reached, every second step in the file is removed."""
    tensorboard: bool = False
    """Also write every scalar for TensorBoard (the extra `tensorboard`)."""
    wandb: str = ""
    """Project of Weights & Biases that also gets every scalar (the extra `wandb`). Empty: none."""
    mlflow: str = ""
    """Tracking URI of MLflow, such as "http://10.0.0.9:5000", that also gets every scalar (the extra `mlflow`). Empty:
    none."""
    prometheus: str = ""
    """Address, as HOST:PORT, at which Prometheus can scrape the newest scalars under /metrics. Empty: none."""

    @field_validator("prometheus")
    @classmethod
    def _is_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"prometheus must be HOST:PORT, such as '127.0.0.1:9400', not {value!r}")
        return value
