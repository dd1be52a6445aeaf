"""The rows of texts from which the GPU engine drafts: random responses keep the rules, and the device's copy has what
it should. The device is an array that takes the changes and extends the texts itself, as the kernels do."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.engine.cuda.texts import NO_ROW, TextRows
from windfall.engine.drafts import FAMILY
from windfall.types import Request


class Device:
    def __init__(self, texts: TextRows) -> None:
        self.texts = texts
        self.data = np.zeros(texts.size, np.int32)
        self.length, families, tokens = np.split(self.data, [texts.rows, texts.rows * (1 + FAMILY)])
        self.families, self.tokens = families.reshape(-1, FAMILY), tokens.reshape(-1, texts.length)

    def update(self) -> None:
        indices, values = self.texts.take_changes()
        assert len(set(indices.tolist())) == len(indices), "an index was sent twice"
        self.data[indices] = values

    def extend(self, row: int, tokens: list[int]) -> None:
        end = min(self.length[row] + len(tokens), self.texts.length - 1)
        self.tokens[row, self.length[row] : end] = tokens[: end - self.length[row]]
        self.length[row] = end

    def text(self, row: int) -> list[int]:
        return self.tokens[row, : self.length[row]].tolist()

    def family(self, index: int) -> list[list[int]]:
        return [self.text(row) for row in self.families[index].tolist() if row != NO_ROW]


def make(rows: int, length: int = 40) -> tuple[TextRows, Device]:
    texts = TextRows(slots=-(-rows // 4), length=length)
    assert texts.rows == rows
    return texts, Device(texts)


def request(id: str, prompt: tuple[int, ...] = (1, 2, 3), group: str = "g", position: int = 0) -> Request:
    return Request(id=id, prompt=prompt, seed=0, max_tokens=9, group=group, position=position)


def test_siblings_are_a_family() -> None:
    texts, device = make(8)
    rows = [texts.begin(request(id), (1, 2, 3)) for id in "ab"]
    other = texts.begin(request("c", group=""), (7, 7))
    texts.remember("g", "d", 0, (5, 6))
    device.update()
    assert rows[0][1] == rows[1][1] != other[1]
    assert sorted(device.family(rows[0][1])) == [[1, 2, 3], [1, 2, 3], [5, 6]]
    assert device.family(other[1]) == [[7, 7]]
    device.extend(rows[0][0], [4])
    texts.extended("a", 1)
    assert texts.begin(request("a"), (1, 2, 3, 4)) == rows[0], "after an eviction it goes on with its text"
    device.update()
    assert device.text(rows[0][0]) == [1, 2, 3, 4]
    texts.check()


def test_largest_families_have_the_newest_texts() -> None:
    texts, device = make(24)
    for n in range(FAMILY + 3):
        texts.remember("g", str(n), 0, (n, n))
    row, family = texts.begin(request("x"), (1, 2, 3))
    device.update()
    assert device.family(family) == [[n, n] for n in range(4, FAMILY + 3)] + [[1, 2, 3]]
    assert device.text(row) == [1, 2, 3]
    texts.check()


def test_texts_that_ended_give_way_to_others_least_recently_used_first() -> None:
    texts, device = make(4)
    for id in "abc":
        texts.begin(request(id), (1, 2, 3))
    texts.remember("g", "d", 0, (9, 9))
    texts.end("a")
    texts.end("b")
    texts.remember("g", "d", 2, (9,))  # used again: now `a` is the one to go
    row, family = texts.begin(request("e"), (4, 4, 4))
    device.update()
    assert sorted(device.family(family)) == [[1, 2, 3], [1, 2, 3], [4, 4, 4], [9, 9, 9]]
    texts.remember("g", "a", 3, (5,))  # forgotten, so this would leave a gap
    device.update()
    assert [1, 2, 3, 5] not in device.family(family)
    for id in "fg":
        assert texts.begin(request(id), (1, 2, 3))[0] != NO_ROW
    assert texts.begin(request("h"), (1, 2, 3)) == (NO_ROW, NO_ROW), "all rows belong to running responses"
    texts.extended("h", 1)
    texts.end("h")
    assert texts.begin(request("e"), (4, 4, 4)) == (row, family)
    texts.check()


def test_text_goes_on_elsewhere_after_its_prompt() -> None:
    texts, device = make(8)
    row, _ = texts.begin(request("a", (1, 2, 3, 4, 5), position=2), (1, 2, 3, 4, 5))  # three tokens are the prompt
    texts.end("a")
    texts.remember("g", "a", 2, (6, 7))
    texts.remember("g", "a", 9, (8,))  # a gap
    texts.remember("g", "a", 3, (7,))  # known already
    device.update()
    assert device.text(row) == [1, 2, 3, 4, 5, 6, 7]
    texts.remember("g", "a", 4, range(100))
    device.update()
    assert device.length[row] == texts.length - 1
    again, _ = texts.begin(request("a"), (1, 2, 3))
    texts.remember("g", "a", 0, (9,))  # it is generated here: its own tokens are newer
    device.update()
    assert device.text(again) == [1, 2, 3]
    texts.check()


def test_texts_of_running_responses_stay_in_their_family() -> None:
    texts, device = make(64)
    rows = [texts.begin(request(id), (1, 2, 3)) for id in ("a", "b")]
    for n in range(2 * FAMILY):
        texts.remember("g", str(n), 0, (n, n, n))
    device.update()
    family = device.families[rows[0][1]].tolist()
    assert {row for row, _ in rows} < set(family)
    assert len(set(family)) == FAMILY
    texts.end("a")  # from now on it is one of those that ended, and older than the others
    device.update()
    family = device.families[rows[0][1]].tolist()
    assert rows[0][0] not in family
    assert rows[1][0] in family
    texts.check()


def test_length_that_the_host_knows_is_that_of_the_device() -> None:
    """The device adds no tokens to a row that is full. A sibling's text with the same id must not be longer."""
    texts, device = make(8, length=20)
    row, _ = texts.begin(request("a"), (1, 2, 3))
    device.update()
    device.extend(row, list(range(50)))
    texts.extended("a", 50)
    texts.end("a")
    texts.remember("g", "a", 0, (7, 8, 9))
    device.update()
    assert device.length[row] == texts.length - 1


