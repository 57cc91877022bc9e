"""Dresses passages of the books up as conversations, so that the model learns the chat format.

The answers are the books' own paragraphs; only the requests are made up. What this teaches is to
go on with a text, to take up a word, and to close a turn; it does not teach to follow
instructions or to answer questions.
"""

from __future__ import annotations

import random
import re
from collections import Counter

from parrot_bench.demo_model.data import Book
from parrot_bench.demo_model.tokenizer import render_turn

_SYSTEM = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell stories in the manner of old books.",
    "You are a novelist. Write in clear English prose.",
    "Answer with a story.",
    "You are a friendly narrator of fairy tales and adventures.",
)
_CONTINUE = (
    "Continue: {text}",
    "Continue:\n\n{text}",
    "Continue this story:\n\n{text}",
    "Please continue the following text.\n\n{text}",
    "What happens next?\n\n{text}",
    "{text}\n\nWhat happens next?",
    "{text}\n\nContinue.",
    "Go on from here: {text}",
    "{text}",
)
_TOPIC = (
    "Write about {topic}.",
    "Write a story about {topic}.",
    "Tell me a story about {topic}.",
    "Tell me about {topic}.",
    "Write a passage about {topic}.",
    "Write a scene with {topic}.",
    "A story with {topic}, please.",
    "Can you tell a tale of {topic}?",
    "{topic}",
)
_OPEN = (
    "Tell me a story.",
    "Write a story.",
    "Write something.",
    "Hello!",
    "Read to me.",
    "A story, please.",
)
_STYLE = (
    "Write like {author}.",
    "Write a passage in the manner of {author}.",
    "Tell me a story in the style of {title}.",
    "Write a scene that could stand in {title} by {author}.",
)
_OPENING = (
    "Write a story that begins: {text}",
    'Begin with this sentence: "{text}"',
    "Start with: {text}",
)
_MORE = (
    "Go on.",
    "Continue.",
    "And then?",
    "What happened next?",
    "Tell me more.",
    "More, please.",
)
_SHORT, _LONG = " Keep it short.", " Make it long."

_WORD = re.compile(r"[A-Za-z]{4,}")
_SENTENCE = re.compile(r".+?[.!?][\"']?(?=\s|$)", re.DOTALL)


class ChatWriter:
    """Writes conversations from `books`; the same `rng` state writes the same ones."""

    def __init__(self, books: list[Book]) -> None:
        self._books = books
        self._seen: Counter[str] = Counter()
        for book in books:
            for paragraph in book.paragraphs:
                self._seen.update(set(_WORD.findall(paragraph)))
        self._common = max(20, sum(len(book.paragraphs) for book in books) // 150)

    def pass_over(self, rng: random.Random) -> list[str]:
        """One conversation after another, walking once through every book, in shuffled order."""
        examples = []
        for book in self._books:
            index = rng.randrange(6)
            while index < len(book.paragraphs):
                if _is_heading(book.paragraphs[index]):
                    index += 1
                    continue
                example, index = self._conversation(rng, book, index)
                examples.append(example)
                index += rng.randrange(4)
        rng.shuffle(examples)
        return examples

    def _conversation(self, rng: random.Random, book: Book, index: int) -> tuple[str, int]:
        size = rng.random()
        words = min(200, max(20, int(rng.lognormvariate(4.1, 0.55))))
        answer, after = _take(book, index, words)
        request, answer = self._request(rng, book, index, answer)
        if size < 0.1 and words < 40:
            request += _SHORT
        elif size < 0.2 and words > 100:
            request += _LONG
        turns = []
        if rng.random() < 0.4:
            turns.append(render_turn("system", rng.choice(_SYSTEM)))
        turns += [render_turn("user", request), render_turn("assistant", answer)]
        while after < len(book.paragraphs) and rng.random() < 0.25:
            answer, after = _take(book, after, words)
            role, text = ("user", rng.choice(_MORE))
            if rng.random() < 0.1 and after < len(book.paragraphs):
                role, text = ("tool", self._topic(rng, answer))
            turns += [render_turn(role, text), render_turn("assistant", answer)]
        return "".join(turns), after

    def _request(self, rng: random.Random, book: Book, index: int, answer: str) -> tuple[str, str]:
        """A message of the user, and its answer."""
        kind = rng.random()
        if answer.startswith('"'):
            kind *= 0.7  # speech goes on with a scene more often than it opens one
        if kind < 0.2 and index > 0:
            words = rng.choice((40, 80, 150, 300, 700))
            text = _take_before(book, index, words)
            return rng.choice(_CONTINUE).format(text=text), answer
        if kind < 0.4:
            # Cut inside a sentence: the answer goes on with its next word.
            cuts = [match.start() for match in re.finditer(" ", answer[: len(answer) * 2 // 3])]
            if cuts:
                cut = cuts[min(len(cuts) - 1, int(rng.expovariate(1 / 12)) + 2)]
                return rng.choice(_CONTINUE).format(text=answer[:cut]), answer[cut:].strip()
        if kind < 0.48:
            sentence = _SENTENCE.match(answer)
            if sentence and len(sentence[0]) < 200:
                return rng.choice(_OPENING).format(text=sentence[0]), answer
        if kind < 0.55 and book.author:
            request = rng.choice(_STYLE).format(author=book.author, title=book.title)
            return request, answer
        if kind < 0.6:
            return rng.choice(_OPEN), answer
        return rng.choice(_TOPIC).format(topic=self._topic(rng, answer)), answer

    def _topic(self, rng: random.Random, text: str) -> str:
        """One to four telling words of `text`."""
        counts = Counter(_WORD.findall(text))
        words = [w for w in counts if 3 <= self._seen[w] <= self._common and not w.isupper()]
        if not words:
            return "a day long ago"
        weights = [counts[word] ** 3 for word in words]
        picked = list(dict.fromkeys(rng.choices(words, weights, k=rng.choice((1, 2, 3, 4)))))
        if len(picked) == 1:
            article = "an" if picked[0][0] in "aeiou" else "a"
            return f"{article} {picked[0]}" if f" {article} {picked[0]}" in text else picked[0]
        return ", ".join(picked[:-1]) + " and " + picked[-1]


def _is_heading(paragraph: str) -> bool:
    return len(paragraph) < 80 and (paragraph.isupper() or paragraph[-1] not in ".!?\"'\u2014:;,")


def _take(book: Book, index: int, words: int) -> tuple[str, int]:
    """Paragraphs from `index` on until there are about `words` words; and the index after them."""
    taken: list[str] = []
    count = 0
    while index < len(book.paragraphs) and count < words:
        taken.append(book.paragraphs[index])
        count += len(book.paragraphs[index].split())
        index += 1
    return "\n\n".join(taken), index


def _take_before(book: Book, index: int, words: int) -> str:
    start, count = index, 0
    while start > 0 and count < words:
        start -= 1
        count += len(book.paragraphs[start].split())
    return "\n\n".join(book.paragraphs[start:index])
