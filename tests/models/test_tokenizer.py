"""The light tokenizer against transformers' own: the same folder gives the same ids, text and prompts.

Templates with tools are in test_chat_templates.py. Not covered: tokenizer classes of transformers that rebuild their
parts instead of using tokenizer.json unchanged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from windfall.errors import WindfallError
from windfall.models import tokenizer
from windfall.models.chat import Chat
from windfall.models.load import TINY, cache_folder
from windfall.models.text import Text

SMOLLM2 = cache_folder() / "smollm2-135m"
THERE = [TINY] + ([SMOLLM2] if (SMOLLM2 / "tokenizer.json").is_file() else [])
SPECIAL = ["<bos>", "<eos>", "<pad>"]
TEXTS = [
    "", " ", "\n\n", "12 + 7 =", "Hello, world!  two  spaces \t tab", "é e\u0301 ﬁ Å 𝔸", "日本語 и русский עברית",
    "👩‍👩‍👧‍👦🏳️‍🌈", "<|im_start|>user\nhi<|im_end|>", "<bos>a<eos> b <pad>", "<|im_st art|>", "<|endoftext|>x",
    "\x00\x07\u200b\ufeff", "<b>&amp;\"'</b>", "a" * 500, "def f(x):\n    return x ** 2\n", "tok<think>ens</think>",
]  # fmt: skip
MESSAGES = [
    [("user", "12 + 7?")],
    [("system", "Be brief."), ("user", "hi")],
    [("user", "."), ("assistant", "  <b>\"x\" & 'y'</b> é "), ("user", "\n go on {{ 1 }} {% raw %}")],
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "default system": """{%- if messages[0]['role'] == 'system' %}
    {{- '<sys>' + messages[0]['content'] | trim + '</sys>' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {{- '<sys>You are windy.</sys>' }}
    {%- set rest = messages %}
{%- endif %}
{% for m in rest %}
    {% if loop.index0 == 1 %}
    [{{ m.role | upper }}]
    {% endif %}
    {{ m.content }}
{% endfor %}
""",
    "bos, eos and a refusal": "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant', 'system') %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if pad_token is defined %}P{% endif %}{% if nope is defined %}N{% endif %}{{ own_token }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}"
    "{{ {'b': [1, none, true], 'a': '<é&>'} | tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"
    "{% endfor %}{% if tools %}T{% endif %}{% if documents is none %}D{% endif %}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}|{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}\n{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ loop.index }}{{ x }}{% endfor %}",
    "namespace and macro": "{% set ns = namespace(n=0) %}{% macro turn(m) %}<{{ m.role }}>{{ m.content.strip() }}"
    "{%- endmacro %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{{ ns.n }}{% endfor %}"
    "{{ messages | map(attribute='role') | join(',') }}{{ messages[::-1][0].content.split(' ')[-1] }}",
    "year": "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}",
}


@cache
def light(folder: Path) -> tokenizer.Tokenizer:
    return tokenizer.load(folder)


@cache
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def chat(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE that puts <bos> first, written as a folder."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    t.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet))
    t.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])  # pyright: ignore
    t.enable_padding(length=64, pad_token="<pad>", pad_id=2)
    t.enable_truncation(8)
    out = tmp_path_factory.mktemp("small")
    t.save(str(out / "tokenizer.json"))
    return write(out, bos_token="<bos>", eos_token="<eos>")


def write(folder: Path, **config: Any) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def variant(small: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(small, to, dirs_exist_ok=True)
    return write(to, **config)


def saved(folder: Path) -> tokenizer.Tokenizer:
    """The light tokenizer of a folder that transformers has written, as the trainer does for the controller."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "saved")
    return tokenizer.load(folder / "saved")


def same(folder: Path, texts: list[str]) -> None:
    mine = light(folder) if folder in THERE else saved(folder)
    other = theirs(folder) if folder in THERE else AutoTokenizer.from_pretrained(folder / "saved")
    assert mine.eos_token_id == other.eos_token_id
    for words in texts:
        for add in (True, False):
            ids = mine.encode(words, add_special_tokens=add)
            assert ids == other.encode(words, add_special_tokens=add), words
            for skip in (True, False):
                assert mine.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip), words


@pytest.mark.parametrize("folder", THERE, ids=lambda f: f.name)
def test_shipped_models_equal_transformers(folder: Path) -> None:
    same(folder, TEXTS)
    assert bool(light(folder).chat_template) == bool(theirs(folder).chat_template)
    for turns in MESSAGES if light(folder).chat_template else []:
        for cue in (True, False):
            args: dict[str, Any] = {"tokenize": False, "add_generation_prompt": cue}
            assert light(folder).apply_chat_template(chat(turns), **args) == theirs(folder).apply_chat_template(
                chat(turns), **args
            )


@pytest.mark.parametrize("folder", THERE, ids=lambda f: f.name)
@settings(deadline=None, max_examples=150)
@given(words=st.text() | st.text("<|im_starend>/ \n0123+=é"), ids=st.lists(st.integers(0, 60_000)))
def test_any_text_and_ids_equal_transformers(folder: Path, words: str, ids: list[int]) -> None:
    for add in (True, False):
        assert light(folder).encode(words, add_special_tokens=add) == theirs(folder).encode(
            words, add_special_tokens=add
        )
    args: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert light(folder).decode(ids, **args) == theirs(folder).decode(ids, **args)


@pytest.mark.parametrize("folder", THERE, ids=lambda f: f.name)
def test_text_is_the_same_with_both_tokenizers(folder: Path) -> None:
    mine, other = Text(light(folder), [7]), Text(theirs(folder), [7])
    assert mine.stop == other.stop
    for words in TEXTS:
        assert mine.prompt(words) == other.prompt(words)
        assert mine.observation(words) == other.observation(words)
        assert mine.decode(mine.prompt(words)) == other.decode(other.prompt(words))


def test_nothing_is_padded_or_truncated(small: Path) -> None:
    same(small, TEXTS)
    assert len(light(small).encode("qwertzuiop")) > 8
    assert light(small).encode("1")[0] == 0
    assert len(light(small).encode("1")) == 2


SPECIALS: dict[str, dict[str, Any]] = {
    "eos beyond the vocabulary": {"eos_token": "<|end|>", "pad_token": "<pad>"},
    "as objects": {"eos_token": {"__type": "AddedToken", "content": "<eos>", "lstrip": False, "normalized": False}},
    "none": {},
    "null": {"eos_token": None, "bos_token": "<bos>"},
    "additional": {"eos_token": "<eos>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    "extra, named": {"eos_token": "<eos>", "extra_special_tokens": {"image_token": "<|im_start|>"}},
    "a word of the vocabulary": {"eos_token": "a"},
    "split": {"eos_token": "<eos>", "split_special_tokens": True},
    "decoder": {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(i): {"content": c, "special": s, "lstrip": i == 300, "rstrip": False, "normalized": False}
            for i, c, s in [(0, "<bos>", True), (1, "<eos>", False), (301, "<|im_end|>", True), (300, "<think>", False)]
        },
    },
}


@pytest.mark.parametrize("name", list(SPECIALS))
def test_special_tokens_are_found_where_transformers_finds_them(small: Path, tmp_path: Path, name: str) -> None:
    same(variant(small, tmp_path, **SPECIALS[name]), TEXTS)


@pytest.mark.parametrize("decoder", [False, True])
def test_special_tokens_map_is_used_like_in_transformers(small: Path, tmp_path: Path, decoder: bool) -> None:
    config = SPECIALS["decoder"] if decoder else {"eos_token": "<pad>", "bos_token": "<bos>"}
    folder = variant(small, tmp_path, **config)
    tokens = {"eos_token": {"content": "<eos>", "lstrip": False, "normalized": False}, "bos_token": "<|im_start|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    same(folder, TEXTS)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_render_the_same(small: Path, tmp_path: Path, name: str) -> None:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "own_token": "<own>"}
    folder = variant(small, tmp_path, **config, chat_template=TEMPLATES[name])
    mine, other = saved(folder), AutoTokenizer.from_pretrained(folder)
    assert mine.chat_template == other.chat_template
    for turns in MESSAGES:
        for cue in (True, False):
            args: dict[str, Any] = {"tokenize": False, "add_generation_prompt": cue}
            assert mine.apply_chat_template(chat(turns), **args) == other.apply_chat_template(chat(turns), **args)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_choice_of_template(small: Path, tmp_path: Path, several: bool, beside: bool) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = variant(small, tmp_path, chat_template=templates if several else "D")
    if beside:
        (folder / "chat_template.jinja").write_text("Jé")
    args: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    mine = tokenizer.load(folder).apply_chat_template(chat(MESSAGES[0]), **args)
    assert mine == ("Jé" if beside else "D")
    assert mine == AutoTokenizer.from_pretrained(folder).apply_chat_template(chat(MESSAGES[0]), **args)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('users come first') }}", "users come first"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[3].role }}", "no element 3"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "append.*unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        (None, "no chat template"),
    ],
)
def test_failing_template_raises_a_readable_error(small: Path, tmp_path: Path, template: str | None, says: str) -> None:
    loaded = tokenizer.load(variant(small, tmp_path, chat_template=template))
    with pytest.raises(WindfallError, match=says) as e:
        Chat(loaded, frozenset()).prompt(chat(MESSAGES[0]))
    assert e.value.fix


