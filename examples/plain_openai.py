"""Semantic variables with plain `openai`: references, and names in headers.

    python examples/plain_openai.py [--compare]

A hero and a place are invented, and a tale is told of both. Call by call, the client carries the
texts. A deferred call answers at once with a reference, which stands for the text in any later
prompt. With names in headers nothing has to come back: all three calls go out together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from comparison import Result, Setting, main
from openai import OpenAI

HERO = "Once upon a time there was a little"
PLACE = "They lived in a big"
TALE = "A little {hero}. They lived in a big {place}. One day"


class Writer:
    """Goes on with texts."""

    def __init__(self, setting: Setting) -> None:
        self.client = OpenAI(base_url=setting.base_url, api_key=setting.api_key)
        self.setting = setting

    def write(self, prompt: str, headers: dict[str, str] | None = None) -> str:
        """How a text goes on, or a reference to that."""
        answer = self.client.completions.create(
            model=self.setting.model,
            prompt=f"{self.setting.salt}\n{prompt}",
            max_tokens=16,
            seed=7,
            extra_headers=headers,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text


def carried(setting: Setting) -> Result:
    """The client waits for the texts and puts them in."""
    writer = Writer(setting)
    hero = writer.write(HERO)
    place = writer.write(PLACE)
    return Result([writer.write(TALE.format(hero=hero, place=place))], calls=3)


def references(setting: Setting) -> Result:
    """The same program, with a header: what comes back and goes in are references."""
    writer = Writer(setting)
    defer = {"X-Parrot-Session": setting.session, "X-Parrot-Defer": "true"}
    hero = writer.write(HERO, defer)
    place = writer.write(PLACE, defer)
    return Result([writer.write(TALE.format(hero=hero, place=place))], calls=3)


def names(setting: Setting) -> Result:
    """All three at once: what the tale needs is named, and waited for in the gateway."""
    writer = Writer(setting)
    session = {"X-Parrot-Session": setting.session}
    defer = {**session, "X-Parrot-Defer": "true"}
    tale = TALE.format(hero="{{hero}}", place="{{place}}")
    with ThreadPoolExecutor(3) as threads:
        threads.submit(writer.write, HERO, {**defer, "X-Parrot-Output": "hero"})
        threads.submit(writer.write, PLACE, {**defer, "X-Parrot-Output": "place"})
        reads = {**session, "X-Parrot-Input": "hero=hero, place=place"}
        text = threads.submit(writer.write, tale, reads)
    return Result([text.result()], calls=3)


if __name__ == "__main__":
    main(__doc__, {"call by call": carried, "references": references, "names": names})
