"""The reward of curve.py, as TRL calls it: for windfall and for TRL."""


def exact(completions, answer, **columns) -> list[float | None]:
    """1 if the response is the right number and nothing else."""
    said = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(text.strip() == right) for text, right in zip(said, answer, strict=True)]
