"""Observers hear of answers, and their faults stay their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from harness.gateway.direct_placer import DirectPlacer
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import COMPLETIONS, PATHS, answer_to, http_of, text_of
from harness.gateway.serving import serving
from parrot_engine.protocol import Failed, SamplingParams, TokenLogprobs

from parrot_gateway.backends.own.generate import Generation, collect
from parrot_gateway.calls.generation_request import ChoiceDelta, GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.observer import GenerationObserver, TextObserver
from parrot_gateway.calls.tools.parsing import ToolCallBegin, ToolParsing
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import AnswerError, GatewayError, ValueTooLargeError
from parrot_gateway.settings.model import SessionSettings

#: What a value may hold is less than any answer.
TIGHT = SessionSettings(max_value_bytes=3)
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


class Recorder(GenerationObserver):
    """Notes what it is told; raises at a method if a test says so."""

    def __init__(self, raises_at: str = "") -> None:
        self.raises_at = raises_at
        self.told: list[tuple[str, Any]] = []

    def note(self, name: str, what: Any) -> None:
        self.told.append((name, what))
        if name == self.raises_at:
            raise RuntimeError("an observer is broken")

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self.note("started", engine)

    def delta(self, delta: ChoiceDelta) -> None:
        self.note("delta", delta)

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self.note("ended", usage)

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        self.note("failed", error)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.told))

    def texts(self, choice: int = 0) -> str:
        return "".join(d.content for n, d in self.told if n == "delta" and d.choice == choice)


async def run(
    engine: ScriptedRemoteEngine, observers: Sequence[GenerationObserver], **fields: Any
) -> Generation:
    request = GenerationRequest([TokenizedPrompt([1, 2])], fields.pop("sampling", GREEDY), **fields)
    async with serving(engine) as service:
        with Generation(DirectPlacer(service.remote), request, observers=observers) as generation:
            await collect(generation, 1, request.best_of)
    return generation


async def test_an_answer_is_told_in_order(engine: ScriptedRemoteEngine) -> None:
    observer = Recorder()
    await run(engine, [observer])
    assert observer.names() == ["started", "delta", "ended"]
    assert observer.told[0] == ("started", "direct")
    assert observer.texts() == "Hello world"
    assert observer.told[-1][1].prompt_tokens == 2


async def test_every_choice_and_the_echo_are_told(engine: ScriptedRemoteEngine) -> None:
    observer = Recorder()
    await run(engine, [observer], n=2, best_of=2, echoes=["So: "])
    for choice in range(2):
        assert observer.texts(choice) == "So: Hello world"


async def test_of_several_candidates_the_chosen_ones_are_told(engine: ScriptedRemoteEngine) -> None:
    answers = iter("ab")
    engine.script = lambda prompt, sampling: engine.text(next(answers))
    likely = {engine.text("a")[0]: -3.0, engine.text("b")[0]: -1.0, engine.im_end: 0.0}
    engine._logprobs = lambda i, top: TokenLogprobs(i, likely[i])  # type: ignore[method-assign]
    observer = Recorder()
    await run(engine, [observer], best_of=2)
    assert [delta.text for name, delta in observer.told if name == "delta"] == ["b"]


async def test_tool_calls_are_told_apart_from_content(engine: ScriptedRemoteEngine) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine.script = lambda prompt, sampling: engine.text("Well. " + call)
    observer, text = Recorder(), TextObserver(lambda piece: None)
    await run(
        engine,
        [observer, text],
        tools=ToolParsing("hermes", frozenset({"add"})),
        sampling=SamplingParams(max_tokens=200),
    )
    pieces = [p for n, d in observer.told if n == "delta" for p in d.pieces or ()]
    (begin,) = [piece for piece in pieces if isinstance(piece, ToolCallBegin)]
    assert (begin.name, begin.id[:5]) == ("add", "call_")
    assert observer.texts().strip() == "Well."
    assert [d.finish_reason for n, d in observer.told if n == "delta"][-1] == "tool_calls"
    text.finish()


@pytest.mark.parametrize("method", ["started", "delta", "ended"])
async def test_a_broken_observer_hears_no_more_and_nobody_notices(
    engine: ScriptedRemoteEngine, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Recorder(method), Recorder()
    await run(engine, [broken, other])
    assert broken.names()[-1] == method
    assert sum(name == method for name, _ in broken.told) == 1
    assert other.names() == ["started", "delta", "ended"]
    assert "Recorder failed" in caplog.text


async def test_failures_are_told(engine: ScriptedRemoteEngine) -> None:
    failure = Failed(0, "numerical_error", "not a number")
    engine.script = lambda prompt, sampling: [*engine.text("so far", end=False), failure]
    observer, text = Recorder(), TextObserver(lambda piece: None)
    with pytest.raises(GatewayError):
        await run(engine, [observer, text])
    assert observer.names() == ["started", "delta", "failed"]
    with pytest.raises(GatewayError, match="not a number"):
        text.finish()


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueTooLargeError("v", 1), "v"), (RuntimeError("bug"), "keep the text")]
)
def test_what_refuses_a_text_is_remembered(error: Exception, raised: str) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        raise error

    observer = TextObserver(write)
    for _ in range(2):
        observer.delta(ChoiceDelta(0, 0, "x", [], [], None))
    assert written == ["x"]
    with pytest.raises(GatewayError, match=raised):
        observer.check()
    # The reason stays, whatever becomes of the answer.
    observer.failed(GatewayError("the engine was lost"))
    with pytest.raises(GatewayError, match=raised):
        observer.finish()


def test_only_calls_are_no_text() -> None:
    observer = TextObserver(lambda text: None)
    observer.delta(ChoiceDelta(0, 0, "", [], [], "tool_calls", [ToolCallBegin(0, "f")]))
    observer.ended(None)
    with pytest.raises(AnswerError) as caught:
        observer.finish()
    assert caught.value.code == "no_text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_gets_its_answer_where_the_variable_takes_none(
    engine: ScriptedRemoteEngine, path: str, stream: bool
) -> None:
    async with http_of(engine, sessions=TIGHT) as http:
        parrot = {"session": "s", "output": "o"}
        response = await http.call(path, "long enough", stream=stream, parrot=parrot)
        assert response.status_code == 200
        if not stream:
            assert text_of(path, response.json()) == answer_to(path, "long enough")
        value = await http.value(response.headers["x-parrot-variable"])
        assert value.json()["variable"]["failure"]["code"] == "value_too_large"


async def test_a_deferred_call_ends_where_the_variable_takes_no_more(
    engine: ScriptedRemoteEngine,
) -> None:
    async with http_of(engine, sessions=TIGHT) as http:
        response = await http.call(COMPLETIONS, "long", parrot={"session": "s", "defer": True})
        value = await http.value(response.headers["x-parrot-variable"])
        assert value.json()["variable"]["failure"]["code"] == "value_too_large"
