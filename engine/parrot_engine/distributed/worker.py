"""The process of a rank other than 0 of a tensor-parallel engine.

`parrot_engine.distributed.worker_group` starts it. It loads its part of the model, then computes
the steps from rank 0 in order, until the socket or its standard input ends. Commands to read
adapters come through standard input. It samples nothing and decides nothing.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parrot_engine.distributed.step_message import AdapterChange, decode
from parrot_engine.runner.torch_import import import_torch
from parrot_engine.settings import BuiltinSettings

if TYPE_CHECKING:
    from parrot_engine.distributed.rank_adapters import WorkerAdapters

_log = logging.getLogger(__name__)

_EXIT_FAILED = 70
#: Maximum characters of a report, so that it is written at once.
_MAX_PROBLEM = 500


def main() -> None:
    """Serve one engine, then exit."""
    steps = socket.socket(fileno=int(sys.argv[1]))
    reports = int(sys.argv[2])
    # Ctrl-C reaches all processes of a terminal; rank 0 decides when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = json.loads(sys.stdin.buffer.readline() or b"null")
    if start is None:
        return
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), name="parent-watch", daemon=True).start()
    logging.basicConfig(
        level="INFO", format=f"%(levelname)s rank {start['rank']}: %(message)s", stream=sys.stderr
    )
    code = 0
    try:
        _follow(start, steps, commands, reports)
    except EOFError:
        _log.debug("rank 0 is gone")
    except Exception as error:
        _log.exception("this rank failed")
        _report(reports, error=f"{type(error).__name__}: {error}")
        code = _EXIT_FAILED
    # NOTE: not through the interpreter's exit, which waits for a GPU that may be waiting for
    # another one.
    logging.shutdown()
    os._exit(code)


def _follow(
    start: dict[str, Any],
    steps: socket.socket,
    commands: queue.SimpleQueue[dict[str, Any]],
    reports: int,
) -> None:
    import_torch()
    import torch

    from parrot_engine.distributed.collective import TorchCollective
    from parrot_engine.distributed.rank_adapters import WorkerAdapters
    from parrot_engine.models.sharding import Shard
    from parrot_engine.runner.loader import load_runner

    settings = BuiltinSettings(**{**start["settings"], "device": start["device"]})
    device = torch.device(start["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _report(reports, status="here")
    shard = Shard(start["rank"], start["size"])
    collective = TorchCollective(shard, Path(start["store"]), device)
    runner = load_runner(Path(start["folder"]), settings, collective=collective)
    adapters = WorkerAdapters(runner.adapters)
    threading.Thread(
        target=_read_adapters, args=(commands, adapters, reports), name="adapters", daemon=True
    ).start()
    _report(reports, status="ready")
    with steps.makefile("rb") as stream:

        def read(count: int) -> bytes:
            data = stream.read(count)
            if len(data) < count:
                raise EOFError
            return data

        try:
            while True:
                message = decode(read)
                if isinstance(message, AdapterChange):
                    adapters.apply(message)
                else:
                    runner.follow(message.batch, message.num_sampled)
        except EOFError:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    runner.forget_graphs()
    collective.leave()


def _read_adapters(
    commands: queue.SimpleQueue[dict[str, Any]], adapters: WorkerAdapters, reports: int
) -> None:
    """Read adapters beside the steps when rank 0 asks for them."""
    while True:
        command = commands.get()
        number = command["number"]
        if command["folder"] is None:
            adapters.forget(number)
            continue
        problem = adapters.read(number, command["folder"], command["id"])
        _report(reports, read=number, problem=problem[:_MAX_PROBLEM])


def _report(reports: int, **what: str | int) -> None:
    os.write(reports, json.dumps(what).encode() + b"\n")


def _listen(commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take commands from standard input; its end means that rank 0 has ended, so exit at once."""
    for line in sys.stdin.buffer:
        commands.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
