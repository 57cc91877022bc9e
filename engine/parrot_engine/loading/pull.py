"""`python -m parrot_engine.loading.pull MODEL`: downloads a hub repository for another program.

Writes one JSON object per line on standard output: first `{"total_bytes": …, "files": …}`, then
`{"done_bytes": …}` for progress, at the end `{"path": …}`, or `{"failure": …, "message": …}` and
exit status 1. Complete files are kept, even those of a process that was killed; its incomplete ones
are downloaded again. SIGTERM, or the end of standard input, ends it without leaving incomplete
files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parrot_engine.loading.hub import PATTERNS, ModelNotFoundError, hub_failures, is_hub_id

#: Time between two lines of progress.
INTERVAL_S = 0.2

#: An incomplete file that was not written for this long belongs to a dead process.
ORPHANED_S = 3600.0

#: Names of incomplete files that belong to one process, as in hub clients from 2.0 on; earlier
#: clients resume `<hash>.incomplete`.
_UNFINISHED = re.compile(r"\.[0-9a-f]{8}\.incomplete$")

#: Takes the fields of a line.
Report = Callable[..., None]


def pull(repository: str, max_bytes: int, report: Report) -> Path:
    """Download the servable files of a repository into the hub's cache; return the folder.

    Args:
        repository: `name` or `owner/name`.
        max_bytes: limit of the files' total size.
        report: called with `total_bytes` and `files`, then with `done_bytes`.

    Raises:
        ModelNotFoundError: the download failed; `failure` has the reason.
    """
    if not is_hub_id(repository):
        raise ModelNotFoundError(f"{repository} is not the name of a hub repository (OWNER/NAME).")
    with hub_failures(repository):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError

        patterns = list(PATTERNS)
        try:
            planned = snapshot_download(repository, allow_patterns=patterns, dry_run=True)
        except DryRunError:
            # The hub cannot be reached; the local files may be complete.
            return Path(snapshot_download(repository, allow_patterns=patterns))
        total = sum(file.file_size for file in planned)
        if not any(file.filename.endswith(".safetensors") for file in planned):
            raise ModelNotFoundError(
                f"The hub repository {repository} holds no *.safetensors, the only weights that "
                "are loaded.",
                "no_safetensors",
            )
        missing = sum(file.file_size for file in planned if file.will_download)
        _check_room(repository, total, missing, max_bytes)
        report(total_bytes=total, files=len(planned), done_bytes=total - missing)
        with _watch_bytes(_cache_folder(repository) / "blobs", total - missing, total, report):
            return Path(snapshot_download(repository, allow_patterns=patterns))


def _cache_folder(repository: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def _check_room(repository: str, total: int, missing: int, max_bytes: int) -> None:
    if total > max_bytes:
        raise ModelNotFoundError(
            f"The files of {repository} come to {total} bytes, more than the {max_bytes} that may "
            "be downloaded of one model.",
            "download_too_large",
        )
    folder = _cache_folder(repository)
    _remove_orphans(folder / "blobs")
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise ModelNotFoundError(
            f"{repository} needs {missing} bytes more, and {free} are free in "
            f"{folder.parent}. Make room, or set HF_HOME to a folder on another disk.",
            "disk_full",
        )


def _remove_orphans(blobs: Path) -> None:
    """Remove incomplete files of killed processes, which nobody resumes."""
    for file in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if _UNFINISHED.search(file.name) and time.time() - file.stat().st_mtime > ORPHANED_S:
                file.unlink()


def _leave() -> None:
    """End this process at once, and delete its incomplete files."""
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            file = descriptor.readlink()
            if _UNFINISHED.search(file.name):
                file.unlink()
    os._exit(1)


def _size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, which may come and go meanwhile."""
    size = 0
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


@contextmanager
def _watch_bytes(blobs: Path, done: int, total: int, report: Report) -> Generator[None]:
    """Report the bytes written while the block runs.

    NOTE: read from the disk, because the transfer (HTTP, Xet) is internal to the hub library.
    """
    begun = _size_of(blobs)
    ended = threading.Event()

    def watch() -> None:
        shown = done
        while not ended.wait(INTERVAL_S):
            now = max(shown, min(total, done + _size_of(blobs) - begun))
            if now > shown:
                shown = now
                report(done_bytes=now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    report(done_bytes=total)


def _end_with_parent() -> None:
    """Wait for the end of standard input, a pipe that ends with the parent, and exit."""
    while os.read(0, 4096):
        pass
    _leave()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="parrot_engine.loading.pull")
    parser.add_argument("model")
    parser.add_argument("--max-bytes", type=int, required=True)
    parsed = parser.parse_args(arguments)
    lock = threading.Lock()

    def report(**fields: Any) -> None:
        # Files are downloaded in several threads.
        with lock:
            print(json.dumps(fields), flush=True)

    signal.signal(signal.SIGTERM, lambda *_: _leave())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        path = pull(parsed.model, parsed.max_bytes, report)
    except ModelNotFoundError as error:
        report(failure=error.failure, message=str(error))
        return 1
    report(path=str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
