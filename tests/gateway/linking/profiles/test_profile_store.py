"""Profiles outlive a restart in a file without texts; a file that is none of theirs is left out."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.profiles.forecast import Forecast, Forecasts
from parrot_gateway.linking.profiles.profile_store import ProfileStore

SECRET = "The heron's name is Wilhelmina and she lives behind the mill, they say."


def body(number: int) -> bytes:
    message = {"role": "user", "content": f"{SECRET} Question {number * 7919 % 1000}, go on."}
    return msgspec.json.encode({"messages": [message]})


def teach(store: ProfileStore, tenant: str = "ada", calls: int = 30) -> None:
    known = store.tenant(tenant)
    for at in range(calls):
        call = f"call-{at}"
        known.request(call, body(at), [], LinkedSession(call, at, False), 2.0 * at)
        known.answer(call, 100.0, 2.0 * at + 1)


def told(store: ProfileStore) -> Forecasts:
    forecasts = Forecasts()
    while store.has_changed:
        for change in store.changes():
            forecasts.update(change.tenant, change.changed, change.removed)
    return forecasts


def forecast(store: ProfileStore, tenant: str = "ada") -> Forecast | None:
    return told(store).of(tenant, body(77))


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profiles"
    store = ProfileStore(10, 100, file)
    teach(store)
    store.save(0.0, is_last=True)
    again = forecast(ProfileStore(10, 100, file))
    assert again is not None
    assert again == forecast(store)
    assert [each.name for each in file.parent.iterdir()] == ["profiles"]


def test_the_file_holds_no_text(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    teach(store)
    store.save(0.0, is_last=True)
    data = file.read_bytes()
    assert not any(SECRET[at : at + 8].encode() in data for at in range(len(SECRET) - 8))


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    teach(store)
    store.save(1000.0)
    assert not file.exists()
    store.save(1100.0)
    assert file.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1garbage",
        b'{"format": "something else"}',
        msgspec.msgpack.encode({"format": "another", "version": 1, "tenants": []}),
        msgspec.msgpack.encode(
            {"format": "parrot-gateway profiles", "version": 1, "tenants": [["a", [[1, 2]]]]}
        ),
    ],
)
def test_a_foreign_file_is_left_out_and_logged(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profiles"
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        store = ProfileStore(10, 100, file)
    assert len(store) == 0
    assert str(file) in caplog.text


def test_a_file_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    teach(store)
    store.save(0.0, is_last=True)
    data = file.read_bytes()
    for size in range(0, len(data), 7):
        file.write_bytes(data[:size])
        assert len(ProfileStore(10, 100, file)) == 0


def test_a_folder_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store = ProfileStore(10, 100, tmp_path / "file" / "profiles")
    teach(store)
    with caplog.at_level(logging.WARNING):
        store.save(0.0, is_last=True)
    assert "cannot be written" in caplog.text


def test_tenants_share_nothing_and_the_quiet_one_makes_room() -> None:
    store = ProfileStore(2, 100)
    forecasts = Forecasts()
    for tenant in ("ada", "bob", "cleo"):
        teach(store, tenant)
        for change in store.changes():
            forecasts.update(change.tenant, change.changed, change.removed)
    assert forecasts.of("ada", body(1)) is None
    assert forecasts.of("bob", body(1)) is not None
    assert forecasts.of("cleo", body(1)) is not None
    assert forecasts.of("dora", body(1)) is None
