"""`/v1/files` with the real client."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import ScriptedUpstream, document
from harness.waiting import until

from parrot_gateway.settings.model import BatchSettings, UpstreamSettings

LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest_asyncio.fixture
async def kept(engine: ScriptedRemoteEngine, tmp_path: Path) -> AsyncIterator[Service]:
    settings = BatchSettings(folder=tmp_path / "kept", max_file_bytes=3_000_000, max_files=5)
    async with serving(engine, batches=settings) as service:
        yield service


async def upload(service: Service, content: bytes, name: str = "in.jsonl", **more: Any) -> Any:
    async with service.client() as client:
        return await client.files.create(file=(name, content), purpose="batch", **more)


async def test_a_file_comes_back_as_it_was(kept: Service) -> None:
    content = bytes(range(256)) * 8_000
    file = await upload(kept, content, "näme.jsonl")
    assert (file.filename, file.bytes, file.purpose) == ("näme.jsonl", len(content), "batch")
    assert file.status == "processed"
    assert file.expires_at == file.created_at + 2_592_000
    async with kept.client() as client:
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.wait_for_processing(file.id)).id == file.id
        assert (await client.files.content(file.id)).read() == content
        deleted = await client.files.delete(file.id)
        assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await gone(file.id)
    folder = kept.gateway.batches.settings.data_folder
    assert list((folder / "files").iterdir()) == list((folder / "uploads").iterdir()) == []


async def test_lists_have_pages(kept: Service) -> None:
    ids = [(await upload(kept, b"%d" % n)).id for n in range(5)]
    async with kept.client() as client:
        assert [file.id async for file in await client.files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in await client.files.list(limit=3, order="asc")] == ids
        first = await client.files.list(limit=2)
        assert (first.has_more, first.first_id, first.last_id) == (True, ids[4], ids[3])
        assert not (await client.files.list(purpose="batch_output")).data
        for wrong in ({"limit": 0}, {"order": "up"}, {"after": "file-parrot-no"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.files.list(**wrong)  # type: ignore[arg-type]
            assert caught.value.param == next(iter(wrong))


async def test_the_end_of_a_life_can_be_given(kept: Service) -> None:
    file = await upload(kept, b"{}", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for wrong in ({"anchor": "created_at", "seconds": 5}, {"anchor": "now", "seconds": 3600}):
        with pytest.raises(openai.BadRequestError) as caught:
            await upload(kept, b"{}", expires_after=wrong)
        assert str(caught.value.param).startswith("expires_after.")


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "vision", "user_data", "evals"])
async def test_other_purposes_are_refused_by_name(kept: Service, purpose: Any) -> None:
    async with kept.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=b"x", purpose=purpose)
    assert (caught.value.param, purpose in caught.value.message) == ("purpose", True)


async def test_too_much_is_refused_and_leaves_nothing(kept: Service) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(kept, b"x" * 3_000_001)
    assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
    for _ in range(5):
        await upload(kept, b"x")
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(kept, b"x")
    assert (caught.value.status_code, caught.value.code) == (413, "storage_full")
    folder = kept.gateway.batches.settings.data_folder
    assert list((folder / "uploads").iterdir()) == []


async def test_a_folder_that_is_full_to_the_byte(
    engine: ScriptedRemoteEngine, tmp_path: Path
) -> None:
    settings = BatchSettings(folder=tmp_path, max_total_bytes=5)
    async with serving(engine, batches=settings) as service:
        await upload(service, b"x" * 5)
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(service, b"x")
    assert (caught.value.status_code, caught.value.code) == (413, "storage_full")


BOUNDARY = b"--x\r\n"
PURPOSE = BOUNDARY + b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = BOUNDARY + b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n'
NOTE = BOUNDARY + b'X: %s\r\nContent-Disposition: form-data; name="note"\r\n\r\n1\r\n'
END = b"--x--\r\n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (PURPOSE + FILE + END, 200),
        (FILE + PURPOSE + END, 200),
        (FILE + END, 400),
        (PURPOSE + END, 400),
        (PURPOSE + FILE, 400),
        (PURPOSE + FILE + FILE + END, 400),
        (PURPOSE * 40 + FILE + END, 400),
        (b"", 400),
        (b"{}", 400),
        (PURPOSE + BOUNDARY + b"X: " + b"y" * 100_000 + b"\r\n\r\n" + END, 400),
        # Heads that are short each, and long together.
        (PURPOSE + FILE + NOTE % b"y" * 25 + END, 200),
        (PURPOSE + FILE + NOTE % (b"y" * 3_000) * 25 + END, 400),
    ],
)
async def test_forms(kept: Service, body: bytes, status: int) -> None:
    reader, writer = await kept.connect()
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(60):
        assert int((await reader.readline()).split()[1]) == status
    writer.close()


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(kept: Service) -> None:
    _, writer = await kept.connect()
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    writer.write(f"{head}Content-Length: 9000000\r\n\r\n".encode() + PURPOSE + FILE)
    await writer.drain()
    writer.close()
    await upload(kept, b"x")
    await until(lambda: not kept.gate.running)
    folder = kept.gateway.batches.settings.data_folder
    assert list((folder / "uploads").iterdir()) == []


async def test_a_restart_keeps_files_and_removes_halves(
    engine: ScriptedRemoteEngine, tmp_path: Path
) -> None:
    settings = BatchSettings(folder=tmp_path)
    async with serving(engine, batches=settings) as service:
        file = await upload(service, b"kept")
    (tmp_path / "uploads" / "half").write_bytes(b"x")
    (tmp_path / "files" / "file-parrot-nobody").write_bytes(b"x")
    async with serving(engine, batches=settings) as service, service.client() as client:
        assert (await client.files.content(file.id)).read() == b"kept"
        assert [each.id async for each in await client.files.list()] == [file.id]
    assert {each.name for each in (tmp_path / "files").iterdir()} == {file.id, f"{file.id}.json"}
    assert list((tmp_path / "uploads").iterdir()) == []


async def test_a_folder_has_one_gateway(engine: ScriptedRemoteEngine, tmp_path: Path) -> None:
    settings = BatchSettings(folder=tmp_path)
    async with (
        serving(engine, batches=settings) as first,
        serving(ScriptedRemoteEngine(), batches=settings) as second,
    ):
        await upload(first, b"x")
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(second, b"x")
        assert (caught.value.status_code, caught.value.code) == (503, "storage_unavailable")
        assert str(tmp_path) not in caught.value.message


async def test_tenants_are_walls(kept: Service) -> None:
    file = await upload(kept, b"x")
    files = kept.gateway.batches.files
    assert files is not None
    assert files.newest_first("another") == []
    with pytest.raises(Exception, match="No such File"):
        files.find("another", file.id)


@pytest.mark.parametrize("mode", ["pass", "run"])
async def test_whose_a_file_is_beside_an_upstream(
    engine: ScriptedRemoteEngine, tmp_path: Path, mode: Any
) -> None:
    """Lines for a model of ours come here; those for an upstream's where the settings say so."""
    with ScriptedUpstream() as upstream:
        upstream._scripts[""] = [document({"id": "file-theirs", "object": "file"})]
        entry = UpstreamSettings(name="up", url=upstream.base_url, models=["theirs"])
        settings = BatchSettings(folder=tmp_path, upstream_batches=mode)
        async with serving(engine, batches=settings, upstreams=[entry]) as service:
            ours = await upload(service, json.dumps(LINE).encode())
            assert ours.id.startswith("file-parrot-")
            line = {**LINE, "body": {**LINE["body"], "model": "theirs"}}  # type: ignore[dict-item]
            file = await upload(service, json.dumps(line).encode())
            assert file.id.startswith("file-parrot-") == (mode == "run")
            async with service.client() as client:
                other = await client.files.create(file=b"x", purpose="assistants")
                assert other.id == "file-theirs"
                await client.files.delete("file-of-them")
                await client.files.delete(ours.id)
        seen = [(call.method, call.target) for call in upstream.received]
        posts = [("POST", "/v1/files")] * (2 if mode == "pass" else 1)
        assert seen == [*posts, ("DELETE", "/v1/files/file-of-them")]


