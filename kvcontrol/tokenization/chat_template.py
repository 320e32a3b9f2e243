"""A model's chat template, used exactly as LMDeploy's ``HFChatTemplate`` does."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcontrol.core.errors import UNREADABLE


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer, which may have none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._assistant_end = self._find_assistant_end()
        self.exists = self._assistant_end is not None
        """Whether the tokenizer has a template that can be used."""
        self.renders_inline_system = self._find_inline_system()
        """Whether the template renders a system message where it stands, not at the front alone."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, inline_system: bool = False
    ) -> str:
        """Return the prompt text; raises whatever the template raises on messages that it refuses.

        A conversation that ends with the assistant is continued: no generation prompt, and the end marker is cut off.
        ``inline_system``: system messages among the others move to the front where the template leaves them out.
        """
        if inline_system and not self.renders_inline_system:
            messages = merged_system(messages)
        continued = bool(messages) and messages[-1].get("role") == "assistant"
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not continued, **kwargs
        )
        if continued and self._assistant_end:
            return text[: -len(self._assistant_end)]
        return text

    def _find_assistant_end(self) -> str | None:
        """What follows an assistant's text; found by rendering a marker. None when there is no usable template."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return None
        probe = [{"role": "user", "content": "placeholder"}, {"role": "assistant", "content": "sentinel"}]
        text: str = self._tokenizer.apply_chat_template(probe, tokenize=False)
        return text[text.find("sentinel") + len("sentinel") :]

    def _find_inline_system(self) -> bool:
        """Whether the template renders a system message where it stands; found by rendering a marker."""
        sentinel = "inline-system-sentinel"
        probe = [
            {"role": "system", "content": "system"},
            {"role": "user", "content": "user"},
            {"role": "system", "content": sentinel},
            {"role": "user", "content": "user"},
        ]
        try:
            return self.exists and sentinel in self.render(probe, {})
        except Exception:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
            return False


def merged_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the texts of all system messages in one, at the front."""
    system = [each for each in messages if each.get("role") == "system"]
    rest = [dict(each) for each in messages if each.get("role") != "system"]
    if not system:
        return rest
    return [{**system[0], "content": "".join(str(each["content"]) for each in system)}, *rest]


def parsed_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, which templates want, where they are JSON text of one."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = msgspec.json.decode(text)
            except UNREADABLE:
                return call
            if isinstance(arguments, dict):
                return {**call, "function": {**function, "arguments": arguments}}
    return call
