"""Text to ids: the engine's input equals the chat template's ids for the whole conversation.

Not covered: a reply whose first characters a tokenizer would merge with the end of the prompt; the policy's tokens are
kept as generated, so there is nothing to compare.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from windfall.controller.rollout.stop_strings import StopStrings
from windfall.errors import WindfallError
from windfall.models.load import load_tokenizer
from windfall.models.text import Text
from windfall.recipe.file import parse_recipe
from windfall.trainer.derived import text_for

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]


def tokenizer(template: str | None, eos: str | None, *, adds_bos: bool = False) -> Any:
    """Byte-level BPE with enough merges that words are tokenized differently in a text than alone."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    t.decoder = decoders.ByteLevel()  # pyright: ignore
    words = ["user\nassistant\nhigher\nlower\n\n", "say a number", "[INST] 12 [/INST]"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet))
    if adds_bos:
        t.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single="<bos> $A", special_tokens=[("<bos>", t.token_to_id("<bos>"))]
        )
    out = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token=eos)
    out.chat_template = template
    return out


CHATS = {
    "chatml": (tokenizer(CHATML, "<|im_end|>"), (), "<|im_end|>"),
    "eos is another": (tokenizer(CHATML, "<eos>"), ("<|im_end|>",), "<|im_end|>"),
    "inst": (tokenizer(INST, "<eos>", adds_bos=True), (), "<eos>"),
}
words = st.text("abc 12\n.é", min_size=1).filter(lambda s: s.strip() == s)


@pytest.mark.parametrize("name", list(CHATS))
@settings(deadline=None, max_examples=30)
@given(said=st.lists(words, min_size=1, max_size=7))
def test_conversation_equals_the_rendered_template(name: str, said: list[str]) -> None:
    tok, extra, end = CHATS[name]
    text = Text(tok, tok.convert_tokens_to_ids(list(extra)))
    said = said if len(said) % 2 else said[:-1]  # the environment speaks first and last
    ids = list(text.prompt(said[0]))
    for reply, observation in zip(said[1::2], said[2::2], strict=True):
        ids += tok.encode(reply, add_special_tokens=False)
        ids += [tok.convert_tokens_to_ids(end), *text.observation(observation)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": s} for i, s in enumerate(said)]
    whole = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tok.decode(ids) == whole
    assert ids == tok.encode(whole, add_special_tokens=False)


def test_prompt_ends_at_the_start_of_the_answer() -> None:
    tok = CHATS["chatml"][0]
    assert tok.decode(Text(tok).prompt("12")).endswith("12<|im_end|>\n<|im_start|>assistant\n")
    assert (
        tok.decode(Text(tok).observation("higher")) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_text_has_no_template() -> None:
    tok = tokenizer(None, "<eos>")
    text = Text(tok)
    assert tok.decode(text.prompt("12 [/INST]")) == "12 [/INST]"
    assert tok.decode(text.observation("\nhigher\n")) == "\nhigher\n"


def test_plain_text_has_one_bos_token() -> None:
    tok = tokenizer(None, "<eos>", adds_bos=True)
    text = Text(tok)
    assert text.prompt("12")[0] == tok.bos_token_id
    assert tok.bos_token_id not in text.observation("12")


def test_decode_skips_special_tokens() -> None:
    tok = CHATS["chatml"][0]
    assert Text(tok).decode(tok.encode("<|im_start|>higher é<|im_end|>")) == "higher é"


@pytest.mark.parametrize(
    ("eos", "extra", "stop"),
    [
        ("<eos>", [], {"<eos>"}),
        ("<eos>", ["<|im_end|>", "<eos>"], {"<eos>", "<|im_end|>"}),
        (None, ["<|im_end|>"], {"<|im_end|>"}),
        (None, [], set()),
    ],
)
def test_stop_ids(eos: str | None, extra: list[str], stop: set[str]) -> None:
    tok = tokenizer(None, eos)
    assert Text(tok, tok.convert_tokens_to_ids(extra)).stop == set(tok.convert_tokens_to_ids(list(stop)))


@pytest.mark.parametrize(("configured", "stop"), [(None, {2}), (2, {2}), (7, {2, 7}), ([7, 8], {2, 7, 8})])
def test_stop_ids_include_those_of_the_model(configured: Any, stop: set[int]) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert text_for(load_tokenizer("tiny"), model, {}).stop == stop


def test_list_of_messages_uses_the_chat_template() -> None:
    tok = CHATS["chatml"][0]
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12"}]
    whole = tok.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert list(Text(tok).prompt(said)) == tok.encode(whole, add_special_tokens=False)
    assert Text(tok).prompt(said[1:]) == Text(tok).prompt("12")


def test_messages_that_the_template_rejects_raise_an_error() -> None:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "12"}]
    with pytest.raises(WindfallError, match="no chat template"):
        Text(tokenizer(None, "<eos>")).prompt(said)
    picky = tokenizer("{{ raise_exception('no system role') if messages[0].role == 'system' }}", "<eos>")
    with pytest.raises(
        WindfallError, match=r"cannot render these messages: no system role\nThe roles were: system, user"
    ):
        Text(picky).prompt(said)


