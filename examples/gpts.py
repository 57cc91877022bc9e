"""GPTs: applications with a system prompt each, and users with single questions (`openai`).

    python examples/gpts.py [--compare]

A question is one call, so there are no round trips to be saved. What the gateway does needs no word
from the client either: it sends a call to an engine that has its system prompt in the cache. That
shows with several engines (`parrot-gateway bench apps --app gpts --engines 4`); with one engine, a
session and an objective must not cost anything, which is what `--compare` looks at.
"""

from __future__ import annotations

import asyncio
from typing import Any

from comparison import Result, Setting, book, main
from openai import AsyncOpenAI

#: Characters of system prompts: a quarter of the tokens that the paper's applications have.
APPLICATIONS = {
    "productivity": 1859,
    "image-generation": 279,
    "programming": 423,
    "data-analysis": 507,
}


async def serve(setting: Setting, *, has_session: bool) -> Result:
    """Questions to all applications in turn, from as many users."""
    names = list(APPLICATIONS)[: 2 if setting.quick else 4]

    async def ask(number: int) -> str:
        name = names[number % len(names)]
        about = book.passage(APPLICATIONS[name], start=30_000 * names.index(name))
        body: dict[str, Any] = {"ignore_eos": True}
        if has_session:
            body["parrot"] = {"session": f"{setting.session} {number}", "objective": "latency"}
        address = setting.another_client()
        async with AsyncOpenAI(base_url=address, api_key=setting.api_key) as client:
            # One question after the other, as users of one application come.
            await asyncio.sleep(0.5 * (number // len(names)))
            answer = await client.chat.completions.create(
                model=setting.model,
                messages=[
                    {"role": "system", "content": f"{setting.salt}\nYou are {name}.\n{about}"},
                    {"role": "user", "content": f"Question {number}."},
                ],
                max_tokens=16,
                seed=number,
                extra_body=body,
            )
        return answer.choices[0].message.content or ""

    texts = await asyncio.gather(*map(ask, range(2 * len(names))))
    return Result(texts, calls=len(texts))


if __name__ == "__main__":
    main(
        __doc__,
        {
            "plain calls": lambda setting: asyncio.run(serve(setting, has_session=False)),
            "sessions": lambda setting: asyncio.run(serve(setting, has_session=True)),
        },
    )
