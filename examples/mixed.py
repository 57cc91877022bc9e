"""Mixed: users who chat beside a map-reduce job, on one engine (`openai`, async).

    python examples/mixed.py [--compare]

With its graph, the job goes out in one round trip, and the gateway knows that its calls matter only
together: they are batched for throughput, and chats come first.
"""

from __future__ import annotations

import asyncio
import time
from statistics import fmean
from typing import Any

from comparison import Result, Setting, book, main
from openai import AsyncOpenAI


async def complete(
    client: AsyncOpenAI, setting: Setting, prompt: str, parrot: dict[str, Any] | None
) -> str:
    """One call; `parrot` is what the gateway is told of it, if anything."""
    answer = await client.chat.completions.create(
        model=setting.model,
        messages=[{"role": "user", "content": f"{setting.salt}\n{prompt}"}],
        max_tokens=16,
        seed=7,
        extra_body={"ignore_eos": True} | ({"parrot": parrot} if parrot else {}),
    )
    return answer.choices[0].message.content or ""


async def chat(setting: Setting, user: int, *, knows_graph: bool) -> tuple[str, float]:
    """One user's question: the answer, and how long it took."""
    address = setting.another_client()
    parrot = (
        {"session": f"{setting.session} {user}", "objective": "latency"} if knows_graph else None
    )
    async with AsyncOpenAI(base_url=address, api_key=setting.api_key) as client:
        # They come while the job runs.
        await asyncio.sleep(0.3 * (user + 1))
        began = time.perf_counter()
        answer = await complete(client, setting, f"User {user} asks for a tale.", parrot)
        return answer, time.perf_counter() - began


async def summarise(setting: Setting, *, knows_graph: bool) -> tuple[str, float]:
    """The job: the summary, and how long it took."""
    parts = book.chunks(3, 400) if setting.quick else book.chunks(6, 700)
    names = [f"summary_{number}" for number in range(len(parts))]
    prompts = [f"Summarise this part of a book:\n{part}\nThe summary:" for part in parts]
    last = "Make one summary of these:{}\nThe summary of all:"
    began = time.perf_counter()
    async with AsyncOpenAI(base_url=setting.base_url, api_key=setting.api_key) as client:
        if knows_graph:
            session: dict[str, Any] = {"session": setting.session, "objective": "throughput"}
            variables = "".join(f"\n- {{{{{name}}}}}" for name in names)
            calls = [
                complete(client, setting, prompt, {**session, "output": name, "defer": True})
                for name, prompt in zip(names, prompts, strict=True)
            ]
            reads = {**session, "inputs": {name: name for name in names}}
            calls.append(complete(client, setting, last.format(variables), reads))
            summary = (await asyncio.gather(*calls))[-1]
        else:
            calls = [complete(client, setting, prompt, None) for prompt in prompts]
            texts = "".join(f"\n- {text}" for text in await asyncio.gather(*calls))
            summary = await complete(client, setting, last.format(texts), None)
    return summary, time.perf_counter() - began


async def serve(setting: Setting, *, knows_graph: bool) -> Result:
    """The job and the chats side by side."""
    users = range(2 if setting.quick else 4)
    (summary, job_s), *chats = await asyncio.gather(
        summarise(setting, knows_graph=knows_graph),
        *(chat(setting, user, knows_graph=knows_graph) for user in users),
    )
    calls = len(chats) + 1 + (3 if setting.quick else 6)
    times = {"chat": fmean(seconds for _, seconds in chats), "job": job_s}
    return Result([summary, *(answer for answer, _ in chats)], calls=calls, times=times)


if __name__ == "__main__":
    main(
        __doc__,
        {
            "plain calls": lambda setting: asyncio.run(serve(setting, knows_graph=False)),
            "with its graph": lambda setting: asyncio.run(serve(setting, knows_graph=True)),
        },
    )
