"""Text and tokens without torch: tokenizer, incremental detokenizer, stop strings, chat templates.

Importing it loads only the standard library; `tokenizers` and `jinja2` follow on first use.
`parrot_engine.text.loading` reads model folders and imports `tokenizers`.
"""

from __future__ import annotations

from parrot_engine.text.chat import ChatTemplate, ChatTemplateError
from parrot_engine.text.detokenizer import IncrementalDetokenizer
from parrot_engine.text.output import OutputDelta, OutputText
from parrot_engine.text.stop import StopResult, StopStrings
from parrot_engine.text.tokenizer import TextAssets, TextAssetsError, Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "OutputDelta",
    "OutputText",
    "StopResult",
    "StopStrings",
    "TextAssets",
    "TextAssetsError",
    "Tokenizer",
]
