"""Varied prose, code and boilerplate from a seed: what models answer and documents say.

Prose walks from word to word as the bundled book does, with numbers and names mixed in: two texts
share phrases of a few words, as texts of one language do, and nothing longer but boilerplate.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache
from itertools import pairwise

from parrot_bench.apps import book

OPENINGS = (
    "Sure! Here is what I have found so far, step by step, based on the information you provided:",
    "Thank you for your patience. I have looked into this for you and here are the details:",
    "Certainly! Below is a concise summary of the text that you have given me:",
    "I apologize for the confusion. Let me correct my previous answer and go through it again:",
    "Great question! To answer it, let us first look at the most important points in the text:",
    "Based on the context provided above, the following conclusions can be drawn:",
)
CLOSINGS = (
    "If you have any further questions or need anything else, please let me know. Have a nice day",
    "Please confirm (yes/no) whether you would like me to proceed with the changes listed above.",
    "Let me know if you would like me to expand on any of these points or to change the format.",
    "Is there anything else that I can help you with today? I am always happy to assist you.",
    "Note that this answer is based solely on the provided context and may not be exhaustive.",
)
HEADINGS = (
    "## Summary of findings",
    "### Recommended next steps\n",
    "**Key takeaways:**",
    "Final answer (with a short explanation of the reasoning that leads to it):",
)
_SYLLABLES = ("ka", "lo", "mi", "ren", "tas", "vo", "zu", "bel", "dor", "fi", "gan", "hu", "jo",
              "quen", "sa", "tri", "ul", "vex", "wy", "nor")  # fmt: skip
_VERBS = ("load", "parse", "merge", "render", "check", "fetch", "score", "index", "trim", "plan")


class Text:
    """A source of texts, all drawn from one seed.

    Args:
        common: share of answers with an opening, a closing or a heading that all sources share.
    """

    def __init__(self, seed: str, common: float = 0.5) -> None:
        self.draw = random.Random(seed)
        self._common = common

    def characters(self) -> int:
        """A length as answers have it: 20 to 4,000, half below 350."""
        return min(4000, max(20, int(self.draw.lognormvariate(5.86, 0.95))))

    def sentence(self) -> str:
        words, follow = [self.draw.choice(_starts())], _follow()
        for _ in range(self.draw.randint(6, 22)):
            chance = self.draw.random()
            if chance < 0.04:
                words.append(str(self.draw.randint(10, 99_999)))
            elif chance < 0.16:
                words.append(self.name())
            words.append(self.draw.choice(follow[words[-1].lower()] or _starts()))
        return f"{' '.join(words)[:1].upper()}{' '.join(words)[1:]}."

    def prose(self, characters: int | None = None) -> str:
        """Paragraphs of about that many characters, without boilerplate."""
        wanted = characters or self.characters()
        found = ""
        while len(found) < wanted:
            found += self.sentence() + ("\n\n" if self.draw.random() < 0.15 else " ")
        return found.strip()

    def answer(self, characters: int | None = None) -> str:
        """A model's answer: prose, sometimes a list, with boilerplate around it."""
        text = self.prose(characters)
        if self.draw.random() < 0.25:
            text = "\n".join(f"- {line}" for line in text.replace("\n\n", " ").split(". "))
        for pool, before in ((OPENINGS, True), (HEADINGS, True), (CLOSINGS, False)):
            if self.draw.random() < self._common / 2:
                phrase = self.draw.choice(pool)
                text = f"{phrase}\n\n{text}" if before else f"{text}\n\n{phrase}"
        return text

    def name(self) -> str:
        return "".join(self.draw.choice(_SYLLABLES) for _ in "abc")

    def code(self, functions: int = 4) -> str:
        """Functions in Python, with names and numbers of their own."""
        lines = ["from __future__ import annotations\n"]
        for _ in range(functions):
            verb, noun, item = self.draw.choice(_VERBS), self.name(), self.name()
            lines += [
                f"def {verb}_{noun}({item}s, limit={self.draw.randint(2, 9999)}):",
                f'    """{self.sentence()}"""',
                f"    found_{noun} = []",
                f"    for {item} in {item}s:",
                f"        if {item}.{self.name()} > {self.draw.randint(2, 999)}:",
                f"            found_{noun}.append({item}.{self.draw.choice(_VERBS)}())",
                f"    return found_{noun}[:limit]\n",
            ]
        return "\n".join(lines)

    def identifier(self, prefix: str = "call") -> str:
        """An id as servers mint them."""
        return f"{prefix}_{self.draw.getrandbits(96):024x}"

    def reworded(self, text: str) -> str:
        """The same said otherwise: other words in another order, no three in a row kept."""
        words = text.split()
        kept = [word if number % 3 else self.name() for number, word in enumerate(words)]
        return " ".join(word for pair in zip(kept[1::2], kept[::2], strict=False) for word in pair)


@cache
def _follow() -> defaultdict[str, list[str]]:
    words = book.text().split()
    found: defaultdict[str, list[str]] = defaultdict(list)
    for word, following in pairwise(words):
        found[word.lower()].append(following)
    return found


@cache
def _starts() -> list[str]:
    return [word for word in book.text().split() if word[0].isupper() and word.isalpha()]
