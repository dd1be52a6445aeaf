"""Extracts the answer from the text of the policy."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus right after a digit, letter or bracket is a subtraction. Commas count only if they group thousands.
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
NUMBER = re.compile(rf"(?:(?<![\w)\]}}])-)?{_DIGITS}(?:[eE][+-]?\d{{1,3}}(?!\d))?")
_PLAIN_NUMBER = re.compile(f"-?{_DIGITS}")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]{3,}")
_MATHEMATICS = re.compile(r"[\d\\$=+*/^<>{}()\[\]|_]")
_BRACE = re.compile(r"\\boxed\{|[{}]")


def extract(text: str, gold: str | None) -> str:
    """The content of the last <answer>...</answer> or \\boxed{...}. Without these, the whole text if that is the gold
    answer; otherwise the last number if the gold answer is one, or else the last line. A number equal to the gold
    answer is returned as spelled there.

    >>> extract("3 + 4 = 7, so <answer>7.0</answer>", "7"), extract("3 + 4 = 7.", "7"), extract("Hm.\\n\\nYes\\n", "No")
    ('7', '7', 'Yes')
    """
    answer = marked(text)
    if answer is None and text.strip() == gold:
        answer = text.strip()
    elif answer is None and is_number(gold):
        answer = last_number(text)
    elif answer is None:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = lines[-1] if lines else ""
    return gold if gold is not None and same_number(answer, gold) else answer


def marked(text: str) -> str | None:
    """The content of the last <answer>...</answer> or \\boxed{...}, whichever opens later, or None."""
    tags = list(_TAG.finditer(text))
    box = _last_box(text)
    if tags and (box is None or tags[-1].start() > box[0]):
        return tags[-1][1].strip()
    return box[1].strip() if box else None


def last_number(text: str) -> str:
    """The last number in the text without its thousands commas, or ''."""
    numbers = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1].replace(",", "") if numbers else ""


def is_number(gold: str | None) -> bool:
    return gold is not None and _PLAIN_NUMBER.fullmatch(_bare(gold)) is not None


def is_words(gold: str) -> bool:
    """Whether a right answer is words, which math-verify would read as the product of their letters."""
    return _WORD.search(gold) is not None and not _MATHEMATICS.search(gold)


def same_number(answer: str, gold: str) -> bool:
    """Whether both are the same number: '$1,200.0' is 1200."""
    bare = _bare(answer)
    if not is_number(gold) or not NUMBER.fullmatch(bare):
        return False
    return Decimal(bare.replace(",", "")) == Decimal(_bare(gold).replace(",", ""))


def _bare(number: str) -> str:
    return number.replace("\N{MINUS SIGN}", "-").strip().lstrip(" $\\(+").rstrip(" $\\().")


def _last_box(text: str) -> tuple[int, str] | None:
    """The start and the content of the last closed \\boxed{...}. Braces nest: one pass uses a stack of open braces."""
    opened: list[re.Match[str]] = []
    last = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{" and (last is None or start.start() > last[0]):
            last = start.start(), text[start.end() : brace.start()]
    return last
