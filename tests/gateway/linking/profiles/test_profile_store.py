"""Profiles outlive a restart in a file without texts; a file that is none of theirs is left out."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from parrot_scheduler.lengths import FadingHistogram

from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.profiles import profile_store
from parrot_gateway.linking.profiles.forecast import Forecast, Forecasts
from parrot_gateway.linking.profiles.profile_store import ProfileStore
from parrot_gateway.linking.profiles.profiles import Profile
from parrot_gateway.linking.profiles.templates import template_of

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


def test_every_count_of_a_profile_outlives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    template = template_of(b'"messages":[{"role":"user","content":"Hi')
    profile = Profile(
        template, FadingHistogram({5: 3.0}), FadingHistogram({7: 2.0}), 9.0, 8.0, 7.0, 6.0, 5.0,
        {"other": (4.0, 3.0)},
    )  # fmt: skip
    store.tenant("ada").restore(profile)
    store.tenant("bob").restore(Profile(template))
    store.save(0.0, is_last=True)
    assert file.stat().st_mode & 0o777 == 0o600
    again = ProfileStore(10, 100, file)
    known = again.known("ada")
    assert known is not None
    (found,) = known.profiles()
    for field in fields(Profile):
        mine, its = getattr(profile, field.name), getattr(found, field.name)
        if isinstance(mine, FadingHistogram):
            assert (mine.bins, mine.weight) == (its.bins, its.weight)
        else:
            assert mine == its, field.name
    assert (len(again), again.known("cleo")) == (2, None)
    # A file that another user of the folder made too long is not read.
    with file.open("r+b") as long:
        long.truncate(256 * 1024 * 1024 + 1)
    assert len(ProfileStore(10, 100, file)) == 0


def test_changes_of_many_tenants_come_in_parts_and_the_idle_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_store, "_MAX_TOLD", 4)
    monkeypatch.setattr(profile_store, "_MAX_PROFILES", 7)
    store = ProfileStore(10, 100)
    for tenant in ("ada", "bob", "cleo"):
        for number in range(3):
            text = f'"messages":[{{"role":"user","content":"{tenant} {number}'
            store.tenant(tenant).restore(Profile(template_of(text.encode())))
    assert (len(store), store.has_changed) == (9, True)
    parts = [(each.tenant, len(each.changed), len(each.removed)) for each in store.changes()]
    assert parts == [("ada", 0, 3), ("bob", 2, 0), ("cleo", 2, 0)]
    parts = [(each.tenant, len(each.changed), len(each.removed)) for each in store.changes()]
    assert parts == [("bob", 1, 0), ("cleo", 1, 0)]
    assert (len(store), store.has_changed) == (6, False)
    assert store.size_bytes == sum(
        known.size_bytes for name in ("bob", "cleo") if (known := store.known(name))
    )


def test_the_file_is_written_once_a_minute(tmp_path: Path) -> None:
    file = tmp_path / "profiles"
    store = ProfileStore(10, 100, file)
    written = []
    for now in (1000.0, 1059.9, 1060.0, 1100.0, 1120.0):
        store.save(now)
        written.append(file.exists())
        file.unlink(missing_ok=True)
    assert written == [False, False, True, False, True]
