"""A tokenizer loaded from a folder in Hugging Face format without torch or transformers: only tokenizers and jinja2.

It has exactly the methods that `text.Text` uses, with transformers' names and defaults, so the two are interchangeable.
It is made for folders that transformers has written, as the trainer does for the controller. Its rules:

    ids       tokenizer.json determines them, including its post-processor; nothing is padded or truncated
    specials  the named special tokens of tokenizer_config.json are variables of the template
    template  chat_template.jinja, otherwise the one in tokenizer_config.json, `default` if there are several; it runs
              in a sandbox in which it cannot change anything

Not supported: sentencepiece or tiktoken files, Python code in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from windfall.errors import WindfallError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with a message's reasoning. Templates read one of the first two."""


class Tokenizer:
    def __init__(self, backend: Backend, specials: Mapping[str, str], chat_template: str | None, where: str) -> None:
        self._backend = backend
        self._specials = dict(specials)
        self._where = where
        eos = specials.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)
        self.chat_template = chat_template
        self._compiled: dict[str, Template] = {}
        if chat_template is not None:
            self._compile(chat_template)

    def _compile(self, template: str) -> Template:
        if template not in self._compiled:
            self._compiled[template] = _compile(template, self._where)
        return self._compiled[template]

    def reads(self, chat_template: str | None = None) -> set[str]:
        """The variables that the chat template, or this one instead of it, gets from outside."""
        template = chat_template or self.chat_template or ""
        self._compile(template)  # the error says what is wrong with it
        return meta.find_undeclared_variables(_environment().parse(template))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Literal[False] = False,
    ) -> str:
        assert not clean_up_tokenization_spaces, "not supported, because it changes the text"
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """The id of every token. A token has at least as many characters here as in a text."""
        return self._backend.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: Literal[False] = False,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str:
        """The conversation as one string, for `encode(..., add_special_tokens=False)`. `chat_template` replaces the
        model's own; `arguments` are variables of the template, such as `enable_thinking`. Raises what the template
        raises."""
        assert not tokenize, "not supported: render first, then encode"
        if (template := chat_template or self.chat_template) is None:
            raise WindfallError("this tokenizer has no chat template", where=self._where, fix="Encode plain text.")
        given = {"tools": tools, "documents": None, **self._specials, **arguments}
        given["messages"] = [_with_reasoning(message) for message in messages]
        return self._compile(template).render(given, add_generation_prompt=add_generation_prompt)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises WindfallError with the file's name if it cannot be loaded."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        fix = "Create one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        raise WindfallError("no tokenizer.json in this folder", where=str(folder), fix=fix)
    try:
        backend = Backend.from_file(str(file))
    except Exception as e:  # the package raises no more specific error for a file that it cannot read
        raise WindfallError(f"cannot read the tokenizer: {e}", where=str(file), fix="Download the file again.") from e
    backend.no_padding()
    backend.no_truncation()
    config = _json(folder / "tokenizer_config.json")
    where = str(folder / "tokenizer_config.json")
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return Tokenizer(backend, _special_tokens(config, where), _chat_template(folder, config), str(folder))


def stop_ids(folder: Path) -> list[int]:
    """The ids of the stop tokens in generation_config.json; empty if it has none."""
    file = folder / "generation_config.json"
    stops = _json(file).get("eos_token_id")
    ids = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise WindfallError(f"eos_token_id is {stops!r}", where=str(file), fix="Set it to an id or a list of ids.")
    return ids


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise WindfallError(f"cannot read the file: {e}", where=str(file), fix="Download the file again.") from e


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
    except ValueError as e:
        raise WindfallError(f"the file is not JSON: {e}", where=str(file), fix="Download the file again.") from e
    if not isinstance(content, dict):
        raise WindfallError("the file does not contain a JSON object", where=str(file), fix="Download the file again.")
    return content


def _special_tokens(config: Mapping[str, Any], where: str) -> dict[str, str]:
    """The special tokens that templates can use. A model may have its own names. In the file, a token is a string, or
    an object with the text as `content`."""
    extra = config.get("extra_special_tokens")
    named = {k: v for k, v in config.items() if k in NAMED or (k.endswith("_token") and isinstance(v, str))}
    out: dict[str, str] = {}
    for name, token in (named | (extra if isinstance(extra, dict) else {})).items():
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and not isinstance(text, str):
            raise WindfallError(f"{name} is {token!r}", where=where, fix="Set it to a string.")
        if text is not None:
            out[name] = text
    return out


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file, where = folder / "chat_template.jinja", str(folder / "tokenizer_config.json")
    fix = f"Write the template to use into {file.name}."
    if file.is_file():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    if isinstance(template, dict):
        if "default" not in template:
            raise WindfallError(f"chat templates {list(template)}, but no default", where=where, fix=fix)
        template = template["default"]
    if template is not None and not isinstance(template, str):
        raise WindfallError(f"the chat template is a {type(template).__name__}, not text", where=where, fix=fix)
    return template


class _Generation(Extension):
    """`{% generation %}` marks the policy's text. Here it is an ordinary scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own annotation

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """With transformers' settings, which templates expect."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )


def _compile(template: str, where: str) -> Template:
    """Compile with transformers' names, which templates expect."""
    env = _environment()
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return env.from_string(template)
    except TemplateSyntaxError as e:
        what = f"the chat template is not valid: line {e.lineno}: {e.message}"
        raise WindfallError(what, where=where, fix="Write a valid template into chat_template.jinja.") from e


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's filter, but without escapes for HTML, because a prompt is not a web page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