THINKING = CHATML.replace(
    "assistant\n{% endif", "assistant\n{% if not enable_thinking %}<think></think>{% endif %}{% endif"
)


def test_template_arguments_and_off_switch(tmp_path: Any) -> None:
    given = tokenizer(INST, "<eos>")
    ask = [{"role": "user", "content": "12"}]

    def shown(**options: Any) -> str:
        return given.decode(Text(given, **options).prompt(ask), skip_special_tokens=False)

    assert shown() == "<bos>[INST] 12 [/INST]"
    assert shown(template=CHATML) == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    assert shown(template=THINKING, arguments={"enable_thinking": False}).endswith("assistant\n<think></think>")
    assert shown(template=THINKING, arguments={"enable_thinking": True}).endswith("assistant\n")
    off = Text(given, enabled=False)
    assert off.prompt("12") == tuple(given.encode("12"))
    assert off.observation("higher") == tuple(given.encode("higher", add_special_tokens=False))
    with pytest.raises(WindfallError, match=r"chat\.enabled is false"):
        off.prompt(ask)
    with pytest.raises(WindfallError, match="Expected an expression"):
        Text(given, template="{% if %}").prompt(ask)


def test_the_template_is_a_file_or_itself(tmp_path: Any) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    section = parse_recipe({"chat": {"template": str(file)}}, where="test").chat
    assert section.source() == section.with_source().template == CHATML
    assert parse_recipe({"chat": {"template": CHATML}}, where="test").chat.source() == CHATML
    assert parse_recipe({}, where="test").chat.source() is None
    with pytest.raises(WindfallError, match="cannot read the template"):
        parse_recipe({"chat": {"template": str(tmp_path / "other.jinja")}}, where="test").chat.source()


def test_the_end_of_a_turn_that_a_stop_string_ended_is_rendered() -> None:
    given = tokenizer(CHATML, "<|im_end|>")
    text = Text(given)
    (end,) = text.stop
    other = given.convert_tokens_to_ids("<eos>")
    assert text.observation("lower", last=other) == (end, *text.observation("lower", last=end))


def test_a_stop_string_may_be_the_special_token_that_ends_turns_in_the_template() -> None:
    """As with base models that have a chat template: a turn ends with another token than the end of the text."""
    given = tokenizer(CHATML, "<eos>")
    text, end = Text(given), given.convert_tokens_to_ids("<|im_end|>")
    said = given.encode("12", add_special_tokens=False)
    stops = StopStrings(["<|im_end|>"], partial(text.decode, special=True))
    assert stops.end("0/0", [*said, end, *said], 0) == len(said) + 1
    assert text.decode([*said, end]) == "12"
    assert given.decode(text.observation("lower", last=end)).startswith("\n<|im_start|>user")
