"""An engine process without a model: what the supervisor starts in tests.

Behaviour is chosen by the first argument: `serve` joins; `crash N` ends at once with status N;
`refuse TEXT` ends as a worker does that another try would not help, saying TEXT;
`deaf` neither joins nor listens to SIGTERM; `flaky PATH` crashes until PATH exists, which it makes;
`tell PATH` writes its environment there and joins.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

from parrot_engine.engine.driver import EngineDriver
from parrot_engine.link.client import EngineLink
from parrot_engine.protocol import EngineInfo
from parrot_engine.text import TextAssets

# As a program of its own it does not find the other helpers.
sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.scripted_engine import ScriptedEngine

#: A tokenizer that knows nothing, but is one.
EMPTY_TOKENIZER = (
    '{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{},"merges":[]}}'
)


def scripted_info(model: str) -> EngineInfo:
    return EngineInfo(
        model, "scripted", "Scripted", "cpu", "none", 100_000, 256, [], max_batch_size=1024
    )


async def serve(arguments: argparse.Namespace) -> None:
    driver = EngineDriver(ScriptedEngine(info=scripted_info(arguments.model)))
    link = EngineLink(
        driver,
        TextAssets(EMPTY_TOKENIZER),
        url=arguments.join,
        join_key=os.environ["PARROT_JOIN_KEY"],
        name=arguments.engine_name,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, link.stop)
    driver.start()
    await link.run()
    await asyncio.to_thread(driver.close)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("argument", nargs="?")
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--join")
    parser.add_argument("--engine-name")
    arguments = parser.parse_args()
    print("first line", "last line", sep="\n", file=sys.stderr, flush=True)
    if arguments.behaviour == "crash":
        return int(arguments.argument)
    if arguments.behaviour == "refuse":
        print(f"error: {arguments.argument}", file=sys.stderr, flush=True)
        return 78
    if arguments.behaviour == "tell":
        Path(arguments.argument).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    if arguments.behaviour == "flaky":
        marker = Path(arguments.argument)
        if not marker.exists():
            marker.touch()
            return 1
    if arguments.behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    asyncio.run(serve(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
