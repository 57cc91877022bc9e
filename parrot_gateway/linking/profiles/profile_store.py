"""Profiles of all tenants: bounded, sent to the gateway on change, kept in a file.

The file has hashes, counts and tenant names, but no text of prompts or answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from parrot_scheduler.lengths import MAX_BIN, FadingHistogram

from parrot_gateway.linking.profiles.forecast import ForecastsChanged
from parrot_gateway.linking.profiles.profiles import Profile, TenantProfiles
from parrot_gateway.linking.profiles.templates import MAX_PREFIX, Template
from parrot_gateway.linking.tenants import Tenants

logger = logging.getLogger(__name__)

#: Maximum templates per message, of all tenants; the rest follows.
_MAX_TOLD = 1000
#: Maximum templates of all tenants; those of the longest idle tenant make room.
_MAX_PROFILES = 50_000
#: Seconds between writes of the file.
_SAVE_EVERY_S = 60.0
#: A longer file was not written by us.
_MAX_FILE_BYTES = 256 * 1024 * 1024

_Count = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Bins = dict[Annotated[int, msgspec.Meta(ge=0, le=MAX_BIN)], _Count]


class _SavedProfile(msgspec.Struct, array_like=True):
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_PREFIX)]
    hash: int
    head: int
    lengths: _Bins
    gaps: _Bins
    calls: _Count
    returned: _Count
    in_fan_in: _Count
    fan_in: _Count
    siblings: _Count
    successors: dict[str, tuple[_Count, _Count]]


class _SavedTenant(msgspec.Struct, array_like=True):
    """Profiles of one tenant, least recently used first."""

    name: str
    profiles: list[_SavedProfile]


class _Saved(msgspec.Struct):
    """Content of the file."""

    format: Literal["parrot-gateway profiles"]
    version: Literal[1]
    tenants: list[_SavedTenant]


_decoder = msgspec.msgpack.Decoder(_Saved)
_encoder = msgspec.msgpack.Encoder()


class ProfileStore:
    """Learns the profiles of all tenants, each separately.

    Args:
        max_tenants: maximum number; the longest idle one makes room.
        max_templates: maximum per tenant.
        file: file that preserves them over a restart; None keeps nothing.
    """

    def __init__(self, max_tenants: int, max_templates: int, file: Path | None = None) -> None:
        self._file = file
        self._tenants = Tenants(
            lambda: TenantProfiles(max_templates), max_tenants, self._tenant_forgotten
        )
        #: Keys of forgotten tenants' templates that are not reported yet.
        self._forgotten: dict[str, list[str]] = {}
        self._saved_at: float | None = None
        if file is not None:
            self._load(file)

    def known(self, name: str) -> TenantProfiles | None:
        """Return the profiles of a tenant, or None."""
        return self._tenants.known(name)

    def tenant(self, name: str) -> TenantProfiles:
        """Return the profiles of a tenant, created on first use."""
        return self._tenants.use(name)

    def __len__(self) -> int:
        """Return the number of templates of all tenants."""
        return sum(len(each) for each in self._tenants)

    @property
    def size_bytes(self) -> int:
        """Return their approximate bytes."""
        return sum(each.size_bytes for each in self._tenants)

    @property
    def has_changed(self) -> bool:
        """Return true if there are changes."""
        return bool(self._forgotten) or any(each.has_changed for each in self._tenants)

    def changes(self) -> Iterator[ForecastsChanged]:
        """Yield the changes since the last call; a large change comes in parts."""
        while len(self._tenants) > 1 and len(self) > _MAX_PROFILES:
            self._tenants.forget_oldest()
        for name, keys in self._forgotten.items():
            yield ForecastsChanged(name, [], keys)
        self._forgotten = {}
        busy = {name: known for name, known in self._tenants.items() if known.has_changed}
        for name, known in busy.items():
            changed, removed = known.changes(max(1, _MAX_TOLD // len(busy)))
            yield ForecastsChanged(name, changed, removed)

    def save(self, now: float, *, is_last: bool = False) -> None:
        """Write the file if there is one and it is due.

        Args:
            now: seconds.
            is_last: true writes it regardless of the time.
        """
        if self._file is None:
            return
        if self._saved_at is None:
            self._saved_at = now
        if not is_last and now - self._saved_at < _SAVE_EVERY_S:
            return
        self._saved_at = now
        tenants = [
            _SavedTenant(name, [_saved(each) for each in known.profiles()])
            for name, known in self._tenants.items()
        ]
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}.tmp")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new.touch(mode=0o600)
            new.write_bytes(_encoder.encode(_Saved("parrot-gateway profiles", 1, tenants)))
            new.replace(self._file)
        except OSError as error:
            logger.warning("profiles cannot be written to %s: %s", self._file, error)
            with suppress(OSError):
                new.unlink(missing_ok=True)

    def _load(self, file: Path) -> None:
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it is longer than {_MAX_FILE_BYTES} bytes")
            saved = _decoder.decode(file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.DecodeError) as error:
            logger.warning("profiles in %s are not read: %s", file, error)
            return
        for tenant in saved.tenants:
            known = self.tenant(tenant.name)
            for profile in tenant.profiles:
                known.restore(_restored(profile))

    def _tenant_forgotten(self, name: str, known: TenantProfiles) -> None:
        self._forgotten[name] = [each.template.key for each in known.profiles()]


def _saved(profile: Profile) -> _SavedProfile:
    template = profile.template
    return _SavedProfile(
        template.key,
        template.length,
        template.hash,
        template.head,
        dict(profile.lengths.bins),
        dict(profile.gaps.bins),
        profile.calls,
        profile.returned,
        profile.in_fan_in,
        profile.fan_in,
        profile.siblings,
        profile.successors,
    )


def _restored(saved: _SavedProfile) -> Profile:
    return Profile(
        Template(saved.key, saved.length, saved.hash, saved.head),
        FadingHistogram(saved.lengths),
        FadingHistogram(saved.gaps),
        saved.calls,
        saved.returned,
        saved.in_fan_in,
        saved.fan_in,
        saved.siblings,
        saved.successors,
    )
