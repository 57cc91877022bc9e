"""Transforms: declared, safe functions on text, such as `code_block(json) | json(/name) | strip`.

Parsed when a request comes in, applied when a variable gets its text. No code of the caller runs;
patterns are matched by RE2, in time linear in the text. A transform is a value without state and
may be applied in any thread. Documented for users in docs/transforms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parrot_engine.text.tokenizer import Tokenizer

from parrot_gateway.exceptions import TransformError, TransformSyntaxError
from parrot_gateway.semantic.templates.json_text import well_formed
from parrot_gateway.semantic.transforms.functions import (
    FUNCTIONS,
    Limits,
    Operation,
    StepError,
    Value,
)
from parrot_gateway.semantic.transforms.grammar import parse_pipeline

#: Maximum characters of any step's result, unless the caller sets another.
MAX_RESULT_CHARACTERS = 4 * 1024 * 1024
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Transform:
    """A parsed transform; made with `parse_transform`."""

    #: The pipeline as written.
    text: str
    #: Steps as written, and their operations.
    steps: tuple[tuple[str, Operation], ...]
    #: True if `apply` needs `cut_tokens`.
    needs_tokens: bool

    def apply(
        self,
        value: str,
        *,
        max_characters: int = MAX_RESULT_CHARACTERS,
        cut_tokens: Callable[[str, int], str] | None = None,
    ) -> str:
        """Return the transformed `value`; well-formed, linear in the text for each step.

        Args:
            max_characters: limit of any step's result.
            cut_tokens: returns the longest beginning of a text within a number of tokens.

        Raises:
            TransformError: a step does not fit its text, or a result is too long.
        """
        limits = Limits(max_characters, cut_tokens)
        current: Value = well_formed(value)
        try:
            for step, operation in self.steps:
                source = step
                current = operation(current, limits)
                if isinstance(current, str):
                    limits.check(len(current))
            source = self.text
            if not isinstance(current, str):
                limits.check(sum(map(len, current)) + max(0, len(current) - 1))
                current = "\n".join(current)
        except StepError as error:
            shown = source if len(source) <= _MAX_SHOWN else source[: _MAX_SHOWN - 1] + "…"
            raise TransformError(shown, str(error)) from None
        return current


def parse_transform(text: str) -> Transform:
    """Parse a pipeline of functions and check all arguments.

    Raises:
        TransformSyntaxError: it breaks the grammar, or names an unknown function or argument; says
            where, and what was expected.
    """
    steps: list[tuple[str, Operation]] = []
    needs_tokens = False
    for call in parse_pipeline(text):
        function = FUNCTIONS.get(call.name)
        if function is None:
            raise TransformSyntaxError(
                text, call.position, f"one of the functions {', '.join(FUNCTIONS)}"
            )
        steps.append((call.source, function.bind(call, text)))
        needs_tokens |= any(argument.keyword == "tokens" for argument in call.arguments)
    return Transform(text, tuple(steps), needs_tokens)


def token_cutter(tokenizer: Tokenizer) -> Callable[[str, int], str]:
    """Make a function that returns the beginning of a text within a number of tokens.

    It is the longest one, unless the text's tokens do not spell it exactly.
    """

    def cut(text: str, limit: int) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text
        # A token may end within a character, which the previous tokens must then leave out.
        for end in range(limit, max(-1, limit - 4), -1):
            beginning = tokenizer.decode(ids[:end], skip_special_tokens=False)
            if text.startswith(beginning):
                return beginning
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if len(tokenizer.encode(text[:middle], add_special_tokens=False)) <= limit:
                low = middle
            else:
                high = middle - 1
        return text[:low]

    return cut
