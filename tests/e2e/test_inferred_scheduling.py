"""The scheduler's knowledge of calls that declare nothing, on a real process with engines."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until
from openai.types.chat import ChatCompletionMessageParam

Chat = list[ChatCompletionMessageParam]
TURNS, MAPS = 4, 4
SYSTEM = "You are a careful reader who summarises one page of a long report at a time. "
JOIN = "Write one summary of the whole report from these summaries of its pages, in order: "


class Recorded:
    """A gateway whose scheduler's events are recorded."""

    def __init__(self, folder: Path, engines: int, **linking: Any) -> None:
        self.log = folder / "events.jsonl"
        model = {"model": DEMO_MODEL, "engines": engines, "max_batch_size": 4, "num_blocks": 512}
        self.gateway = GatewayProcess(
            config={
                "models": [model],
                "scheduler": {"record": str(self.log)},
                "linking": {"session_wait_s": 1.0, "session_wait_memory": 0, **linking},
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


class Played(NamedTuple):
    """Traffic that a gateway has seen: turns, a call that is kept out, and map-reduces."""

    tasks: list[dict[str, Any]]
    #: Ids, and applications of the scheduler, after the turns.
    sessions: list[str]
    applications: int


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    recorded = Recorded(tmp_path_factory.mktemp("recorded"), engines=2)
    with recorded.gateway:
        recorded.turns(TURNS, "Tell me of a heron and of a fox.")
        kept_out: Chat = [
            {"role": "user", "content": "Tell me of a lake."},
            {"role": "assistant", "content": "It is deep."},
            {"role": "user", "content": "Go on."},
        ]
        recorded.chat(kept_out, extra_headers={"X-Parrot-Link": "off"})
        answer = httpx.get(f"{recorded.gateway.base_url}/sessions", timeout=60)
        sessions = [each["id"] for each in answer.json()["data"]]
        (model,) = recorded.gateway.health()["scheduler"]["models"].values()
        recorded.map_reduce("Lakes")
        names = iter(range(100))

        def known() -> bool:
            """Another run, until its kind is known; that is told to the gateway each second."""
            recorded.map_reduce(f"Rivers {next(names)}")
            return recorded.linking()["templates"] >= 2

        wait_until(known, "templates")
        for number in range(6):
            recorded.map_reduce(f"Ponds {number}")
    return Played(recorded.tasks(), sessions, model["applications"])


def test_turns_of_a_session_are_one_application(played: Played) -> None:
    *turns, last = played.tasks[: TURNS + 1]
    (session,) = {task["application"] for task in turns}
    assert session in played.sessions
    assert last["application"] == f"call-{last['id']}"
    assert played.applications >= 1


def test_an_undeclared_map_reduce_is_groups_and_what_reads_them(played: Played) -> None:
    tasks = played.tasks[TURNS + 1 :]
    assert all(task["groups"] == [] for task in tasks[: MAPS + 1])
    *maps, last = tasks[-MAPS - 1 :]
    # Runs that follow each other within a second share groups.
    groups = [task["groups"][0] for task in maps]
    assert len({name.rpartition("/")[0] for name, *_ in groups}) == 1
    assert all(2 <= size <= MAPS for _, size, _ in groups)
    assert {task["objective"][0] for task in maps} == {"throughput"}
    assert (last["groups"], last["objective"][0]) == ([], "latency")


def test_nothing_is_used_that_is_switched_off(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, engines=1, use=[])
    with recorded.gateway:
        recorded.turns(3, "Tell me of a heron and of a fox.")
    tasks = recorded.tasks()
    assert len(tasks) == 3
    for task in tasks:
        assert task["application"] == f"call-{task['id']}"
        assert task["objective"] == ["latency", None]
        assert (task["groups"], task["returns"]) == ([], 0.0)
