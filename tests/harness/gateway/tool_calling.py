"""Engines that write calls of tools, and what they were kept to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.protocol import Generate, Grammar
from parrot_engine.text import TextAssets, Tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from harness.gateway.scripted_remote import ScriptedRemoteEngine

BASE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
#: Templates that know tools, and tell how their models write calls.
TEMPLATES = {
    "hermes": "{{ tools | tojson if tools }}{# <tool_call> #}" + BASE,
    "llama": "{{ tools | tojson if tools }}{# <|python_tag|> #}" + BASE,
    "mistral": "{{ tools | tojson if tools }}{# [TOOL_CALLS] #}" + BASE,
}
TEXTS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
}


#: Of the arguments of `add`.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def says(text: str, template: str | None = None) -> pytest.MarkDecorator:
    """Give a test the fixture `telling`: a served engine that says `text`, and the engine."""
    return pytest.mark.parametrize("telling", [(text, template)], indirect=True)


def tool_engine(text: str, template: str | None = None) -> ScriptedRemoteEngine:
    """An engine that says `text`; its markers are special tokens, as Mistral's are."""
    engine = ScriptedRemoteEngine(max_context_tokens=4096, supports_grammars=True)
    backend = Backend.from_str(engine.tokenizer.assets.tokenizer_json)
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    assets = replace(engine.tokenizer.assets, tokenizer_json=backend.to_str())
    if template is not None:
        assets = replace(assets, chat_template=template)
    assert isinstance(assets, TextAssets)
    engine.tokenizer = Tokenizer(assets)
    engine.info = replace(engine.info, vocab_size=engine.tokenizer.vocab_size)
    ids = [*engine.tokenizer.encode(text, add_special_tokens=False), engine.im_end]
    engine.script = lambda prompt, sampling: ids
    return engine


def grammar_of(engine: ScriptedRemoteEngine) -> Grammar | None:
    sampling = [item for item in engine.submitted if isinstance(item, Generate)][-1].sampling
    return sampling.grammar


def allows(engine: ScriptedRemoteEngine, text: str) -> bool:
    """Tell whether the whole text conforms to the grammar that the engine was given."""
    grammar = grammar_of(engine)
    assert grammar is not None
    compiler = GrammarCompiler(
        engine.tokenizer.assets.tokenizer_json,
        vocab_size=engine.info.vocab_size,
        eos_token_ids=engine.info.eos_token_ids,
    )
    matcher = compiler.compile(grammar).result(20)._template.deep_copy()
    compiler.close()
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )
