"""A deferred text by itself: what reads it, what refuses it, what it raises."""

from __future__ import annotations

import base64
import contextlib
import copy
import csv
import hashlib
import io
import json
import logging
import os
import pathlib
import pickle
import re
import sqlite3
import string
import subprocess
import sys
import tempfile
import textwrap
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from harness.deferring import Book
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_parrot import exceptions as errors
from langchain_parrot.deferred import DeferredText
from pydantic import BaseModel

VALUE = "Ada, 36 Engines"
REFERENCE = "[[t]]"


def _deferred(value: str | Exception = VALUE) -> tuple[DeferredText, Book]:
    book = Book(t=value)
    return book.text("t"), book


def matched(text: Any) -> Any:
    """The text, if a pattern takes it for one."""
    match text:
        case str() as found:
            return found[:]
        case _:
            return None


LOOKS: list[tuple[Callable[[Any], Any], Any]] = [
    (str, VALUE),
    (len, len(VALUE)),
    (bool, True),
    (hash, hash(VALUE)),
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
    (lambda t: f"Hi {t}!", f"Hi {VALUE}!"),
    (lambda t: "Hi {}!".format(t), f"Hi {VALUE}!"),  # noqa: UP032
    (lambda t: "Hi %s!" % t, f"Hi {VALUE}!"),  # noqa: UP031
    (lambda t: "Hi " + t, f"Hi {VALUE}"),
    (lambda t: t + "!", f"{VALUE}!"),
    (lambda t: t + t, VALUE * 2),
    (lambda t: AIMessage(content=VALUE).text == t, True),
    (lambda t: t == AIMessage(content=VALUE).text, True),
    (lambda t: [t] == [VALUE] and {"a": t} == {"a": VALUE}, True),
    (lambda t: os.path.join("a", t), f"a/{VALUE}"),
    (lambda t: pathlib.Path(t).name, VALUE),
    (lambda t: _in_sqlite(t), VALUE),
    (lambda t: subprocess.run([sys.executable, "-c", _ECHO, t], capture_output=True).stdout, None),
    (lambda t: string.Template("Hi $t").substitute(t=t), f"Hi {VALUE}"),
    (lambda t: csv_line([t]), f'"{VALUE}"\r\n'),
    (lambda t: f"{t:>20}", f"{VALUE:>20}"),
    (lambda t: f"{t:.3}", "Ada"),
    (lambda t: pickle.loads(pickle.dumps(t)), VALUE),
    (lambda t: re.sub("a", t, "banana"), re.sub("a", VALUE, "banana")),
    (lambda t: urllib.parse.quote(t), urllib.parse.quote(VALUE)),
    (lambda t: isinstance(t, str) and t.upper(), VALUE.upper()),
    (matched, VALUE),
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


REFUSES: list[Callable[[Any], Any]] = [
    list,
    sorted,
    lambda t: [*t],
    lambda t: "".join([t]),
    lambda t: re.findall(r"\w+", t),
    lambda t: json.dumps({"a": t}),
    lambda t: json.loads(t),
    lambda t: io.StringIO(t),
    lambda t: io.StringIO().write(t),
    lambda t: bytes(t, "utf-8"),
    lambda t: t in "plain",
    lambda t: list(map(str.strip, [t])),
    lambda t: str.lower(t),
    lambda t: str.maketrans("a", t),
    lambda t: "abc".replace("a", t),
    lambda t: "abc".startswith(t),
    lambda t: HumanMessage(content=t),
    lambda t: AIMessage(content=t),
    lambda t: HumanMessage(content=[t]),
    lambda t: Named(name=t),
    lambda t: double.invoke({"text": t}),
    lambda t: textwrap.dedent(t),
    lambda t: base64.b64encode(t),
    lambda t: hashlib.sha256(t),
    lambda t: open_and_write(t),
]


@pytest.mark.parametrize("number", range(len(REFUSES)))
def test_what_insists_on_a_string_refuses_it(number: int) -> None:
    text, _ = _deferred()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        REFUSES[number](text)
    assert REFERENCE not in repr(text)
    # With `str` around it, it is a text like any other.
    assert str(text) == VALUE


class Named(BaseModel):
    name: str


@tool
def double(text: str) -> str:
    """The text twice."""
    return text * 2


_ECHO = "import sys; print(sys.argv[1])"


def _in_sqlite(text: Any) -> Any:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        return database.execute("select ?", (text,)).fetchone()[0]


def csv_line(row: list[Any]) -> str:
    """The row as a line of CSV."""
    file = io.StringIO()
    csv.writer(file).writerow(row)
    return file.getvalue()


def open_and_write(text: Any) -> None:
    """Write it to a file."""
    with tempfile.TemporaryFile("w") as file:
        file.write(text)


def test_numbers_are_read_from_the_value() -> None:
    text, _ = _deferred(" 42 ")
    assert int(text) == 42
    assert float(text) == 42.0
    assert json.loads(text.strip()) == 42


def test_repr_and_copies_wait_for_nothing() -> None:
    text, book = _deferred()
    assert repr(text) == "<DeferredText, not read yet>"
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
    ("outcome", "is_final"),
    [
        (errors.DeferredFailedError, True),
        (errors.DeferredCancelledError, True),
        (errors.DeferredExpiredError, True),
        (errors.DeferredTimeoutError, False),
        (errors.DeferredUnreachableError, False),
        (RuntimeError, False),
    ],
)
async def test_a_final_failure_is_asked_for_once(
    how: str, outcome: Callable[[str], Exception], is_final: bool
) -> None:
    text, book = _deferred(outcome("no"))
    for _ in range(2):
        with suppress(errors.DeferredError, RuntimeError):
            await text.aget() if how == "aget" else text.get()
    assert len(book.asked) == (1 if is_final else 2)


@pytest.mark.parametrize("look", [bool, hash, repr, lambda t: t == "x", lambda t: f"{t:>3}"])
def test_a_look_at_a_failed_text_raises(look: Callable[[Any], Any]) -> None:
    text, _ = _deferred(errors.DeferredFailedError("no", reference=REFERENCE))
    if look is repr:
        assert look(text) == "<DeferredText, not read yet>"
    else:
        with pytest.raises(errors.DeferredFailedError):
            look(text)
