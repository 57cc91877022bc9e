"""Functions that can be semantic functions, and arguments that they take; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import httpx
import pytest
from parrot_functions import (
    ArgumentError,
    Client,
    DefinitionError,
    Input,
    Output,
    Session,
    SessionError,
    Text,
    current_session,
    semantic_function,
)


def refuse(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"nothing should be sent: {request.url}")


@pytest.fixture
def session() -> Iterator[Session]:
    with Client(model="m", transport=httpx.MockTransport(refuse)) as client:
        yield Session(client=client)


@semantic_function
def tell(hero: Input, count: int, story: Output = Output(max_tokens=5)) -> None:
    """{{count}} x {{hero}}: {{story}}"""


def no_docstring(a: Output) -> None: ...


def no_output(a: Input) -> None:
    """{{a}}"""


def missing_input(a: Input, b: Output) -> None:
    """Say {{b}}"""


def missing_output(a: Input, b: Output) -> None:
    """Say {{a}}"""


def output_first(b: Output) -> None:
    """{{b}}"""


def input_behind(a: Input, b: Output) -> None:
    """Say {{b}} {{a}}"""


def collects(*a: Input, b: Output) -> None:
    """Say {{a}} {{b}}"""


def no_ascii(ä: Input, b: Output) -> None:
    """Say {{ä}} {{b}}"""


def odd_default(b: Annotated[str, Output()] = "x") -> None:
    """Say {{b}}"""


async def is_async(b: Output) -> None:
    """Say {{b}}"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_docstring, "docstring"),
        (no_output, "no output"),
        (missing_input, "{{a}}"),
        (missing_output, "{{b}}"),
        (output_first, "begins with the output 'b'"),
        (input_behind, "'a' stands only behind"),
        (collects, "'a' collects"),
        (no_ascii, "'ä'"),
        (odd_default, "default"),
        (is_async, "async def"),
    ],
)
def test_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(DefinitionError) as refused:
        semantic_function(function)
    assert reason in str(refused.value)
    assert function.__name__ in str(refused.value)


def test_annotations_that_cannot_be_read_are_refused() -> None:
    class Local: ...

    def f(a: Local, b: Output) -> None:
        """{{a}} {{b}}"""

    with pytest.raises(DefinitionError, match="Local"):
        semantic_function(f)


def test_it_still_looks_like_the_function() -> None:
    assert tell.__name__ == "tell"  # type: ignore[attr-defined]
    assert tell.__doc__ == "{{count}} x {{hero}}: {{story}}"
    assert "count: int" in repr(tell)


@pytest.mark.parametrize(
    ("arguments", "named", "reason"),
    [
        ((), {}, "'hero' is missing"),
        (("a",), {}, "'count' is missing"),
        (("a", 1, "b"), {}, "'story' is an output"),
        (("a", 1), {"story": "b"}, "'story' is an output"),
        ((3, 1), {}, "'hero' must be a text, not int"),
        (("a", 1), {"other": 2}, "unexpected keyword argument 'other'"),
    ],
)
def test_arguments_that_do_not_fit(
    session: Session, arguments: tuple[Any, ...], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ArgumentError, match=reason):
        session.call(tell, *arguments, **named)


def test_a_text_is_no_plain_value(session: Session) -> None:
    with pytest.raises(ArgumentError, match="Annotate it with Input"):
        session.call(tell, "a", Text(session, "t"))  # type: ignore[arg-type]


def test_without_a_model() -> None:
    with (
        Client(transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(ArgumentError, match="needs a model"),
    ):
        Session(client=client).call(tell, "a", 1)


def test_without_a_session() -> None:
    with pytest.raises(SessionError, match="No session is open"):
        tell("a", 1)


def test_sessions_nest_and_end(session: Session) -> None:
    with session, Session(client=session.client) as inner:
        assert current_session() is inner
    with pytest.raises(SessionError):
        current_session()
    with pytest.raises(SessionError, match="is closed"):
        session.call(tell, "a", 1)
    with pytest.raises(SessionError, match="is closed"), session:
        pass


def test_a_text_of_another_client_must_be_here(session: Session) -> None:
    with Client(model="m", transport=httpx.MockTransport(refuse)) as client:
        foreign = Text(Session(client=client), "t")
        with pytest.raises(ArgumentError, match="another client"):
            session.call(tell, foreign, 1)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x"])
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(ArgumentError, match="base_url"):
        Session(url)