BAD = {
    "tokenizer.json": ["", "{", "[]", '{"version": "1.0"}', "\x00"],
    "tokenizer_config.json": [
        "{", "[1]", '{"eos_token": 3}', '{"chat_template": 5}', '{"chat_template": "{% if %}"}',
        '{"chat_template": [{"name": "tool_use", "template": "x"}]}', '{"chat_template": [1]}',
        '{"chat_template": {"default": 1}}',
    ],
    "chat_template.jinja": ["{{ 'x' ", "{% generation %}", "{% nope %}"],
}  # fmt: skip


@pytest.mark.parametrize(("file", "content"), [(f, c) for f, cs in BAD.items() for c in cs])
def test_unreadable_file_is_rejected(small: Path, tmp_path: Path, file: str, content: str) -> None:
    folder = variant(small, tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(WindfallError) as e:
        tokenizer.load(folder)
    assert str(folder) in e.value.where
    assert e.value.fix


def test_file_that_is_not_utf8_is_rejected(small: Path, tmp_path: Path) -> None:
    for file in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        folder = variant(small, tmp_path / file)
        (folder / file).write_bytes(b"\xff\xfe{}")
        with pytest.raises(WindfallError, match=file):
            tokenizer.load(folder)


def test_folder_without_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match=r"no tokenizer\.json"):
        tokenizer.load(tmp_path)


def test_stop_ids(tmp_path: Path) -> None:
    assert tokenizer.stop_ids(tmp_path) == []
    for said, ids in [("2", [2]), ("[2, 7]", [2, 7]), ("null", []), ("[]", [])]:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {said}}}')
        assert tokenizer.stop_ids(tmp_path) == ids
    for said in ("true", '"2"', "[1, null]", "-1", "1.5"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {said}}}')
        with pytest.raises(WindfallError, match="eos_token_id"):
            tokenizer.stop_ids(tmp_path)
    assert tokenizer.stop_ids(TINY) == [2]


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from windfall.models import tokenizer\n"
        "from windfall.models.text import Text\n"
        f"Text(tokenizer.load(Path({str(THERE[-1])!r})), tokenizer.stop_ids(Path({str(TINY)!r}))).prompt('1')\n"
        "print(sorted({'jinja2', 'tokenizers', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['jinja2', 'tokenizers']"
