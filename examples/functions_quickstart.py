"""A task, a story, a review of it: three calls that are submitted at once.

parrot-gateway serve                      # in another terminal
python examples/functions_quickstart.py
"""

from __future__ import annotations

from parrot_functions import Input, Output, Session, Text, semantic_function


@semantic_function
def imagine(child: str, task: Output = Output(max_tokens=24, temperature=0, stop="\n")) -> None:
    """One day, {{child}} wanted to{{task}}"""


@semantic_function
def tell(task: Input, story: Output = Output(max_tokens=80, seed=7, transform="strip")) -> None:
    """Once upon a time there was a child who wanted to{{task}}. It was a sunny day.{{story}}"""


@semantic_function
def review(
    story: Input,
    praise: Output = Output(max_tokens=24, seed=7, transform="strip"),
    wish: Output = Output(max_tokens=24, seed=7, transform="strip"),
) -> None:
    """{{story}}

    "I like this story," said Mom, "because{{praise}}"

    "But I wish," said Dad, "that{{wish}}"
    """


def main(base_url: str | None = None) -> dict[str, str]:
    """Submit the chain, then read it; the texts by name."""
    with Session(base_url, model="parrot-demo"):
        task = imagine("Lily").task
        story = tell(task).story
        praise, wish = review(story)
        # Nothing has been waited for: the gateway runs each call when its inputs are there.
        texts: dict[str, Text] = {"task": task, "story": story, "praise": praise, "wish": wish}
        return {name: text.get(timeout=120) for name, text in texts.items()}


if __name__ == "__main__":
    for name, text in main().items():
        print(f"{name.upper()}\n{text.strip()}\n")
