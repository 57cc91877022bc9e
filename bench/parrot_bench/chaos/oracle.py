"""Judges answers: what was lost, changed, or not allowed. Pure.

An answer is compared with that of the same call before any fault. Where calls run in other batches,
sums of floats may end in other digits, which now and then decides a draw: phases without faults
show how often.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jsonschema
import msgspec

from parrot_bench.chaos.answers import Answer, Choice
from parrot_bench.chaos.mix import ARGUMENTS, SCHEMA, TOOL

#: Special tokens of the demo model.
_SPECIAL = re.compile(r"<\|[a-z]+\|>")


@dataclass(slots=True)
class Verdict:
    """Counts over the answers of a phase, and examples."""

    calls: int = 0
    failed: int = 0
    hung: int = 0
    #: Rules of the protocol that were broken: two roles, a delta after the end.
    protocol: int = 0
    #: Answers that were compared, and those of them that differ.
    compared: int = 0
    different: int = 0
    violations: int = 0
    usage: int = 0
    tokens: int = 0
    #: By reason and kind of call.
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Everything that no fault may cause; differences are judged beside a phase without."""
        return self.failed + self.protocol + self.violations + self.usage


class Oracle:
    """Knows the answers without a fault, and judges others.

    Args:
        references: answers of a phase without faults; those that failed are no use.
    """

    def __init__(self, references: Iterable[Answer]) -> None:
        self._references = {
            answer.request.number: answer for answer in references if not answer.failure
        }

    def judge(self, answers: Iterable[Answer]) -> Verdict:
        verdict = Verdict()
        for answer in answers:
            self._judge(answer, verdict)
        return verdict

    def _judge(self, answer: Answer, verdict: Verdict) -> None:
        kind = answer.request.kind
        verdict.calls += 1
        if answer.failure:
            verdict.failed += 1
            verdict.hung += answer.hung
            verdict.reasons[f"{kind}: {answer.failure}"] += 1
            return
        assert answer.usage is not None
        verdict.tokens += answer.usage[1]
        if answer.faults:
            verdict.protocol += 1
            verdict.reasons[f"{kind}: {answer.faults[0]}"] += 1
        broken = next(filter(None, (violation(kind, each) for each in answer.choices)), "")
        if broken:
            verdict.violations += 1
            verdict.reasons[f"{kind}: {broken}"] += 1
        reference = self._references.get(answer.request.number)
        wrong = usage_error(answer, reference)
        if wrong:
            verdict.usage += 1
            verdict.reasons[f"{kind}: {wrong}"] += 1
        if answer.request.is_repeatable and reference is not None:
            verdict.compared += 1
            found = difference(reference.choices, answer.choices)
            if found:
                verdict.different += 1
                verdict.reasons[f"{kind}: {found}"] += 1


def violation(kind: str, choice: Choice) -> str:
    """Name the rule of its grammar that a candidate breaks; empty if none."""
    if kind == "schema":
        text, schema = choice.content, SCHEMA
    elif kind == "tools":
        if choice.tool != TOOL or choice.content:
            return "no tool call"
        if choice.finish_reason == "length":
            # Cut where the tokens of the call ended.
            return ""
        text, schema = choice.arguments, ARGUMENTS
    else:
        return ""
    try:
        jsonschema.validate(msgspec.json.decode(text), schema)
    except msgspec.MsgspecError:
        return "not JSON"
    except jsonschema.ValidationError as error:
        return f"not of the schema ({error.validator})"
    return ""


def usage_error(answer: Answer, reference: Answer | None) -> str:
    """Tell how the usage disagrees with the tokens delivered; empty if it does not.

    Tokens delivered are counted where each comes with a log-probability; equal texts must have
    equal usage elsewhere.
    """
    assert answer.usage is not None
    limit = answer.request.body["max_tokens"] * answer.request.choices
    if not 0 < answer.usage[1] <= limit:
        return f"{answer.usage[1]} tokens of at most {limit}"
    if answer.request.kind == "logprobs":
        delivered = sum(len(choice.tokens) for choice in answer.choices)
        if delivered != answer.usage[1]:
            return "usage is not the tokens delivered"
        choice = answer.choices[0]
        # With `ignore_eos` a text goes on behind its end, whose token is no part of it.
        text = "".join(token for token in choice.tokens if not _SPECIAL.fullmatch(token))
        # Half a character is a token, too, and has no text of its own.
        if "\ufffd" not in text and text != choice.content:
            return "tokens are not the text"
    if reference is not None and answer.usage != reference.usage:
        if answer.usage[0] != reference.usage[0]:  # type: ignore[index]
            return "usage of another prompt"
        if not difference(reference.choices, answer.choices):
            return "other usage for the same text"
    return ""


def difference(expected: Sequence[Choice], found: Sequence[Choice]) -> str:
    """Tell how texts differ; empty if they do not."""
    for one, other in zip(expected, found, strict=True):
        for before, after in ((one.content, other.content), (one.arguments, other.arguments)):
            if before == after:
                continue
            if before.startswith(after):
                return "bytes missing at the end"
            if after.startswith(before):
                return "bytes too many at the end"
            return "other bytes"
        if one.tool != other.tool:
            return "another tool"
        if one.finish_reason != other.finish_reason:
            return "another finish reason"
        if one.tokens != other.tokens:
            return "other tokens"
    return ""
