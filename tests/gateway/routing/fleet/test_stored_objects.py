"""Servers that keep objects, found by ids in requests."""

from __future__ import annotations

import pytest

from parrot_gateway.routing.fleet.stored_objects import MAX_IDS, StoredObjects

RESPONSES = "/v1/responses"


def knowing(*ids: str) -> StoredObjects:
    """The first one on `a`, the others on `b`."""
    objects = StoredObjects()
    for number, id_ in enumerate(ids):
        objects.add(id_, "b" if number else "a")
    return objects


@pytest.mark.parametrize(
    ("path", "body", "server"),
    [
        ("/v1/responses/resp_1", b"", "a"),
        ("/v1/responses/resp_2/input_items", b"", "b"),
        ("/v1/responses/resp%5F2", b"", "b"),
        ("/v1/responses/resp_3", b"", None),
        (RESPONSES, b'{"previous_response_id": "resp_2"}', "b"),
        (RESPONSES, b'{"conversation" : "resp_1"}', "a"),
        (RESPONSES, b'{"conversation": {"id":"resp_1"}}', "a"),
        ("/v1/batches", b'{"input_file_id":"resp_2"}', "b"),
        (RESPONSES, b'{"tools": [{"vector_store_ids": [ "resp_2"]}]}', "b"),
        (RESPONSES, b'{"input": "say \\"previous_response_id\\": \\"resp_2\\""}', None),
        (RESPONSES, b"\xff\x00", None),
    ],
)
def test_ids_are_found(path: str, body: bytes, server: str | None) -> None:
    assert knowing("resp_1", "resp_2").server_for(path, body) == server


def test_prompts_are_searched_only_where_files_are_known() -> None:
    objects, body = knowing("resp_1"), b'{"file_id": "file-1"}'
    objects.add("file-1", "b")
    assert objects.server_for("/v1/chat/completions", body) is None
    objects.read_answer(b'{"id": "file-1", "object": "file"}', "b", is_answer=False)
    assert objects.server_for("/v1/chat/completions", body) == "b"


def test_ids_are_read_from_answers_and_events() -> None:
    objects = StoredObjects()
    objects.read_answer(
        b'event: response.created\ndata: {"type":"response.created",'
        b'"response":{"id":"resp_9"}}\n\n',
        "a",
        is_answer=True,
    )
    objects.read_answer(b"no id", "a", is_answer=True)
    assert len(objects) == 1
    assert objects.server_for("/v1/responses/resp_9", b"") == "a"


def test_the_least_recently_used_are_forgotten() -> None:
    objects = knowing("first", "second")
    objects.server_for("/v1/responses/first", b"")
    for number in range(MAX_IDS - 1):
        objects.add(f"resp_{number}", "b")
    assert len(objects) == MAX_IDS
    assert objects.server_for("/v1/responses/first", b"") == "a"
    assert objects.server_for("/v1/responses/second", b"") is None
