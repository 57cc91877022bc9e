"""`/v1/files` and `/v1/batches` with the real client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from harness.openai_client import Driver, collect, result
from harness.processes import DEMO_MODEL, wait_until

ENDPOINT = "/v1/completions"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


async def begin(api: Driver, *lines: dict[str, Any]) -> Any:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await result(api.client.files.create(file=("in.jsonl", content), purpose="batch"))
    return await result(
        api.client.batches.create(
            input_file_id=file.id,
            endpoint=ENDPOINT,
            completion_window="24h",
            metadata={"of": "tests"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
    )


async def ended(api: Driver, batch_id: str) -> Any:
    with openai.OpenAI(
        base_url=str(api.client.base_url), api_key=api.client.api_key, max_retries=0
    ) as watcher:
        ends = ("completed", "failed", "cancelled", "expired")
        wait_until(lambda: watcher.batches.retrieve(batch_id).status in ends, "the batch's end")
    return await result(api.client.batches.retrieve(batch_id))


async def test_files(api: Driver) -> None:
    files = api.client.files
    made = await result(
        files.create(
            file=("a.jsonl", b"{}\n"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    )
    assert made.expires_at == made.created_at + 3600
    assert (await result(files.retrieve(made.id))).filename == "a.jsonl"
    assert (await result(files.wait_for_processing(made.id))).status == "processed"
    assert (await result(files.content(made.id))).read() == b"{}\n"
    assert made.id in [file.id for file in await collect(await result(files.list(limit=1)))]
    assert (await result(files.delete(made.id))).deleted
    with pytest.raises(openai.NotFoundError):
        await result(files.retrieve(made.id))
    with pytest.raises(openai.BadRequestError) as caught:
        await result(files.create(file=b"x", purpose="assistants"))
    assert caught.value.param == "purpose"


async def test_a_batch(api: Driver) -> None:
    batch = await begin(api, line("a"), line("b"), line("hot", temperature=50))
    done = await ended(api, batch.id)
    assert (done.status, done.metadata) == ("completed", {"of": "tests"})
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    content = (await result(api.client.files.content(done.output_file_id))).read()
    assert {json.loads(each)["custom_id"] for each in content.splitlines()} == {"a", "b"}
    output = await result(api.client.files.retrieve(done.output_file_id))
    assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 3600)
    assert batch.id in [each.id for each in await collect(await result(api.client.batches.list()))]
    with pytest.raises(openai.ConflictError):
        await result(api.client.batches.cancel(batch.id))


async def test_a_cancelled_batch(api: Driver) -> None:
    lines = [line(f"{n}", max_tokens=500, ignore_eos=True) for n in range(40)]
    batch = await begin(api, *lines)
    assert (await result(api.client.batches.cancel(batch.id))).status in ("cancelling", "cancelled")
    assert (await ended(api, batch.id)).status == "cancelled"


async def test_a_batch_with_bad_lines(api: Driver) -> None:
    done = await ended(api, (await begin(api, line("a"), line("a"), line("b", model="no"))).id)
    assert done.status == "failed"
    faults = [(fault.line, fault.code) for fault in done.errors.data]
    assert faults == [(2, "duplicate_custom_id"), (3, "model_not_found")]