async def test_compressed_forms_and_web_pages(kept: Service) -> None:
    form = gzip.compress(PURPOSE + FILE + END)
    common = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    )
    for header, body, status in (
        ("Content-Encoding: gzip", form, 200),
        ("Content-Encoding: br", form, 415),
        ("Origin: https://example.org", PURPOSE + FILE + END, 403),
    ):
        reader, writer = await kept.connect()
        writer.write(f"{common}{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(60):
            assert int((await reader.readline()).split()[1]) == status
        writer.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("disks can be mounted by root only")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_a_full_disk_is_told(engine: ScriptedRemoteEngine, small_disk: Path) -> None:
    async with serving(engine, batches=BatchSettings(folder=small_disk / "kept")) as service:
        with pytest.raises(openai.APIStatusError) as refused:
            await upload(service, b"x" * 1_000_000)
        assert (refused.value.status_code, refused.value.code) == (507, "disk_full")
        assert "batches.folder" in refused.value.message
        assert list((small_disk / "kept" / "uploads").iterdir()) == []
        # There is room again for what fits.
        file = await upload(service, json.dumps(LINE).encode())
        (small_disk / "filler").write_bytes(b"")
        with suppress(OSError), (small_disk / "filler").open("ab", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        async with service.client() as client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
        assert (refused.value.status_code, refused.value.code) == (507, "disk_full")
        assert service.gateway.batches.describe()["batches"] == 0
