"""Templates: constant beginnings of prompts, recognised by hashes.

A prompt is the bytes of the request's body from the first key with text on. Nothing is decoded, so
both processes can do this for every call.
"""

from __future__ import annotations

import re
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from hashlib import sha1
from math import inf
from operator import itemgetter
from zlib import crc32

import msgspec

from parrot_gateway.linking.linker.links import LinkedSession

#: Maximum bytes of a prompt that are examined.
MAX_PREFIX = 16_384
#: Bytes of a body in which the keys are searched.
_MAX_SEARCHED = 65_536
_FIRST_KEY = re.compile(rb'"(?:messages|prompt|input|system|instructions)":')
#: Keys of separate instructions, by the key of the messages.
_APART = {b'"messages":': b'"system":', b'"input":': b'"instructions":'}
#: Bytes after the first key that show whether the first message is the system's.
_FIRST_ROLE = 64
#: Lengths of the beginnings that index templates; a template is indexed by the longest one within
#: it.
_STEPS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Maximum distinct template lengths behind one beginning; each costs every prompt a hash.
_MAX_LENGTHS = 32

#: Time after which a different session counts as different: unlinked calls of one session come
#: close together.
_APART_S = 1.0
#: Times that a beginning must be seen in different sessions before it is a template.
_MIN_OCCASIONS = 4
#: Minimum ways in which prompts continue after a template, or equal prompts that end there.
_MIN_CONTINUATIONS = 2
_MIN_EQUAL = 8
#: A continuation with at least this share of prompts is constant.
_CONSTANT = 0.9
#: Minimum score of a template: the square of the bytes it adds to the next shorter one, times its
#: share of that one's prompts. Few prompts share 30 bytes by accident, but many begin with "What
#: is". An existing template needs half.
_MIN_SCORE = 16.0
#: Minimum behind a template that is longer than a form, where text is mostly variable.
_MIN_SCORE_BEHIND = 200.0
_FORM = 80
#: A template that ends within a text has longer ones only if this share of its last prompts
#: continues in constant ways. Roles behind one preamble do; stock phrases in variable text do not.
_MIN_CONSTANT = 0.8
_CONSTANT_RATE = 1 / 16
#: A template's end where a text begins. A text with fewer bytes than `_MIN_TEXT` is cut off the
#: template.
_OPENINGS = (b'":"', b'": "')
_MIN_TEXT = 12
#: Bytes taken of a text that is new to the tree; each repetition doubles them.
_MIN_EDGE = 256
#: Prompts after which all counts are halved.
_MAX_COUNT = 8192.0


def prompt_of(body: bytes) -> bytes:
    """Return the start of a request's content as bytes of JSON; empty if there is none.

    Separate instructions come first, even if they follow the messages in the body.
    """
    match = _FIRST_KEY.search(body, 0, _MAX_SEARCHED)
    if match is None:
        return b""
    at, end = match.span()
    apart = _APART.get(match[0])
    if apart is not None and b'"system"' not in body[end : end + _FIRST_ROLE]:
        later = body.find(apart, end, end + _MAX_SEARCHED)
        if later >= 0:
            at = later
    return body[at : at + MAX_PREFIX]


class Template(msgspec.Struct, frozen=True, array_like=True):
    """A constant beginning of prompts, without its text.

    Attributes:
        key: 16 hexadecimal digits, a hash of the text.
        length: bytes.
        hash: CRC of the text.
        head: CRC of its beginning, cut to the longest of the fixed lengths.
    """

    key: str
    length: int
    hash: int
    head: int


def step_of(length: int) -> int:
    """Return the longest of the fixed lengths that is at most `length`."""
    return max(step for step in _STEPS if step <= length)


class _Bucket:
    """Templates with one beginning: their lengths, ascending, and the templates by length and
    hash.
    """

    __slots__ = ("lengths", "templates")

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.templates: dict[tuple[int, int], Template] = {}


