"""Constraints on the output of a call: a grammar, and tools that may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.protocol import Grammar
from parrot_engine.text import Tokenizer

from parrot_gateway.exceptions import UnsupportedError
from parrot_gateway.generation.placement import ServedModel
from parrot_gateway.generation.requests.grammars import check_supported
from parrot_gateway.generation.tools.definitions import Tool, ToolUse, tool_format
from parrot_gateway.generation.tools.grammar import calls_grammar, optional_calls_grammar
from parrot_gateway.generation.tools.parsing import WRITINGS, ToolFormat, ToolParsing


class OutputOptions(NamedTuple):
    """Constraints on the output."""

    grammar: Grammar | None = None
    #: The field that sets it.
    grammar_param: str | None = None
    tools: ToolUse | None = None
    #: How the model writes calls.
    format: ToolFormat = "hermes"

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """Those that the prompt lists."""
        return () if self.tools is None else self.tools.tools

    @property
    def parsing(self) -> ToolParsing | None:
        """How calls are read out of the text; None where none may be made."""
        if self.tools is None:
            return None
        names = frozenset(tool.name for tool in self.tools.callable)
        return ToolParsing(
            self.format,
            names,
            calls_only=self.tools.mode == "required",
            parallel=self.tools.parallel,
        )

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether calls are announced by a token that texts are usually shown without."""
        if self.tools is None:
            return False
        token_id = tokenizer.token_id(WRITINGS[self.format].opening)
        return token_id is not None and tokenizer.is_special(token_id)


def output_options(
    grammar: Grammar | None, param: str | None, tools: ToolUse | None, served: ServedModel
) -> OutputOptions:
    """Combine the grammar that a call asks for with its tools.

    Args:
        param: the field that sets the grammar.

    Raises:
        UnsupportedError: they do not go together, or the model's engine follows no grammar where
            one is needed.
    """
    if tools is None:
        return OutputOptions(grammar, param)
    tokenizer = served.tokenizer
    format = tool_format(tokenizer)
    callable_ = tools.callable
    if tools.mode == "required":
        check_supported(served.info, "tool_choice")
        grammar = calls_grammar(callable_, format, tokenizer, parallel=tools.parallel)
    elif grammar is not None:
        if grammar.kind not in ("json_schema", "json_object"):
            raise UnsupportedError(
                f"Unsupported value: '{param}' goes with 'tools' only for JSON.", param=param
            )
        grammar = calls_grammar(
            callable_, format, tokenizer, parallel=tools.parallel, content=grammar
        )
    elif any(tool.strict for tool in callable_) and served.info.supports_grammars:
        # NOTE: where the engine follows no grammar, `strict` is a wish, as it is for an upstream.
        grammar = optional_calls_grammar(callable_, format, tokenizer)
    return OutputOptions(grammar, "tools", tools, format)
