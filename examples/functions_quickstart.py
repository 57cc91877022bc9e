"""A task, a tale about it, and a review of the tale: four calls that are submitted at once.

Run it beside a gateway on the demo model (`parrot-gateway serve`):

    python examples/functions_quickstart.py
"""

from __future__ import annotations

from parrot_functions import Input, Output, Session, Text, UnreachableError, semantic_function


@semantic_function
def imagine(hero: str, task: Output = Output(max_tokens=12, seed=2, stop=[".", ",", ";"])) -> None:
    """There was once {{hero}}, and the king said that he had to{{task}}"""


@semantic_function
def tell(hero: Input, task: Input, story: Output = Output(max_tokens=80, seed=7)) -> None:
    """There was once {{hero}}, and the king said that he had to{{task}}. So he{{story}}"""


@semantic_function
def review(
    story: Input,
    praise: Output = Output(max_tokens=24, seed=7, stop='"'),
    wish: Output = Output(max_tokens=24, seed=7, stop='"'),
) -> None:
    """So he{{story}}

    "I like this tale," said the queen, "because{{praise}}"

    "But I wish," said the king, "that{{wish}}"
    """


def main(base_url: str | None = None) -> dict[str, str]:
    """Submit the chain, then read it; the texts by name."""
    with Session(base_url, model="parrot-demo"):
        task = imagine("a poor tailor").task
        story = tell("a poor tailor", task).story
        praise, wish = review(story)
        # Nothing has been waited for: the gateway runs each call when its inputs are there.
        texts: dict[str, Text] = {"task": task, "story": story, "praise": praise, "wish": wish}
        return {name: text.get(timeout=120) for name, text in texts.items()}


if __name__ == "__main__":
    try:
        texts = main()
    except UnreachableError as error:
        raise SystemExit(str(error)) from None
    for name, text in texts.items():
        print(f"{name.upper()}\n{text.strip()}\n")