def test_response_without_a_row_gets_one_when_another_ends() -> None:
    texts, device = make(4)
    for id in "abcd":
        assert texts.begin(request(id), (1, 2, 3))[0] != NO_ROW
    assert texts.begin(request("e"), (1, 2, 3))[0] == NO_ROW
    texts.begin(request("f"), (1, 2, 3))
    assert (list(texts.without), texts.available) == (["e", "f"], 0)
    texts.end("f")  # it ended without a text
    texts.end("b")
    assert (list(texts.without), texts.available) == (["e"], 1)
    row, family = texts.begin(request("e"), (1, 2, 3, 4))
    device.update()
    assert row in device.families[family]
    assert device.text(row) == [1, 2, 3, 4]
    assert (list(texts.without), texts.available) == ([], 0)
    texts.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_responses_keep_the_rules(data: st.DataObject) -> None:
    texts, device = make(data.draw(st.sampled_from([4, 8])), 12)
    running: dict[str, tuple[int, list[int]]] = {}  # row and tokens
    for _ in range(data.draw(st.integers(1, 40))):
        id = data.draw(st.sampled_from("abcdefghij"))
        group, tokens = f"g{ord(id) % 3}", data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        action = data.draw(st.sampled_from(["begin", "extend", "end", "remember"]))
        if action == "begin" and id not in running:
            row, family = texts.begin(request(id, tuple(tokens), group), tokens)
            assert (row == NO_ROW) == (id in texts.without)
            if row != NO_ROW:
                running[id] = row, list(tokens)
                device.update()
                assert row in device.families[family]
        elif action == "extend" and id in running:
            row, said = running[id]
            device.extend(row, tokens)
            texts.extended(id, len(tokens))
            said += tokens
        elif action == "end":
            texts.end(id)
            running.pop(id, None)
        elif action == "remember":
            texts.remember(group, id, data.draw(st.integers(0, 6)), tokens)
        device.update()
        texts.check()
        for row, said in running.values():
            assert device.text(row) == said[: texts.length - 1]
