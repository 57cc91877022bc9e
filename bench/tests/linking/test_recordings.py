"""Recordings of several frameworks become calls with their truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from parrot_bench.linking.recordings import Changes, read, sessions
from parrot_bench.linking.script import Script
from parrot_bench.servers import BenchmarkError

LONG = "a text of enough characters, number "
TALK = [
    {"role": "system", "content": "Be an agent."},
    {"role": "user", "content": f"The task: {LONG}0"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_x", "name": "f", "content": "found\nthis"},
    {"role": "assistant", "content": f"An answer: {LONG}1"},
    {"role": "user", "content": f"A question: {LONG}2"},
    {"role": "assistant", "content": f"The end: {LONG}3"},
]


def scripts_of(tmp_path: Path, value: Any, changes: Changes | None = None) -> list[Script]:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(value))
    return sessions(read([tmp_path]), changes or Changes())


def edges(script: Script) -> list[dict[str, tuple[str, ...]]]:
    return [
        {source.rpartition(".")[2]: kinds for source, kinds in call.edges.items()}
        for call in script.calls.values()
    ]


@pytest.mark.parametrize(
    "value",
    [
        {"messages": TALK},
        [TALK],
        TALK,
        [{"traj": TALK, "task_id": 3, "trial": 0}],
        {"history": TALK, "trajectory": [{"action": "a", "response": "b"}]},
    ],
)
def test_formats_of_messages(tmp_path: Path, value: Any) -> None:
    (script,) = scripts_of(tmp_path, value)
    assert edges(script) == [{}, {"0": ("continues", "tool")}, {"1": ("continues",)}]
    assert list(script.calls.values())[2].request["messages"] == TALK[:6]


def test_json_lines_are_sessions_and_broken_lines_are_none(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": TALK}), "{broken", json.dumps({"messages": TALK[:5]})]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    assert [len(script.calls) for script in sessions(read([tmp_path]), Changes())] == [3, 2]


def test_conversations_as_sharegpt_has_them(tmp_path: Path) -> None:
    said = ["human", "gpt", "human", "gpt"]
    (script,) = scripts_of(
        tmp_path, {"conversations": [{"from": name, "value": f"{name} {LONG}"} for name in said]}
    )
    assert edges(script) == [{}, {"0": ("continues",)}]


def test_prompts_that_a_step_holds_are_what_was_sent(tmp_path: Path) -> None:
    steps = [{"query": TALK[:2], "response": "one"}, {"query": TALK[3:4], "response": "two"}]
    (script,) = scripts_of(tmp_path, {"history": TALK, "trajectory": steps})
    assert [call.request["messages"] for call in script.calls.values()] == [
        TALK[:2],
        [{key: TALK[3][key] for key in ("role", "content", "tool_call_id", "name")}],
    ]


def test_a_simulated_user_is_a_client_of_its_own(tmp_path: Path) -> None:
    (script,) = scripts_of(tmp_path, {"messages": TALK}, Changes(simulated_users=True))
    # user, agent (tool call), agent, user, agent
    assert edges(script) == [
        {},
        {"0": ("output",)},
        {"1": ("continues", "tool")},
        {"0": ("continues",), "2": ("output",)},
        {"2": ("continues",), "3": ("output",)},
    ]
    asked = list(script.calls.values())[3].request["messages"]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    assert asked[-1]["content"] == TALK[4]["content"]


def test_a_group_chat_has_an_author_for_each_name(tmp_path: Path) -> None:
    names = ["Planner", "Coder", "Computer_terminal", "Planner", "Coder"]
    history = [
        {"role": "user", "name": name, "content": f"{name}: {LONG}{number}"}
        for number, name in enumerate(names)
    ]
    (script,) = scripts_of(tmp_path, {"history": history, "system_prompt": {"Coder": "You code."}})
    # The first message is the task: Coder, Planner, Coder.
    assert edges(script) == [{}, {"0": ("output",)}, {"0": ("continues",), "1": ("output",)}]
    last = list(script.calls.values())[-1].request["messages"]
    assert last[0] == {"role": "system", "content": "You code."}
    assert [message["role"] for message in last[1:]] == ["user", "assistant", "user", "user"]


def test_a_window_keeps_the_head_and_the_last_messages(tmp_path: Path) -> None:
    (script,) = scripts_of(tmp_path, {"messages": TALK}, Changes(window=2))
    last = list(script.calls.values())[-1]
    assert last.request["messages"] == [*TALK[:2], *TALK[4:6]]
    assert edges(script)[-1] == {"1": ("continues",)}


def test_old_outputs_of_tools_are_replaced(tmp_path: Path) -> None:
    (script,) = scripts_of(tmp_path, {"messages": TALK}, Changes(elide=0))
    result = list(script.calls.values())[-1].request["messages"][3]
    assert result["content"] == "Old environment output: (2 lines omitted)"


def test_ids_are_counted_or_removed(tmp_path: Path) -> None:
    (counted,) = scripts_of(tmp_path, {"messages": TALK}, Changes(ids="counted"))
    asked = list(counted.calls.values())[1].request["messages"]
    assert asked[2]["tool_calls"][0]["id"] == asked[3]["tool_call_id"] == "call_1"
    (without,) = scripts_of(tmp_path, {"messages": TALK}, Changes(ids="none"))
    assert edges(without)[1] == {"0": ("continues",)}


def test_files_without_a_recording_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"messages": "none"}')
    with pytest.raises(BenchmarkError, match="no recording"):
        read([tmp_path])


def test_a_history_can_be_one_message(tmp_path: Path) -> None:
    (script,) = scripts_of(tmp_path, {"messages": TALK}, Changes(as_text=True))
    last = list(script.calls.values())[-1]
    assert [message["role"] for message in last.request["messages"]] == ["system", "user"]
    text = last.request["messages"][1]["content"]
    assert f"assistant: An answer: {LONG}1" in text
    assert text.endswith(f"user: A question: {LONG}2")
    assert edges(script)[-1] == {"1": ("continues",)}


def test_a_window_without_an_own_answer_asks_for_no_continuation(tmp_path: Path) -> None:
    (script,) = scripts_of(tmp_path, {"messages": TALK}, Changes(window=1))
    # The second sends the tool's result, which has an id; the third a question alone.
    assert edges(script) == [{}, {"0": ("continues", "tool")}, {}]
    _, second, third = script.calls.values()
    assert third.neutral == {second.id}
    assert third.after == (second.id,)
