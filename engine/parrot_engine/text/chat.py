"""Chat templates: convert messages to prompt text like `apply_chat_template` of transformers 5.

Templates come with checkpoints and are not trusted: they run in `parrot_engine.text.sandbox` and
see only plain JSON values. Tokenizing happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Names of a message's reasoning; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(ValueError):
    """The template refuses the chat or fails, or the model has none."""


def _plain(value: Any) -> Any:
    """Copy a value using only JSON types, because templates get no other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the templates' form: no keys without a value, reasoning under its
    names.
    """
    plain: dict[str, Any] = _plain({k: v for k, v in message.items() if v is not None})
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


class ChatTemplate:
    """The templates of one model.

    `source` is one template, several by name (`default`, `tool_use`, …), or None. A model without a
    chat template still completes plain prompts, and every `render` raises.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source if source is None or isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})

    @property
    def is_available(self) -> bool:
        return bool(self._source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a chat; encode it without adding special tokens again.

        Args:
            messages: role and content, as in the OpenAI API; at least one.
            add_generation_prompt: true opens the assistant's turn at the end.
            continue_final_message: true leaves the last message open instead, to be continued.
            template: the name of one of the model's templates, or a template's text.
            tools: function schemas, as in the OpenAI API.
            documents: documents for templates with retrieval.
            kwargs: further variables of the template (`enable_thinking`, …).

        Raises:
            ChatTemplateError: the template is missing or invalid, or refuses this chat.
        """
        if not messages:
            raise ChatTemplateError("A chat needs at least one message.")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other."
            )
        from parrot_engine.text.sandbox import compile_template

        source = self._choose(template, with_tools=tools is not None)
        try:
            compiled = compile_template(source)
        except Exception as error:
            raise ChatTemplateError(f"The chat template is not valid: {error}") from error
        chat = [_message(message) for message in messages]
        final = self._open_final_message(chat) if continue_final_message else None
        variables = {**self._special_tokens, **_plain(kwargs)}
        variables.update(
            messages=chat,
            tools=_plain(list(tools)) if tools is not None else None,
            documents=_plain(list(documents)) if documents is not None else None,
            add_generation_prompt=add_generation_prompt,
        )
        try:
            text = compiled.render(variables)
        except Exception as error:
            # Any error comes from this template and chat.
            raise ChatTemplateError(f"The chat template refused this chat: {error}") from error
        return text if final is None else _cut_after_final(text, final)

    def _choose(self, template: str | None, *, with_tools: bool) -> str:
        source = self._source
        if isinstance(source, dict):
            if template is not None:
                return source.get(template, template)
            if with_tools and "tool_use" in source:
                return source["tool_use"]
            if "default" in source:
                return source["default"]
            names = ", ".join(sorted(source))
            raise ChatTemplateError(f"This model has no default chat template; it has: {names}.")
        if template is not None:
            return template
        if not source:
            raise ChatTemplateError(
                "This model has no chat template: use the completions API, or give a template."
            )
        return source

    @staticmethod
    def _open_final_message(chat: list[dict[str, Any]]) -> str:
        """Mark the end of the last message's text; return that text."""
        content = chat[-1].get("content")
        if isinstance(content, str):
            chat[-1]["content"] = content + _CONTINUE_TAG
            return content
        for part in reversed(content or ()):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _CONTINUE_TAG
                return text
        raise ChatTemplateError("The last message has no text that could be continued.")


def _cut_after_final(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    at = text.rfind(tag)
    if at == -1 or final.strip() not in text:
        raise ChatTemplateError("The chat template drops the last message; it cannot be continued.")
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    # The template trims messages, so trim the open one too.
    return text[:at].rstrip()
