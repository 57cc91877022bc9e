"""The scheduler's knowledge of calls that declare nothing, on a real process with two engines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
from harness.processes import DEMO_MODEL, GatewayProcess, upstream_settings, wait_until
from harness.scripted_upstream import ScriptedUpstream, chat_document, document
from openai.types.chat import ChatCompletionMessageParam

Chat = list[ChatCompletionMessageParam]
MAPS = 6
SYSTEM = "You are a careful reader who summarises one page of a long report at a time. "
JOIN = "Write one summary of the whole report from these summaries of its pages, in order: "


class Recorded:
    """A gateway whose scheduler's events are recorded."""

    def __init__(self, folder: Path, **linking: Any) -> None:
        self.log = folder / "events.jsonl"
        model = {"model": DEMO_MODEL, "engines": 2, "max_batch_size": 4, "num_blocks": 512}
        self.gateway = GatewayProcess(
            config={
                "models": [model],
                "scheduler": {"record": str(self.log)},
                "linking": {"session_wait_s": 1.0, **linking},
            }
        )
        self.client = openai.OpenAI(base_url=self.gateway.base_url, api_key="none", timeout=60)
        wait_until(lambda: self.linking()["running"], "the linking process")

    def linking(self) -> dict[str, Any]:
        return dict(self.gateway.health()["linking"])

    def chat(self, messages: Chat, **more: Any) -> str:
        answer = self.client.chat.completions.create(
            model=DEMO_MODEL, messages=messages, max_tokens=24, temperature=1.2, **more
        )
        return answer.choices[0].message.content or ""

    def turns(self, count: int, question: str) -> None:
        """A loop of turns."""
        messages: Chat = [{"role": "user", "content": question}]
        for number in range(count):
            text = self.chat(messages, seed=number)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"Go on, part {number}."},
            ]

    def map_reduce(self, name: str) -> None:
        """Maps at once, and a call that reads them all."""
        pages = [f"{name}, page {number}: {number * 7919} herons." for number in range(MAPS)]
        with ThreadPoolExecutor(MAPS) as threads:
            answers = list(
                threads.map(
                    lambda page: self.chat([{"role": "user", "content": SYSTEM * 4 + page}]), pages
                )
            )
        self.chat([{"role": "user", "content": JOIN + "\n\n".join(answers)}])

    def tasks(self) -> list[dict[str, Any]]:
        """All tasks that the scheduler was given, in order; the gateway has ended."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            step = json.loads(line)
            found += [
                each["task"] for each in step.get("events", ()) if each["kind"] == "TaskSubmitted"
            ]
        return found


def test_turns_of_a_session_are_one_application(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with recorded.gateway:
        recorded.turns(4, "Tell me of a heron and of a fox.")
        kept_out: Chat = [
            {"role": "user", "content": "Tell me of a lake."},
            {"role": "assistant", "content": "It is deep."},
            {"role": "user", "content": "Go on."},
        ]
        recorded.chat(kept_out, extra_headers={"X-Parrot-Link": "off"})
        answer = httpx.get(f"{recorded.gateway.base_url}/sessions", timeout=20)
        sessions = [each["id"] for each in answer.json()["data"]]
        (model,) = recorded.gateway.health()["scheduler"]["models"].values()
        assert model["applications"] >= 1
    *turns, last = recorded.tasks()
    (session,) = {task["application"] for task in turns}
    assert session in sessions
    assert last["application"] == f"call-{last['id']}"


def test_an_undeclared_map_reduce_is_groups_and_what_reads_them(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    with recorded.gateway:
        recorded.map_reduce("Lakes")
        names = iter(range(100))

        def known() -> bool:
            """Another run, until its kind is known; that is told to the gateway each second."""
            recorded.map_reduce(f"Rivers {next(names)}")
            return recorded.linking()["templates"] >= 2

        wait_until(known, "templates")
        for number in range(6):
            recorded.map_reduce(f"Ponds {number}")
    tasks = recorded.tasks()
    assert all(task["groups"] == [] for task in tasks[: MAPS + 1])
    *maps, last = tasks[-MAPS - 1 :]
    # Runs that follow each other within a second share groups.
    groups = [task["groups"][0] for task in maps]
    assert len({name.rpartition("/")[0] for name, *_ in groups}) == 1
    assert all(2 <= size <= MAPS for _, size, _ in groups)
    assert {task["objective"][0] for task in maps} == {"throughput"}
    assert (last["groups"], last["objective"][0]) == ([], "latency")


def test_nothing_is_used_that_is_switched_off(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, use=[])
    with recorded.gateway:
        recorded.turns(3, "Tell me of a heron and of a fox.")
    tasks = recorded.tasks()
    assert len(tasks) == 3
    for task in tasks:
        assert task["application"] == f"call-{task['id']}"
        assert task["objective"] == ["latency", None]
        assert (task["groups"], task["returns"]) == ([], 0.0)


def test_calls_that_are_passed_on_name_their_session(upstream: ScriptedUpstream) -> None:
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "linking": {"session_header": "X-Session-Id", "session_wait_s": 1.0},
        }
    ) as gateway:
        wait_until(lambda: gateway.health()["linking"]["running"], "the linking process")
        client = openai.OpenAI(base_url=gateway.base_url, api_key="none")
        story = "The heron waited in the reeds until the fox came down to the pond to drink."
        model = upstream.script(*[document(chat_document(story))] * 3)
        question: Chat = [{"role": "user", "content": "Tell me of a heron and of a fox."}]
        client.chat.completions.create(model=model, messages=question)
        turns: Chat = [
            *question,
            {"role": "assistant", "content": story},
            {"role": "user", "content": "Go on."},
        ]
        client.chat.completions.create(model=model, messages=turns)
        own = {"X-Session-Id": "mine"}
        client.chat.completions.create(model=model, messages=turns, extra_headers=own)
        named = [
            call.headers["x-session-id"]
            for call in upstream.received
            if call.method == "POST" and call.json["model"] == model
        ]
        assert named[0] == named[1]
        assert named[0].startswith("sess_")
        assert named[2] == "mine"
