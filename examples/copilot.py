"""Copilot: several users chat behind one long system prompt, answers streamed (`openai`).

    python examples/copilot.py [--compare]

What makes it cheap needs no word from the client: the engine keeps the system prompt's KV once, for
all users. Plain calls send the whole history each turn; with a named context the gateway keeps it,
and a turn sends only its own message. A turn is one call: there are no round trips to be saved.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

from comparison import Result, Setting, book, main
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = ("Who is the Rabbit?", "Where did it go?", "What happened next?")


def chat(setting: Setting, user: int, *, has_context: bool) -> tuple[list[str], list[float]]:
    """One user's chat: answers, and the seconds until each one's first text."""
    system: ChatCompletionMessageParam = {
        "role": "system",
        "content": f"{setting.salt}\nAnswer questions about this book.\n{book.passage(2000)}",
    }
    messages = [system]
    answers, waits = [], []
    with OpenAI(base_url=setting.another_client(), api_key=setting.api_key) as client:
        for question in QUESTIONS[: 2 if setting.quick else 3]:
            messages.append({"role": "user", "content": f"User {user} asks: {question}"})
            headers = {}
            if has_context:
                headers = {
                    "X-Parrot-Session": f"{setting.session} {user}",
                    "X-Parrot-Context": "chat",
                    "X-Parrot-Objective": "latency",
                }
            began = time.perf_counter()
            stream = client.chat.completions.create(
                model=setting.model,
                messages=messages,
                max_tokens=16,
                seed=user,
                stream=True,
                extra_headers=headers,
                extra_body={"ignore_eos": True},
            )
            answer, first = "", 0.0
            for chunk in stream:
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    first = first or time.perf_counter() - began
                    answer += text
            answers.append(answer)
            waits.append(first)
            # A context has the history: the next turn is its message alone.
            messages = [] if has_context else [*messages, {"role": "assistant", "content": answer}]
    return answers, waits


def serve(setting: Setting, *, has_context: bool) -> Result:
    """All users side by side."""
    users = range(2 if setting.quick else 4)
    with ThreadPoolExecutor(len(users)) as threads:
        chats = list(threads.map(lambda user: chat(setting, user, has_context=has_context), users))
    texts = [answer for answers, _ in chats for answer in answers]
    first = fmean(wait for _, waits in chats for wait in waits)
    return Result(texts, calls=len(texts), times={"first text": first})


if __name__ == "__main__":
    main(
        __doc__,
        {
            "plain calls": lambda setting: serve(setting, has_context=False),
            "named contexts": lambda setting: serve(setting, has_context=True),
        },
    )
