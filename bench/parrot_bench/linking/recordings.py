"""Recorded agents as calls: every message that a model wrote becomes a call.

Its prompt is what its author had seen before. Read are JSON files and JSON lines of

- `messages` as OpenAI's fine-tuning takes them, or a plain list of them;
- `conversations` with `from` and `value` (ShareGPT), `turns`;
- AgentBench's `history` with the role `agent`, tau-bench's `traj`, tau2-bench's `simulations`;
- SWE-agent's `trajectory` and `history`; where steps hold the prompt sent, that is the prompt;
- group chats (AutoGen): a `history` of messages with names, `system_prompt` by name.

**Truth.** Each author is a client of its own. Its call continues its own call before, and reads
what others said in between, once: what is older, its history carries. In a group chat all authors
but terminals and people are models, and the first message is the task. A recording is one session.
Where a window has dropped an author's own last answer, and no tool id speaks of it, the edge from
it is neutral.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

from parrot_bench.linking.script import PERSON_S, TOOL_S, Chain, Message, Script, user
from parrot_bench.servers import BenchmarkError

Ids: TypeAlias = Literal["recorded", "counted", "none"]

_KEYS = ("traj", "messages", "fncall_messages", "conversations", "turns", "history")
_ROLES = {"human": "user", "gpt": "assistant", "agent": "assistant", "model": "assistant",
          "ai": "assistant", "function_call": "assistant", "observation": "tool",
          "function_response": "tool", "function": "tool"}  # fmt: skip
_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "function_call")
_NO_MODELS = ("computer_terminal", "computerterminal", "human", "user", "admin")
#: What a simulated user is told when a recording does not say.
_USER = "You are a user who talks to an agent. Say one line at a time, as a person would, and end."
_GREETING = "Hi! How can I help you today?"
_ELIDED = "Old environment output: ({} lines omitted)"


@dataclass(frozen=True, slots=True)
class Changes:
    """How clients change a recording before they send it.

    Args:
        window: only the system prompt, the first user's message and that many last ones are sent.
        elide: all but the last so many outputs of tools are replaced by a line.
        simulated_users: who wrote the user's messages is a model too.
        ids: of tool calls; "counted": `call_1`, `call_2`, … in every session.
        as_text: the history is one user's message, as agents with a scratchpad send it.
    """

    window: int | None = None
    elide: int | None = None
    simulated_users: bool = False
    ids: Ids = "recorded"
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """Messages in order; the author of each is its `name` in a group chat, else its role."""

    task: str
    messages: list[Message]
    #: System prompts by author, of a group chat or a simulated user.
    systems: dict[str, str] = field(default_factory=dict)
    is_group: bool = False
    #: The prompts that were sent, each with its answer, where they are known.
    prompts: list[tuple[list[Message], Message]] = field(default_factory=list)


def read(paths: Iterable[Path]) -> list[Recording]:
    """All recordings in files and folders.

    Raises:
        BenchmarkError: there is none.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [file for file in inside if file.suffix in (".json", ".jsonl", ".traj")]
    found = [recording for file in files for recording in _of_file(file)]
    if not found:
        raise BenchmarkError(f"no recording in {', '.join(str(path) for path in paths)}")
    return found


def sessions(recordings: Iterable[Recording], changes: Changes) -> list[Script]:
    """A session of each recording that holds an answer."""
    scripts = []
    for number, recording in enumerate(recordings):
        script = Script(f"recording-{number}", task=recording.task)
        if recording.prompts:
            chain = Chain(script, [])
            for prompt, answer in recording.prompts:
                chain.call(answer, messages=prompt, pause_s=TOOL_S)
        else:
            _add_calls(script, recording, changes)
        if script.calls:
            scripts.append(script)
    return scripts


def _add_calls(script: Script, recording: Recording, changes: Changes) -> None:
    # A scratchpad holds no ids.
    messages = _with_ids(recording.messages, "none" if changes.as_text else changes.ids)
    names = {_author(message, recording) for message in messages}
    if recording.is_group:
        models = {name for name in names if name.lower() not in _NO_MODELS}
    else:
        models = {"assistant", "user"} if changes.simulated_users else {"assistant"}
    authors = {name: Chain(script, _opening(name, recording)) for name in sorted(models & names)}
    for message in messages:
        name = _author(message, recording)
        made: list[str] = []
        # A group is given its task by whoever speaks first.
        if name in authors and not (recording.is_group and message is messages[0]):
            said = {**message, "role": "assistant"}
            said.pop("name", None)
            chain = authors[name]
            shown = _shown(chain.messages, changes)
            dropped = chain.last
            if any(each["role"] == "assistant" or each.get("tool_call_id") for each in shown):
                dropped = None
            if dropped is not None:
                chain.last = None
            call = chain.call(
                said,
                messages=_as_text(shown) if changes.as_text else shown,
                neutral=[dropped] if dropped else [],
                pause_s=PERSON_S if name == "user" else TOOL_S,
                after=None if dropped is None else [dropped, *(each for each, _ in chain.heard)],
            )
            made = [call]
        for other, chain in authors.items():
            if other != name and (seen := _seen(message, name, other, recording)) is not None:
                chain.hear(seen, *made)


def _author(message: Message, recording: Recording) -> str:
    return str(message.get("name") or message["role"]) if recording.is_group else message["role"]


def _opening(name: str, recording: Recording) -> list[Message]:
    """What an author has been told before the first message."""
    if recording.is_group:
        text = recording.systems.get(name, f"You are {name}, one of a team.")
        return [{"role": "system", "content": text}]
    if name == "user":
        text = recording.systems.get("user", _USER)
        return [{"role": "system", "content": text}, user(_GREETING)]
    return []


