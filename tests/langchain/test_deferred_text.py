"""A deferred text by itself: what looks at it, what carries it, what it raises."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from deferring import Book
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_parrot import exceptions as errors
from langchain_parrot.deferred import DeferredText, anything_pending

VALUE = "Ada, 36 Engines"
REFERENCE = "[[t]]"


def _deferred(value: str | Exception = VALUE) -> tuple[DeferredText, Book]:
    book = Book(t=value)
    return book.text("t"), book


LOOKS: list[tuple[Callable[[Any], Any], Any]] = [
    (str, VALUE),
    (len, len(VALUE)),
    (bool, True),
    (hash, hash(VALUE)),
    (list, list(VALUE)),
    (sorted, sorted(VALUE)),
    (reversed, None),
    (lambda t: t == VALUE, True),
    (lambda t: VALUE == t, True),  # noqa: SIM300
    (lambda t: t != VALUE, False),
    (lambda t: VALUE != t, False),  # noqa: SIM300
    (lambda t: t < "B", True),
    (lambda t: "B" > t, True),  # noqa: SIM300
    (lambda t: t <= VALUE, True),
    (lambda t: t >= VALUE, True),
    (lambda t: t > VALUE, False),
    (lambda t: "36" in t, True),
    (lambda t: t[0], "A"),
    (lambda t: t[:3], "Ada"),
    (lambda t: t[-1], "s"),
    (lambda t: t * 2, VALUE * 2),
    (lambda t: 2 * t, VALUE * 2),
    (lambda t: t.upper(), VALUE.upper()),
    (lambda t: t.split(", "), VALUE.split(", ")),
    (lambda t: t.startswith("Ada"), True),
    (lambda t: t.replace("Ada", "Al"), "Al, 36 Engines"),
    (lambda t: t.encode(), VALUE.encode()),
    (lambda t: t.strip(), VALUE),
    (lambda t: t.join(["a", "b"]), f"a{VALUE}b"),
    (lambda t: {VALUE: 1}[t], 1),
    (lambda t: {t: 1}[VALUE], 1),
    (lambda t: t in {VALUE}, True),
    (lambda t: t in [VALUE], True),
    (lambda t: "%s and %s" % (t, 1), f"{VALUE} and 1"),  # noqa: UP031
    (lambda t: f"{t!s}", VALUE),
    (lambda t: f"{t:>20}", f"{VALUE:>20}"),
    (lambda t: f"{t:.3}", "Ada"),
    (lambda t: pickle.loads(pickle.dumps(t)), VALUE),
]


@pytest.mark.parametrize("number", range(len(LOOKS)))
def test_a_look_resolves_once_and_acts_on_the_value(number: int) -> None:
    look, expected = LOOKS[number]
    text, book = _deferred()
    assert not text.is_resolved
    found = look(text)
    if expected is not None:
        assert found == expected
        assert type(found) is type(expected)
    assert book.asked == [REFERENCE]
    assert text.is_resolved
    assert str(text) == VALUE
    assert book.asked == [REFERENCE]


def test_every_public_method_of_strings_looks() -> None:
    for name in dir(str):
        if name.startswith("_") or name == "maketrans":
            continue
        assert name in DeferredText.__dict__, name


CARRIES: list[tuple[Callable[[Any], str], str]] = [
    (lambda t: f"Hi {t}!", f"Hi {REFERENCE}!"),
    (lambda t: "Hi {}!".format(t), f"Hi {REFERENCE}!"),  # noqa: UP032
    (lambda t: "Hi %s!" % t, f"Hi {REFERENCE}!"),  # noqa: UP031
    (lambda t: format(t), REFERENCE),
    (lambda t: "Hi " + t, f"Hi {REFERENCE}"),
    (lambda t: t + "!", f"{REFERENCE}!"),
    (lambda t: t + t, REFERENCE * 2),
    (lambda t: " ".join(["Hi", t]), f"Hi {REFERENCE}"),
    (lambda t: "".join([t]), REFERENCE),
    (lambda t: t.reference, REFERENCE),
    (lambda t: str(HumanMessage(content=t).content), REFERENCE),
    (lambda t: str(AIMessage(content=t).content), REFERENCE),
    (lambda t: str(ToolMessage(content=t, tool_call_id="1").content), REFERENCE),
    (lambda t: str(HumanMessage(content=[{"type": "text", "text": t}]).model_dump_json()), ""),
    (lambda t: json.dumps({"a": t}), f'{{"a": "{REFERENCE}"}}'),
]


@pytest.mark.parametrize("number", range(len(CARRIES)))
def test_formatting_carries_the_reference_and_waits_for_nothing(number: int) -> None:
    carry, expected = CARRIES[number]
    text, book = _deferred()
    carried = carry(text)
    assert REFERENCE in carried
    if expected:
        assert carried == expected
    assert type(carried) is str
    assert book.asked == []


def test_formatting_carries_the_reference_also_when_the_value_is_here() -> None:
    # The gateway then knows that the new prompt was made of this text.
    text, _ = _deferred()
    assert len(text) == len(VALUE)
    assert f"{text}" == "" + text == "".join([text]) == REFERENCE


def test_what_reads_characters_in_c_sees_the_reference() -> None:
    # docs/langchain.md says so, and what to do instead.
    text, book = _deferred("{}")
    assert re.findall(r"\w+|[{}]", text) == ["t"]
    assert re.findall(r"\w+|[{}]", str(text)) == ["{", "}"]
    text, book = _deferred("{}")
    assert re.search("parrot|t", text)
    assert io.StringIO(text).read() == REFERENCE
    assert text in "[[t]] stands here"
    assert book.asked == []
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert json.loads(str(text)) == {}


def test_numbers_are_read_from_the_value() -> None:
    text, _ = _deferred(" 42 ")
    assert int(text) == 42
    assert float(text) == 42.0
    assert json.loads(text.strip()) == 42


def test_repr_and_copies_wait_for_nothing() -> None:
    text, book = _deferred()
    assert repr(text) == f"<deferred {REFERENCE}>"
    assert copy.copy(text) is text
    assert copy.deepcopy({"a": [text]})["a"][0] is text
    assert book.asked == []
    text.get()
    assert repr(text) == repr(VALUE)


def test_printing_and_logging_show_the_value(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text, _ = _deferred()
    print(text)
    assert capsys.readouterr().out == VALUE + "\n"
    with caplog.at_level(logging.INFO):
        logging.getLogger("t").info("it is %s", text)
    assert caplog.messages == [f"it is {VALUE}"]


def test_arguments_of_methods_are_resolved_too() -> None:
    book = Book(a="Ada", b="A")
    assert book.text("a").startswith(book.text("b"))
    assert book.text("a").startswith(("x", book.text("b")))
    assert book.text("a").replace("da", book.text("b")) == "AA"
    assert book.text("a") != book.text("b")
    assert book.text("a") == Book(a="Ada").text("a")
    assert book.text("b") < book.text("a")
    assert book.text("b") in book.text("a")


async def test_aget_does_not_block_and_resolves_for_all() -> None:
    text, book = _deferred()
    assert await text.aget() == VALUE
    assert len(text) == len(VALUE)
    assert await text.aget(timeout=1) == VALUE
    assert book.asked == [REFERENCE]


def test_a_failure_is_final_and_a_timeout_is_not() -> None:
    failed = errors.DeferredFailedError("no", reference=REFERENCE)
    text, book = _deferred(failed)
    for _ in range(2):
        with pytest.raises(errors.DeferredFailedError):
            len(text)
    assert book.asked == [REFERENCE]
    late = errors.DeferredTimeoutError("late", reference=REFERENCE)
    text, book = _deferred(late)
    with pytest.raises(TimeoutError):
        str(text)
    book.values["t"] = VALUE
    assert str(text) == VALUE


@pytest.mark.parametrize("how", ["get", "aget"])
@pytest.mark.parametrize(
    ("outcome", "is_pending"),
    [
        (str, False),
        (errors.DeferredFailedError, False),
        (errors.DeferredCancelledError, False),
        (errors.DeferredExpiredError, False),
        (errors.DeferredTimeoutError, True),
        (errors.DeferredUnreachableError, True),
        (RuntimeError, True),
    ],
)
async def test_a_text_is_pending_until_its_value_or_final_failure_is_known(
    how: str, outcome: Callable[[str], Any], is_pending: bool
) -> None:
    """While one is pending LangChain calls a handler for every run of the program."""
    gc.collect()
    assert not anything_pending()
    text, book = _deferred(outcome("no"))
    assert anything_pending()
    with suppress(errors.DeferredError, RuntimeError):
        await text.aget() if how == "aget" else text.get()
    assert anything_pending() is is_pending
    del text, book
    gc.collect()
    assert not anything_pending()


@pytest.mark.parametrize("look", [bool, hash, repr, lambda t: t == "x", lambda t: f"{t:>3}"])
def test_a_look_at_a_failed_text_raises(look: Callable[[Any], Any]) -> None:
    text, _ = _deferred(errors.DeferredFailedError("no", reference=REFERENCE))
    if look is repr:
        assert look(text) == f"<deferred {REFERENCE}>"
    else:
        with pytest.raises(errors.DeferredFailedError):
            look(text)
