"""The [chat] section of a recipe: how messages become text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from windfall.errors import WindfallError
from windfall.recipe.section import Section


class ChatSection(Section):
    """How prompts and observations are rendered for the model. By default, its own chat template is used."""

    enabled: bool = True
    """Render prompts with the chat template. Off, or with a model that has none, prompts must be text and are used as
    they are."""
    template: str = ""
    """Chat template that replaces the model's own: the path of a Jinja file, or the template itself. The run keeps the
    contents of the file as they are at its start. Empty uses the model's own."""
    arguments: dict[str, Any] = Field(default={})
    """Variables for the template, such as `{ enable_thinking = false }`."""

    def source(self) -> str | None:
        """The text of the template. None: the model's own."""
        if not self.template:
            return None
        if "{" in self.template:
            return self.template
        path = Path(self.template)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            fix = "Give the path of a text file, or a template, which contains a '{'."
            raise WindfallError(f"cannot read the template: {e}", where=f"chat.template = {path}", fix=fix) from e
        if "{" not in text:
            raise WindfallError("this is not a chat template", where=f"chat.template = {path}", fix="It has no '{'.")
        return text

    def with_source(self) -> ChatSection:
        """The same section with the contents of its file instead of the path."""
        return self.model_copy(update={"template": self.source() or ""})

    def options(self) -> dict[str, Any]:
        """Keyword arguments for models.text.Text."""
        return {"template": self.source(), "enabled": self.enabled, "arguments": self.arguments}