def _seen(message: Message, author: str, by: str, recording: Recording) -> Message | None:
    """The message as another author sees it; None if it does not."""
    if recording.is_group:
        return {"role": "user", "name": author.split(" ")[0], "content": message["content"]}
    if by == "assistant":
        return message
    is_said = author == "assistant" and message.get("content")
    return user(message["content"]) if is_said else None


def _shown(messages: list[Message], changes: Changes) -> list[Message]:
    """What of a history is sent."""
    if changes.elide is not None:
        outputs = [i for i, message in enumerate(messages) if message["role"] == "tool"]
        # Agents without tool messages get their observations as the user's, after the task.
        outputs = (
            outputs or [i for i, message in enumerate(messages) if message["role"] == "user"][1:]
        )
        old = set(outputs[: max(0, len(outputs) - changes.elide)])
        messages = [_elided(message) if i in old else message for i, message in enumerate(messages)]
    if changes.window is not None and len(messages) > changes.window:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), -1)
        start = len(messages) - changes.window
        kept = [m for i, m in enumerate(messages[:start]) if m["role"] == "system" or i == first]
        messages = kept + messages[start:]
    return messages


def _as_text(messages: list[Message]) -> list[Message]:
    systems = [message for message in messages if message["role"] == "system"]
    lines = [_line(message) for message in messages if message["role"] != "system"]
    return [*systems, user("\n\n".join(lines))]


def _line(message: Message) -> str:
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return " ".join([f"{message['role']}:", str(message.get("content") or ""), *calls])


def _elided(message: Message) -> Message:
    lines = str(message.get("content") or "").count("\n") + 1
    return {**message, "content": _ELIDED.format(lines)}


def _with_ids(messages: list[Message], ids: Ids) -> list[Message]:
    """The messages with their tool-call ids changed; each result follows its call."""
    if ids == "recorded":
        return messages
    numbers, names, changed = count(1), dict[str, str](), []
    for message in messages:
        new = dict(message)
        if calls := message.get("tool_calls"):
            names |= {call["id"]: f"call_{next(numbers)}" for call in calls if call.get("id")}
            new["tool_calls"] = [_named(call, "id", names, ids) for call in calls]
        changed.append(_named(new, "tool_call_id", names, ids))
    return changed


def _named(value: Message, key: str, names: dict[str, str], ids: Ids) -> Message:
    if key not in value:
        return value
    rest = {name: part for name, part in value.items() if name != key}
    return rest if ids == "none" else {**rest, key: names.get(value[key], value[key])}


def _of_file(path: Path) -> Iterator[Recording]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [_json_or_none(line) for line in text.splitlines()]
    for value in values:
        yield from _of_value(value)


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _of_value(value: Any) -> Iterator[Recording]:
    if isinstance(value, list):
        if value and isinstance(value[0], dict) and ({"role", "from"} & set(value[0])):
            value = {"messages": value}
        else:
            for part in value:
                yield from _of_value(part)
            return
    if not isinstance(value, dict):
        return
    for inner in ("simulations", "output"):
        if isinstance(value.get(inner), list | dict):
            yield from _of_value(value[inner])
            return
    raw = next((value[key] for key in _KEYS if isinstance(value.get(key), list)), list[Any]())
    messages = [
        _message(message)
        for message in raw
        if isinstance(message, dict) and (message.get("role") or message.get("from"))
    ]
    if not messages:
        return
    if isinstance(value.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    prompts = [_step(step) for step in value.get("trajectory") or () if isinstance(step, dict)]
    spoken = [message for message in messages if message["role"] != "system"] or messages
    task = value.get("task_id", value.get("instance_id", value.get("question_ID")))
    given = value.get("system_prompt")
    systems = dict(given) if isinstance(given, dict) else {}
    info = value.get("info")
    instruction = (info.get("task") or {}).get("instruction") if isinstance(info, dict) else None
    is_group = bool(systems) or any(m["role"] not in _KNOWN for m in messages)
    yield Recording(
        task=str(spoken[0].get("content")) if task is None else str(task),
        messages=messages,
        systems=systems | ({"user": str(instruction)} if instruction else {}),
        is_group=is_group,
        prompts=[step for step in prompts if step is not None],
    )


_KNOWN = {"system", "user", "assistant", "tool", "developer"}


def _message(raw: dict[str, Any]) -> Message:
    """A message in OpenAI's form; an unknown role is an author's name."""
    role = str(raw.get("role") or raw.get("from"))
    message = {key: raw[key] for key in _FIELDS if raw.get(key) is not None}
    message["role"] = _ROLES.get(role, role)
    message.setdefault("content", raw.get("value"))
    if ids := raw.get("tool_call_ids"):
        message["tool_call_id"] = ids[0]
    elif message["role"] == "tool" and "tool_call_id" not in message and raw.get("id"):
        message["tool_call_id"] = raw["id"]
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    if message["role"] not in _KNOWN:
        # An orchestrator's "(thought)" and "(-> WebSurfer)" are one author's.
        message["name"] = message["role"].split(" (")[0]
    return message


def _tool_call(call: dict[str, Any]) -> Message:
    if "function" in call:
        return call
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": call.get("name"), "arguments": text}
    return {"id": call.get("id"), "type": "function", "function": function}


def _step(step: dict[str, Any]) -> tuple[list[Message], Message] | None:
    prompt = step.get("query")
    if not isinstance(prompt, list) or not isinstance(step.get("response"), str):
        return None
    answer: Message = {"role": "assistant", "content": step["response"]}
    if step.get("tool_calls"):
        answer["tool_calls"] = step["tool_calls"]
    return [_message(message) for message in prompt], answer
