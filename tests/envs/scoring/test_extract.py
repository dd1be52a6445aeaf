from __future__ import annotations

import gc
import time

import pytest

from windfall.envs.scoring.extract import extract, last_number, marked, same_number


@pytest.mark.parametrize(
    ("text", "gold", "answer"),
    [
        ("<answer> 12 </answer>", "12", "12"),
        ("<answer>1</answer> no, <answer>2</answer>, I think 3", "2", "2"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4", "1 2\n3 4"),
        ("<answer> <answer>7</answer>", "7", "7"),
        (r"so \boxed{\frac{1}{2}}", "x", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2} and \boxed{3", "2", "2"),
        (r"<answer>4</answer> \boxed{5}", "5", "5"),
        (r"<answer>\boxed{6}</answer>", "6", "6"),
        (r"\boxed{5} <answer>4</answer>", "4", "4"),
        ("3 + 4 = 7.", "7", "7"),
        ("it is 1,234,567 in all", "1234567", "1234567"),
        ("1, 2,3", "3", "3"),
        ("minus: -5", "-5", "-5"),
        ("minus: \N{MINUS SIGN}5", "-5", "-5"),
        ("12-5", "5", "5"),
        ("x=-5", "-5", "-5"),
        ("7.0", "7", "7"),
        ("<answer>$1,200.00</answer>", "1200", "1200"),
        ("<answer>about 7</answer>", "7", "about 7"),
        ("no number", "7", ""),
        ("first\n last line \n\n", "No", "last line"),
        ("", "No", ""),
        ("", "7", ""),
        ("anything\nmoves", None, "moves"),
        ("Yes,\nno\n", "Yes,\nno", "Yes,\nno"),
        ("so 1200 in all", "1,200", "1,200"),
        ("<answer>1200</answer>", "$1,200", "$1,200"),
        ("it is 0.5", ".5", ".5"),
        ("it is .5", "5", ".5"),
        ("<answer>.5</answer>", "5", ".5"),
        ("<answer>(5).</answer>", "+5", "+5"),
        ("100000", "1e5", "100000"),  # may be a hexadecimal: not taken for a number
    ],
)
def test_answer_is_extracted(text: str, gold: str | None, answer: str) -> None:
    assert extract(text, gold) == answer


def test_numbers_are_recognized() -> None:
    assert last_number("1.5e3 and (2)-3") == "3"
    assert last_number("5.") == "5"
    assert not same_number("5 or 6", "6")
    assert not same_number("1e999999999999999999999", "1")


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 20_000, "<answer>" * 20_000, "{" * 100_000, "1," * 50_000, "-" * 100_000]
)
def test_hostile_text_is_parsed_quickly(text: str) -> None:
    gc.disable()  # a collection of everything that other tests imported takes most of a second
    try:
        start = time.process_time()
        marked(text)
        extract(text, "1")
        assert time.process_time() - start < 1.0
    finally:
        gc.enable()
