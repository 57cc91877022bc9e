"""The truth about hand-made sessions."""

from __future__ import annotations

from parrot_bench.linking.script import (
    Chain,
    Script,
    assistant,
    system,
    tool_call,
    tool_result,
    user,
)

LONG = "An answer that is long enough to be recognised."


def test_a_chain_continues_its_last_call_and_carries_the_older_ones() -> None:
    script = Script("s")
    chain = Chain(script, [system("Be good."), user("One?")])
    first = chain.call(LONG)
    chain.hear(user("Two?"))
    second = chain.call(LONG)
    chain.hear(user("Three?"))
    third = script.calls[chain.call(LONG)]
    assert script.calls[second].edges == {first: ("continues",)}
    assert third.edges == {second: ("continues",)}
    assert third.neutral == {first}
    assert third.after == (second,)
    assert third.request["messages"][-2:] == [assistant(LONG), user("Three?")]


def test_an_echoed_tool_id_is_asked_for_beside_the_continuation() -> None:
    script = Script("s")
    chain = Chain(script, [user("Look.")])
    first = chain.call(tool_call("call_1", "look", "{}"))
    chain.hear(tool_result("call_1", "found"))
    second = chain.call(LONG)
    assert script.calls[second].edges == {first: ("continues", "tool")}


def test_what_another_call_has_brought_into_the_history_is_read_once() -> None:
    script = Script("s")
    source = script.ask("Write.", LONG)
    chain = Chain(script, [user("Start.")])
    chain.hear(user(LONG), source)
    first = chain.call(LONG)
    chain.hear(user("On."))
    second = chain.call(LONG)
    assert script.calls[first].edges == {source: ("output",)}
    assert script.calls[second].edges == {first: ("continues",)}
    assert script.calls[second].neutral == {source}


def test_a_short_answer_is_neutral_and_counted_apart() -> None:
    script = Script("s")
    yes, no = script.ask("Is it?", "Yes"), script.ask("Really?", LONG)
    reader = script.calls[script.ask(f"Yes {LONG}", "so", reads=[yes, no])]
    assert reader.edges == {no: ("output",)}
    assert reader.neutral == reader.short == {yes}
    assert reader.after == (yes, no)


def test_an_answer_that_a_window_has_dropped_is_not_read() -> None:
    script = Script("s")
    source = script.ask("Write.", LONG)
    chain = Chain(script, [user("Start.")])
    chain.hear(user(f"Heard: {LONG}"), source)
    chain.hear(user("On."))
    reader = script.calls[chain.call(LONG, messages=chain.messages[-1:])]
    assert reader.edges == {}
    assert reader.neutral == {source}


def test_of_equal_answers_the_newest_is_read() -> None:
    script = Script("s")
    old, new = script.ask("Write.", LONG), script.ask("Write again.", LONG)
    chain = Chain(script, [user("Start.")])
    chain.hear(user(LONG), old)
    chain.hear(user(LONG), new)
    reader = script.calls[chain.call(LONG)]
    assert reader.edges == {new: ("output",)}
    assert reader.neutral == {old}


def test_one_message_can_hold_several_answers() -> None:
    script = Script("s")
    sources = [script.ask(f"Write {number}.", f"{LONG} {number}") for number in range(2)]
    chain = Chain(script, [user("Start.")])
    chain.hear(user(f"{LONG} 0\n{LONG} 1"), *sources)
    reader = script.calls[chain.call(LONG)]
    assert reader.edges == dict.fromkeys(sources, ("output",))
