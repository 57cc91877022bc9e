"""Templates: the constant beginnings of prompts, recognised by hashes.

A prompt is looked at as bytes of the request's body, from the first key that holds text on: nothing
is decoded, so that both processes can do it for each call.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Iterator
from zlib import crc32

import msgspec

#: Bytes of a prompt that are looked at.
MAX_PREFIX = 16_384
#: Bytes of a body in which the keys are searched.
_MAX_SEARCHED = 65_536
_FIRST_KEY = re.compile(rb'"(?:messages|prompt|input|system|instructions)":')
#: Bytes behind the first key in which a first message shows that it is the system's.
_FIRST_ROLE = 64
#: Lengths of the beginnings by which templates are found; that of a template is the longest which
#: is not longer than itself.
_STEPS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Different lengths of templates behind one beginning, each of which costs every prompt a hash.
_MAX_LENGTHS = 32


def prompt_of(body: bytes) -> bytes:
    """The beginning of what a request's body says, as bytes of JSON; empty where there is none.

    Begins with instructions that stand apart from the messages, also where they come later.
    """
    match = _FIRST_KEY.search(body, 0, _MAX_SEARCHED)
    if match is None:
        return b""
    at, end = match.span()
    if (
        match[0] in (b'"messages":', b'"input":')
        and b'"system"' not in body[end : end + _FIRST_ROLE]
    ):
        for key in (b'"system":', b'"instructions":'):
            later = body.find(key, end, end + _MAX_SEARCHED)
            if later >= 0:
                at = later
                break
    return body[at : at + MAX_PREFIX]


class Template(msgspec.Struct, frozen=True, array_like=True):
    """A constant beginning of prompts; its text is not kept.

    Attributes:
        key: 16 hexadecimal digits, a hash of the text.
        length: bytes.
        hash: of the text, a CRC.
        head: the same of its beginning of the longest of the fixed lengths.
    """

    key: str
    length: int
    hash: int
    head: int


def step_of(length: int) -> int:
    """The longest of the fixed lengths of beginnings that is not above `length`."""
    return max(step for step in _STEPS if step <= length)


class _Bucket:
    """Templates of one beginning: their lengths, ascending, and they by length and hash."""

    __slots__ = ("lengths", "templates")

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.templates: dict[tuple[int, int], Template] = {}


class TemplateTable:
    """Finds the templates with which a prompt begins, in microseconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._templates: dict[str, Template] = {}

    def __len__(self) -> int:
        return len(self._templates)

    def __iter__(self) -> Iterator[Template]:
        return iter(self._templates.values())

    def __contains__(self, key: str) -> bool:
        return key in self._templates

    def add(self, template: Template) -> bool:
        """Take a template; False where too many begin alike."""
        if template.key in self._templates:
            return True
        name = step_of(template.length), template.head
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket()
        if template.length not in bucket.lengths:
            if len(bucket.lengths) >= _MAX_LENGTHS:
                return False
            insort(bucket.lengths, template.length)
        bucket.templates[template.length, template.hash] = template
        self._templates[template.key] = template
        return True

    def remove(self, key: str) -> None:
        """Forget a template; without effect for one that is not known."""
        template = self._templates.pop(key, None)
        if template is None:
            return
        name = step_of(template.length), template.head
        bucket = self._buckets[name]
        bucket.templates.pop((template.length, template.hash), None)
        if all(length != template.length for length, _ in bucket.templates):
            bucket.lengths.remove(template.length)
        if not bucket.templates:
            del self._buckets[name]

    def find(self, prompt: bytes) -> list[Template]:
        """The templates with which a prompt begins, shortest first."""
        found: list[Template] = []
        view, size, head, at = memoryview(prompt), len(prompt), 0, 0
        for step in _STEPS:
            if step > size:
                break
            head, at = crc32(view[at:step], head), step
            bucket = self._buckets.get((step, head))
            if bucket is None:
                continue
            hashed, reached = head, step
            for length in bucket.lengths:
                if length > size:
                    break
                hashed, reached = crc32(view[reached:length], hashed), length
                template = bucket.templates.get((length, hashed))
                if template is not None:
                    found.append(template)
        return found
