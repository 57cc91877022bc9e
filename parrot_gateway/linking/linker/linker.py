"""Links calls to the earlier calls whose answers they continue, or whose text they use.

Pure and synchronous: requests and answers in, links out. Each tenant has its own `TenantLinker`;
they share nothing. See docs/linking.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.linker.call_store import CallStore, StoredCall, kept_keys
from parrot_gateway.linking.linker.candidates import Reader, new_text
from parrot_gateway.linking.linker.conversation import Answer, Conversation, Message
from parrot_gateway.linking.linker.fingerprints import Hashes, PassageCounts, normalise
from parrot_gateway.linking.linker.fingerprints import passages as passages_of
from parrot_gateway.linking.linker.links import Link, LinkedSession, LinkKind
from parrot_gateway.linking.linker.parents import Parent, find_parent
from parrot_gateway.linking.linker.passages import Producer, find_producers
from parrot_gateway.linking.linker.prompt import Prompt
from parrot_gateway.linking.linker.prompt_ends import PromptEnds
from parrot_gateway.linking.tenants import LinkerLimits, Tenants


class LinkedCall(NamedTuple):
    """The links and the session of a call, found from its request.

    Attributes:
        merged: sessions that this call merged into another.
        is_flooded: true for one of many equal prompts without links.
    """

    session: LinkedSession
    links: list[Link]
    merged: list[LinkedSession]
    is_flooded: bool = False


#: Messages whose first occurrence is remembered.
_MAX_SEEN = 60_000
#: Memory of a call with one answer besides texts and tables, measured by tracemalloc.
_CALL_BYTES = 3500
#: An answer of at least this length, matched to this share, is a summary from which a conversation
#: may continue.
_LEAST_SUMMARY = 200
_MOST_OF_SUMMARY = 0.6
_NO_HASHES = np.zeros(0, np.uint32)


class _LastPrompt:
    """The last conversation's prompt, of any tenant, because the same one may come again."""

    def __init__(self, max_text: int) -> None:
        self._max_text = max_text
        self._last: tuple[Conversation, Prompt] | None = None

    def of(self, conversation: Conversation) -> Prompt:
        last = self._last
        if last is None or last[0] is not conversation:
            messages = _newest(conversation.messages, self._max_text)
            self._last = last = conversation, Prompt(messages)
        return last[1]


