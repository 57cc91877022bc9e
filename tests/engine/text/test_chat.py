"""Chat templates against transformers' rendering of the same template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.engine.tokenizer_kinds import CHAT, byte_level, write_folder
from parrot_engine.text import ChatTemplate, ChatTemplateError, Tokenizer
from parrot_engine.text.loading import load_text_assets

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
          "bos_token": "<|begin|>"}  # fmt: skip

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>& 'you'</b>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello 日本", "name": None},
        {"role": "assistant", "content": None, "reasoning": "think",
         "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "part"}]},
    ],
]  # fmt: skip

TEMPLATES = {
    "plain": CHAT,
    "json": (
        "{% for m in messages %}{{ m | tojson }}\n"
        "    {% if loop.last %}{% break %}{% endif %}\n{% endfor %}"
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ extra or 'none' }}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% generation %}{{ m.role }}{{ m.reasoning_content }}{% endgeneration %}{% endfor %}"
        "{{ ns.n }}{{ dict(a=1) }}"
    ),
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("chat"), byte_level(bos=True), CONFIG)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_equals_transformers(folder: Path, name: str, chat: Any, tools: Any) -> None:
    from transformers import AutoTokenizer

    template = TEMPLATES[name]
    ours, theirs = Tokenizer(load_text_assets(folder)), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        chat, tools=tools, chat_template=template, add_generation_prompt=True, tokenize=False,
        extra="more",
    )  # fmt: skip
    assert ours.render_chat(chat, tools=tools, template=template, extra="more") == expected


def test_continue_final_message(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon "}]
    for template in (CHAT, CHAT.replace("message['content']", "message['content'] | trim")):
        ours = ChatTemplate(template, theirs.special_tokens_map)
        expected = theirs.apply_chat_template(
            chat, chat_template=template, continue_final_message=True, tokenize=False
        )
        rendered = ours.render(chat, add_generation_prompt=False, continue_final_message=True)
        assert rendered == expected
    with pytest.raises(ChatTemplateError, match="exclude"):
        ours.render(chat, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="no text"):
        ours.render(
            [{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True
        )


def test_templates_beside_the_checkpoint_go_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(bos=False), {**CONFIG, "chat_template": "config"})
    assert load_text_assets(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert load_text_assets(folder).chat_template == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer(load_text_assets(folder))
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(chat) == "file"
    assert tokenizer.render_chat(chat, tools=[]) == "tools"
    assert tokenizer.render_chat(chat, template="tool_use") == "tools"
    assert tokenizer.render_chat(chat, template="other {{ 1 }}") == "other 1"


def test_older_places_of_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}]
    folder = write_folder(tmp_path / "a", byte_level(bos=False), {**CONFIG, "chat_template": named})
    with pytest.raises(ChatTemplateError, match="rag"):
        Tokenizer(load_text_assets(folder)).render_chat([{"role": "user", "content": "x"}])
    folder = write_folder(tmp_path / "b", byte_level(bos=False), CONFIG)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert load_text_assets(folder).chat_template == "j"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "not valid"),
        ("{{ messages[0].missing.deeper }}", "refused"),
        ("{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}", "refused"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
    ],
)
def test_refusals_are_one_typed_error(template: str | None, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(template).render([{"role": "user", "content": "x"}])


def test_templates_see_no_attributes_of_strings_and_numbers() -> None:
    class Marked(str):
        secret = "hidden"

    class Count(int):
        secret = "hidden"

    template = ChatTemplate(
        "{{ messages[0].content }} {{ messages[0].content.secret }} {{ n.secret }}"
    )
    chat = [{"role": "user", "content": Marked("hello")}]
    assert template.render(chat, n=Count(3)).split() == ["hello"]


def test_a_chat_needs_a_message() -> None:
    with pytest.raises(ChatTemplateError, match="at least one"):
        ChatTemplate(CHAT).render([])


def test_templates_see_plain_values_only() -> None:
    class Tricky:
        def touch(self) -> str:
            return "touched"

    chat = [{"role": "user", "content": Tricky()}]
    assert ChatTemplate("{{ messages[0].content }}").render(chat) == "<Tricky>"
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].content.touch() }}").render(chat)


def test_rendering_leaves_the_messages_alone() -> None:
    chat = [{"role": "assistant", "content": "a", "reasoning": "b", "x": None}]
    before = json.dumps(chat)
    ChatTemplate(CHAT).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(chat) == before