class TemplateTable:
    """Finds the templates that a prompt begins with, in microseconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._templates: dict[str, Template] = {}
        #: The last prompt and its templates, because equal prompts come in a row.
        self._last: tuple[bytes, list[Template]] | None = None

    def __len__(self) -> int:
        return len(self._templates)

    def __iter__(self) -> Iterator[Template]:
        return iter(self._templates.values())

    def __contains__(self, key: str) -> bool:
        return key in self._templates

    def add(self, template: Template) -> bool:
        """Add a template; return false if too many begin alike, or another one has its hashes."""
        if template.key in self._templates:
            return True
        name = step_of(template.length), template.head
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket()
        if (template.length, template.hash) in bucket.templates:
            return False
        if template.length not in bucket.lengths:
            if len(bucket.lengths) >= _MAX_LENGTHS:
                return False
            insort(bucket.lengths, template.length)
        bucket.templates[template.length, template.hash] = template
        self._templates[template.key] = template
        self._last = None
        return True

    def remove(self, key: str) -> None:
        """Remove a template; an unknown one is ignored."""
        template = self._templates.pop(key, None)
        if template is None:
            return
        self._last = None
        name = step_of(template.length), template.head
        bucket = self._buckets[name]
        bucket.templates.pop((template.length, template.hash), None)
        if all(length != template.length for length, _ in bucket.templates):
            bucket.lengths.remove(template.length)
        if not bucket.templates:
            del self._buckets[name]

    def find(self, prompt: bytes) -> list[Template]:
        """Return the templates that a prompt begins with, shortest first."""
        last = self._last
        if last is not None and last[0] == prompt:
            return last[1]
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
        self._last = prompt, found
        return found


def template_of(prefix: bytes) -> Template:
    """Make the template whose text is `prefix`."""
    key = sha1(prefix, usedforsecurity=False).digest()[:8].hex()
    return Template(key, len(prefix), crc32(prefix), crc32(prefix[: step_of(len(prefix))]))


class _Node:
    """A beginning of one or more prompts, in a radix tree.

    Attributes:
        edge: the bytes that it adds to its parent's text.
        depth: length of its whole text.
        children: by their first byte.
        count: prompts with this beginning; halved at times.
        known: those whose continuation is known: a child, or an end here.
        ends: those that end here.
        most: the highest count of a child, or `ends`.
        occasions: times at which it was seen in a new session.
        last: time of the last one, and its session.
        constant: for a template, share of its last prompts that may have a longer one.
        touched: number of its last prompt.
    """

    __slots__ = ("children", "constant", "count", "depth", "edge", "ends", "known", "last",
                 "last_session", "most", "occasions", "template", "touched")  # fmt: skip

    def __init__(self, edge: bytes, depth: int) -> None:
        self.edge = edge
        self.depth = depth
        self.children: dict[int, _Node] = {}
        self.count = 0.0
        self.known = 0.0
        self.ends = 0.0
        self.most = 0.0
        self.occasions = 0
        self.constant = 1.0
        self.last = -inf
        self.last_session: LinkedSession | None = None
        self.touched = 0
        self.template: Template | None = None

    def see(self, session: LinkedSession, now: float, number: int) -> None:
        """Note that a prompt of a session begins with this node."""
        self.count += 1.0
        self.touched = number
        if now - self.last >= _APART_S:
            last = self.last_session
            if last is None or last.current is not session.current:
                self.occasions += 1
                self.last, self.last_session = now, session

    def fade(self) -> None:
        self.count /= 2
        self.known /= 2
        self.ends /= 2
        self.most /= 2

    def split(self, size: int) -> _Node:
        """Split off the first `size` bytes of the edge as a new parent node."""
        upper = _Node(self.edge[:size], self.depth - len(self.edge) + size)
        self.edge = self.edge[size:]
        upper.children[self.edge[0]] = self
        upper.count = upper.known = upper.most = self.count
        upper.occasions, upper.last = self.occasions, self.last
        upper.last_session, upper.touched = self.last_session, self.touched
        return upper

    def leads_on(self, child: _Node) -> bool:
        """Return true if `child` nearly always comes next."""
        return child.occasions >= _MIN_OCCASIONS and child.count >= _CONSTANT * self.known

    def is_open(self) -> bool:
        """Return true if prompts vary from here on, or equal prompts end here."""
        if self.known < _MIN_OCCASIONS:
            return False
        if self.ends >= _CONSTANT * self.known:
            return self.ends >= _MIN_EQUAL
        if self.template is None and len(self.children) + (self.ends > 0.0) < _MIN_CONTINUATIONS:
            return False
        if self.most < _CONSTANT * self.known:
            return True
        return not any(self.leads_on(child) for child in self.children.values())


class TemplateLearner:
    """Learns the templates of one tenant from a stream of prompts.

    A radix tree holds the beginnings of recent prompts. A template is a beginning after which
    prompts of several sessions diverge, if it adds many bytes to the next shorter template, or many
    prompts share it. Few prompts have 30 bytes in common by accident, but many begin with "What
    is". Prompts that share a beginning within one session (parts of a document, questions about one
    text) make no template.

    Args:
        max_nodes: maximum nodes of the tree; the least recently seen make room.
        max_bytes: maximum bytes of its texts.

    Attributes:
        table: the templates.
    """

    def __init__(self, max_nodes: int = 4096, max_bytes: int = 2_000_000) -> None:
        self.table = TemplateTable()
        self._max_nodes = max_nodes
        self._max_bytes = max_bytes
        self._root = _Node(b"", 0)
        #: Number of nodes that stand for each template, by key.
        self._owners: Counter[str] = Counter()
        self._nodes = 1
        self._bytes = 0
        self._prompts = 0

    def learn(self, prompt: bytes, session: LinkedSession, now: float) -> list[tuple[str, str]]:
        """Learn from the prompt of a call that begins a conversation.

        Args:
            prompt: result of `prompt_of`.
            session: session of the call, if known.
            now: seconds.

        Returns:
            Keys of removed templates, each with the key of the next shorter template, or an
            empty one.
        """
        self._prompts += 1
        removed = self._review(self._insert(prompt, session, now), prompt)
        if (
            self._nodes > self._max_nodes
            or self._bytes > self._max_bytes
            or self._root.count > _MAX_COUNT
        ):
            self._sweep()
        return removed

    @property
    def size_bytes(self) -> int:
        """Return the approximate bytes of the tree."""
        return self._bytes + 400 * self._nodes

    def _insert(self, prompt: bytes, session: LinkedSession, now: float) -> list[_Node]:
        """Insert a prompt; return its nodes from the root on."""
        node, at, size, number = self._root, 0, len(prompt), self._prompts
        path = [node]
        node.see(session, now, number)
        while at < size:
            first = prompt[at]
            child = node.children.get(first)
            is_new = child is None
            if child is None:
                child = self._new(prompt[at : at + max(_MIN_EDGE, at)], at)
                node.children[first] = child
            elif not prompt.startswith(child.edge, at):
                child = child.split(_common(child.edge, prompt, at))
                node.children[first] = child
                self._nodes += 1
            child.see(session, now, number)
            node.known += 1.0
            node.most = max(node.most, child.count)
            path.append(child)
            node, at = child, child.depth
            if is_new:
                break
        if at == size:
            node.known += 1.0
            node.ends += 1.0
            node.most = max(node.most, node.ends)
        return path

    def _new(self, edge: bytes, at: int) -> _Node:
        self._nodes += 1
        self._bytes += len(edge)
        return _Node(edge, at + len(edge))

    def _review(self, path: list[_Node], prompt: bytes) -> list[tuple[str, str]]:
        """Decide which nodes on a path are templates; return the removed ones."""
        removed: list[tuple[str, str]] = []
        above, length = path[0], 0
        least, in_text, goes_on = _MIN_SCORE, False, False
        for node in path[1:]:
            run = node.depth - length
            score = run * run * node.count / above.count
            is_candidate = (
                node.occasions >= _MIN_OCCASIONS
                and score >= (least if node.template is None else least / 2)
                and node.is_open()
            )
            goes_on = goes_on or is_candidate
            if is_candidate and (not in_text or above.constant >= _MIN_CONSTANT):
                template = self._promote(node, prompt)
                if template is not None:
                    above.constant += (1.0 - above.constant) * _CONSTANT_RATE
                    above, length = node, template.length
                    in_text = not prompt.endswith(_OPENINGS, 0, length)
                    least = _MIN_SCORE if length <= _FORM else _MIN_SCORE_BEHIND
                    goes_on = False
            elif node.template is not None:
                key = node.template.key
                node.template = None
                self._owners[key] -= 1
                if not self._owners[key]:
                    del self._owners[key]
                    self.table.remove(key)
                    removed.append((key, above.template.key if above.template else ""))
        above.constant += (goes_on - above.constant) * _CONSTANT_RATE
        return removed

    def _promote(self, node: _Node, prompt: bytes) -> Template | None:
        """Make a node a template if it is none, and return it; None if there is no room."""
        template = node.template
        if template is None:
            start, end = node.depth - _MIN_TEXT, node.depth
            for opening in _OPENINGS:
                at = prompt.rfind(opening, start, end)
                if at >= 0:
                    end = at + len(opening)
            template = template_of(prompt[:end])
        if not self.table.add(template):
            return None
        if node.template is None:
            node.template = template
            self._owners[template.key] += 1
        return template

    def _sweep(self) -> None:
        """Halve the counts; if the tree is too large, drop the least recently seen leaves."""
        leaves: list[tuple[int, _Node, int]] = []
        pending = [self._root]
        while pending:
            node = pending.pop()
            node.fade()
            for first, child in node.children.items():
                pending.append(child)
                if not child.children:
                    leaves.append((child.touched, node, first))
        leaves.sort(key=itemgetter(0))
        excess = self._nodes > self._max_nodes or self._bytes > self._max_bytes
        for _, parent, first in leaves[: len(leaves) // 2 + 1] if excess else ():
            self._bytes -= len(parent.children.pop(first).edge)
            self._nodes -= 1


def _common(edge: bytes, prompt: bytes, at: int) -> int:
    """Return the number of `edge`'s bytes that `prompt` has from `at` on; fewer than all of
    them.
    """
    low, high = 0, min(len(edge), len(prompt) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low
