"""Engines of models that reason before they answer."""

from __future__ import annotations

from dataclasses import replace

from parrot_engine.text import Tokenizer

from harness.gateway.scripted_remote import ScriptedRemoteEngine

#: Shows earlier reasoning, and whether it is switched on or off.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefill or '' }}{% endif %}"
    "{{ 'ON' if enable_thinking is true }}{# <think></think> #}"
)


def thinker(text: str, template: str = TEMPLATE) -> ScriptedRemoteEngine:
    """An engine that says `text`, of a model with this chat template."""
    engine = ScriptedRemoteEngine(max_context_tokens=4096, supports_grammars=True)
    engine.tokenizer = Tokenizer(replace(engine.tokenizer.assets, chat_template=template))
    ids = [*engine.tokenizer.encode(text, add_special_tokens=False), engine.im_end]
    engine.script = lambda prompt, sampling: ids
    return engine
