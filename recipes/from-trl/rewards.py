"""Reward functions as TRL calls them. The TRL script and the windfall recipe beside this file use the same ones."""


def accuracy(completions, answer, **kwargs):
    """1 if the number after the last # is the right answer."""
    return [
        1.0 if text.rpartition("#")[2].strip() == right else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]


def shows_work(completions, steps, **kwargs):
    """The share of the steps that are written down. A task of one step is not scored."""
    return [
        None if count == 1 else min(1.0, text.count(";") / count)
        for text, count in zip(completions, steps, strict=True)
    ]
