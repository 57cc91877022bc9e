"""Adapters that a gateway has an engine load and unload while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from parrot_engine.engine.driver import EngineDriver
from parrot_engine.exceptions import AdapterError
from parrot_engine.link.wire import Adapters, LoadAdapter, UnloadAdapter
from parrot_engine.protocol import AdapterInfo


class AdapterCommands:
    """Carries out commands beside the engine's steps; one at a time is to be given.

    Args:
        driver: of the engine.
        folders: adapters are loaded from within these only; without any none is.
    """

    def __init__(self, driver: EngineDriver, folders: Sequence[str] = ()) -> None:
        self._driver = driver
        self._folders = [_resolved(folder) for folder in folders]

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new contexts may name."""
        return self._driver.adapters

    async def carry_out(self, command: LoadAdapter | UnloadAdapter) -> Adapters:
        """The answer to a command: all adapters there are now, and why it failed if it did."""
        problem = None
        try:
            if isinstance(command, LoadAdapter):
                self._check_path(command.path)
                await asyncio.to_thread(self._driver.load_adapter, command.name, command.path)
            else:
                await asyncio.to_thread(self._driver.remove_adapter, command.name)
        except AdapterError as error:
            problem = str(error)
        return Adapters(self.adapters, command.number, problem)

    def _check_path(self, path: str) -> None:
        resolved = _resolved(path)
        if not any(resolved.is_relative_to(folder) for folder in self._folders):
            raise AdapterError(
                f"{path} is in none of the folders from which adapters may be loaded "
                "(adapter_folders of the model)"
            )


def _resolved(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise AdapterError(f"{path[:200]!r} is no path: {error}") from error