class TenantLinker:
    """Links the calls of one tenant.

    Args:
        limits: on memory and work.
        mint_session_id: makes ids for unnamed sessions.
        prompts: shared by all tenants.
    """

    def __init__(
        self, limits: LinkerLimits, mint_session_id: Callable[[], str], prompts: _LastPrompt
    ) -> None:
        self._limits = limits
        self._prompts = prompts
        self._mint_session_id = mint_session_id
        self._store = CallStore(limits.calls, limits.text, limits.fingerprints)
        self._ends = PromptEnds(limits.calls, limits.fingerprints // 4)
        self._counts = PassageCounts()
        self._explicit: dict[str, LinkedSession] = {}
        #: When each message was first seen in a prompt, by its text.
        self._seen: OrderedDict[int, float] = OrderedDict()

    def request(
        self,
        call_id: str,
        conversation: Conversation,
        now: float,
        session: str | None = None,
        peer: str = "",
    ) -> LinkedCall:
        """Link the request of a call that starts now.

        Args:
            call_id: unique within the tenant.
            now: seconds; never goes back.
            session: id of the session that its client named.
            peer: address of the connection, which distinguishes equal calls.
        """
        prompt = self._prompts.of(conversation)
        own = self._explicit_session(session, now) if session else None
        if not conversation.previous and self._store.is_flooded(prompt.states[-1]):
            # One of hundreds of equal prompts without links: nothing distinguishes it.
            return self._take(call_id, prompt, now, peer, own, None, [], None)
        parent = find_parent(self._store, self._ends, prompt, conversation.previous, peer, now)
        known = own or (parent.call.session if parent else None)
        reader = Reader(parent.call if parent else None, known, now, self._limits.horizon_s, peer)
        links: list[Link] = []
        if parent is not None:
            links += parent.links()
            parent.call.continuations += 1
            reader.found.add(parent.call.session.current)
        found, passages = self._passages(prompt, parent, reader)
        links += found
        if parent is None:
            links += self._goes_on_from_summary(prompt, found)
        return self._take(call_id, prompt, now, peer, own, parent, links, passages)

    def _goes_on_from_summary(self, prompt: Prompt, found: list[Link]) -> list[Link]:
        """Return the link to a conversation's call whose answer begins this prompt under the same
        system prompt: it continues from a summary.
        """
        for link in found if prompt.opening else ():
            call, evidence = self._store.by_id[link.source], link.evidence
            if call.parent is None or call.opening != prompt.opening or evidence is None:
                continue
            written = max(len(each.text) for each in call.outputs)
            shown = evidence.source_end - evidence.source_start
            if evidence.message <= 1 and shown >= max(_LEAST_SUMMARY, _MOST_OF_SUMMARY * written):
                return [Link(link.source, "continues", 0.7)]
        return []

    def _take(
        self,
        call_id: str,
        prompt: Prompt,
        now: float,
        peer: str,
        own: LinkedSession | None,
        parent: Parent | None,
        links: list[Link],
        passages: Hashes | None,
    ) -> LinkedCall:
        """Remember a call.

        Args:
            passages: fingerprints of its prompt; None for one of many equal ones, which only its
                answer can find.
        """
        is_flooded = passages is None
        session, merged = self._join(own, links, now)
        session.calls += 1
        call = StoredCall(
            self._store.next_number(),
            call_id,
            session,
            now,
            prompt.states[-1],
            kept_keys(prompt.keys),
            prompt.keys[-1] if prompt.keys else 0,
            peer,
            parent=parent.call if parent else None,
            is_alone=not links,
        )
        call.opening = prompt.opening
        call.root = call.parent.root if call.parent else call.number
        if prompt.is_completion:
            if len(prompt.messages) == 1:
                call.prompt = prompt.messages[0].text
                if not is_flooded:
                    self._store.file_text(call, call.prompt)
        elif prompt.messages and not is_flooded:
            self._store.file_text(call, prompt.messages[-1].text, prompt.text_seed)
            if prompt.last_answer < 0:
                self._ends.file(call, prompt, self._counts)
        self._store.add(call)
        if not is_flooded or call.prompt is not None:
            self._store.run(call, passages)
        return LinkedCall(session, links, merged, is_flooded)

    def answer(self, call_id: str, answer: Answer, now: float) -> None:
        """Add a call's complete answer; unknown calls are ignored."""
        call = self._store.by_id.get(call_id)
        if call is not None and call.ended is None:
            self._store.finish(call, answer.choices, now)
            if answer.response_id:
                self._store.file(call, self._store.responses, answer.response_id)

    def failed(self, call_id: str) -> None:
        """Note that a call ended without an answer; its prompt can still be linked to."""
        call = self._store.by_id.get(call_id)
        if call is not None:
            self._store.stop(call)

    def session_of(self, call_id: str) -> LinkedSession | None:
        """Return the current session of a call; None if the call is forgotten."""
        call = self._store.by_id.get(call_id)
        return None if call is None else call.session.current

    @property
    def size_bytes(self) -> int:
        """Return the approximate bytes of its tables and texts."""
        tables = self._store.index.size_bytes + self._counts.size_bytes
        tables += self._ends.size_bytes
        kept = self._store.fingerprints.size_bytes + self._store.running_bytes
        kept += len(self._store.calls) * _CALL_BYTES
        return tables + self._store.text_size + kept

    def _explicit_session(self, name: str, now: float) -> LinkedSession:
        session = self._explicit.get(name)
        if session is None:
            session = self._explicit[name] = LinkedSession(name, now, True)
            while len(self._explicit) > self._limits.calls:
                del self._explicit[next(iter(self._explicit))]
        return session

    def _passages(
        self, prompt: Prompt, parent: Parent | None, reader: Reader
    ) -> tuple[list[Link], Hashes]:
        """Return links to the writers of a prompt's new text, and the prompt's fingerprints."""
        depth, beginning = (parent.depth, parent.beginning) if parent else (0, 0)
        messages, texts = prompt.messages, prompt.texts
        is_new = [
            index >= depth or (text not in self._seen and messages[index].role != "assistant")
            for index, text in enumerate(texts)
        ]
        known = [
            self._store.fingerprints.of(each.text, text)
            for each, text, new in zip(messages, texts, is_new, strict=True)
            if not new
        ]
        if beginning:
            known.append(passages_of(normalise(messages[depth].text[:beginning]))[0])
        history = _joined(known)
        new_texts = []
        passages = [history] if known else []
        for index in reversed(range(len(messages))):
            if not is_new[index]:
                continue
            whole = list(self._store.find_whole(prompt.whole(index)))
            first_seen = self._seen.get(texts[index])
            new_texts.append(new_text(prompt, index, history, first_seen, whole))
            hashes = prompt.passages(index)[0]
            passages.append(hashes)
            self._store.fingerprints.keep(texts[index], hashes)
        best: dict[str, Link] = {}
        unexplained: list[Hashes] = []
        # Start with messages written by exactly one session: they tell which session the others
        # belong to.
        if len(new_texts) > 1:
            new_texts.sort(key=lambda each: not each.is_unmistakable)
        for text in new_texts:
            explanation = find_producers(self._store, self._counts, text, reader)
            unexplained.append(explanation.rest)
            for producer in explanation.producers:
                link = _link(producer, prompt.messages, text.message, parent)
                other = best.get(link.source)
                if other is None or other.confidence < link.confidence:
                    best[link.source] = link
                producer.output.readers += 1
            if text.first_seen is None:
                known_since = inf if explanation.is_answer else reader.now
                self._seen[texts[text.message]] = known_since
        while len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        self._counts.add(_joined(unexplained))
        named = {parent.call.id} if parent else set()
        links = [link for link in best.values() if link.source not in named]
        return links, _joined(passages)

    def _join(
        self, own: LinkedSession | None, links: list[Link], now: float
    ) -> tuple[LinkedSession, list[LinkedSession]]:
        """Return the session of a call with these links, and the sessions that it merged."""
        session = own
        merged: list[LinkedSession] = []
        for link in links:
            source = self._store.by_id.get(link.source)
            if source is None:
                continue
            if session is None:
                session = source.session.current
            else:
                ended = session.current.merge(source.session)
                if ended is not None:
                    merged.append(ended)
                    self._store.merge(ended, ended.current)
        if session is None:
            session = LinkedSession(self._mint_session_id(), now, False)
        return session.current, merged


def _newest(messages: tuple[Message, ...], max_text: int) -> Sequence[Message]:
    """Return the last messages within a number of characters; the first one's text may be cut."""
    left = max_text
    if sum(len(each.text) for each in messages) <= left:
        return messages
    kept: list[Message] = []
    for message in reversed(messages):
        if left <= 0:
            break
        kept.append(message._replace(text=message.text[-left:]))
        left -= len(message.text)
    return kept[::-1]


def _link(
    producer: Producer, messages: Sequence[Message], index: int, parent: Parent | None
) -> Link:
    kind: LinkKind = "output"
    if (
        producer.output.is_argument
        and parent is None
        and messages[index].role == "user"
        and all(each.role != "user" for each in messages[:index])
    ):
        kind = "spawned"
    return Link(producer.output.call.id, kind, producer.confidence, producer.evidence)


def _joined(hashes: Sequence[Hashes]) -> Hashes:
    if len(hashes) < 2:
        return hashes[0] if hashes else _NO_HASHES
    return np.concatenate(hashes)


class Linker:
    """Links the calls of all tenants, each separately.

    Args:
        limits: per tenant.
        mint_session_id: as for `TenantLinker`.
        max_tenants: maximum number; the longest idle one makes room.
    """

    def __init__(
        self, mint_session_id: Callable[[], str], limits: LinkerLimits, max_tenants: int
    ) -> None:
        prompts = _LastPrompt(limits.prompt_text)
        self._tenants = Tenants(lambda: TenantLinker(limits, mint_session_id, prompts), max_tenants)

    def tenant(self, name: str) -> TenantLinker:
        """Return the linker of a tenant."""
        return self._tenants.use(name)

    @property
    def size_bytes(self) -> int:
        """Return the approximate bytes of all tenants' tables and texts."""
        return sum(each.size_bytes for each in self._tenants)

    @property
    def largest_bytes(self) -> int:
        """Return the approximate bytes of the largest tenant."""
        return max((each.size_bytes for each in self._tenants), default=0)
