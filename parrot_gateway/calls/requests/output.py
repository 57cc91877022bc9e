"""Constraints on the output of a call: a grammar, and tools that may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from parrot_engine.protocol import Grammar

from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.grammars import check_supported
from parrot_gateway.calls.tools.definitions import Tool, ToolUse, tool_format
from parrot_gateway.calls.tools.grammar import calls_grammar, optional_calls_grammar
from parrot_gateway.calls.tools.parsing import WRITINGS, ToolParsing
from parrot_gateway.exceptions import UnsupportedError


class OutputOptions(NamedTuple):
    """Constraints on the output."""

    grammar: Grammar | None = None
    #: The field that sets it.
    grammar_param: str | None = None
    tools: ToolUse | None = None
    #: Those that the prompt lists.
    shown_tools: Sequence[Tool] = ()
    #: How calls are read out of the text; None where none may be made.
    parsing: ToolParsing | None = None
    #: Calls are announced by a token that texts are usually shown without.
    needs_special_tokens: bool = False


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
    parsing = ToolParsing(
        format,
        frozenset(tool.name for tool in callable_),
        calls_only=tools.mode == "required",
        parallel=tools.parallel,
    )
    opening = tokenizer.token_id(WRITINGS[format].opening)
    is_special = opening is not None and tokenizer.is_special(opening)
    return OutputOptions(grammar, "tools", tools, tools.tools, parsing, is_special)
