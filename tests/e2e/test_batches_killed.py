"""A batch on the demo model whose gateway is killed in the middle, with the real client."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from harness.processes import DEMO_MODEL, GatewayProcess, wait_until

LINES = 120


@contextmanager
def gateway(folder: Path) -> Iterator[tuple[GatewayProcess, openai.OpenAI]]:
    config = {
        "models": [{"model": DEMO_MODEL, "max_batch_size": 16, "num_blocks": 512}],
        "batches": {"folder": str(folder)},
    }
    with GatewayProcess(config=config) as process:
        yield process, openai.OpenAI(base_url=process.base_url, api_key="none", max_retries=0)


def line(number: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"Story number {number}"}
    body = {"model": DEMO_MODEL, "messages": [message], "max_tokens": 24, "temperature": 0}
    url = "/v1/chat/completions"
    return {"custom_id": f"story-{number}", "method": "POST", "url": url, "body": body}


def test_a_killed_gateway_goes_on_and_answers_nothing_twice(tmp_path: Path) -> None:
    content = "\n".join(json.dumps(line(number)) for number in range(LINES)).encode()
    with gateway(tmp_path) as (process, client):
        file = client.files.create(file=("stories.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def some() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed >= LINES // 4

        wait_until(some, "a quarter of the batch", 60)
        chat = client.chat.completions.create(
            model=DEMO_MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert chat.choices
        process.signal(signal.SIGKILL, group=True)
        process.wait()
    before = (tmp_path / "batches" / f"{batch.id}.output").read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    assert LINES // 4 <= before.count(b"\n") < LINES
    with gateway(tmp_path) as (process, client):
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "its end", 90)
        done = client.batches.retrieve(batch.id)
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
        assert done.usage is not None
        output = client.files.content(str(done.output_file_id)).read()
        assert output.startswith(before)
        answers = [json.loads(each) for each in output.splitlines()]
        assert len(answers) == LINES
        assert {each["custom_id"] for each in answers} == {
            f"story-{number}" for number in range(LINES)
        }
        tokens = sum(each["response"]["body"]["usage"]["total_tokens"] for each in answers)
        assert done.usage.total_tokens == tokens
        ran = process.wait_idle()
        # No line ran again that had its answer.
        assert process.health()["scheduler"]["placed"] == LINES - before.count(b"\n")
        assert ran["running"] == 0
        assert client.files.content(file.id).read() == content
