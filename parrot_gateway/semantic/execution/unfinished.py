"""The unfinished calls of all sessions: bounded, indexed by id, session and input.

Refuses cycles that no single session's graph shows: through several sessions, or through the queue
of a named context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parrot_gateway.exceptions import CycleError, OverloadedError
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.variable import Variable
from parrot_gateway.settings.model import SessionSettings


class UnfinishedJobs:
    """Waiting and running calls and transforms, at most as many as `limits` allows."""

    def __init__(self, limits: SessionSettings) -> None:
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._by_session: defaultdict[str, set[Job]] = defaultdict(set)
        #: By variable: the calls that read it.
        self._readers: defaultdict[str, set[Job]] = defaultdict(set)
        #: Number of inputs from other sessions than their readers'.
        self._foreign = 0
        #: Bytes of all bodies.
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __contains__(self, job: Job) -> bool:
        return job.id in self._jobs

    def find(self, call_id: str) -> Job | None:
        return self._jobs.get(call_id)

    def of_session(self, session_id: str) -> list[Job]:
        return list(self._by_session.get(session_id, ()))

    def check(self, job: Job) -> None:
        """Check that `job` can be added.

        Raises:
            OverloadedError: there are too many already.
            CycleError: it would need its own output, through other sessions or a context.
        """
        if len(self._jobs) >= self._limits.max_waiting_calls:
            raise OverloadedError(
                f"{len(self._jobs)} calls of sessions wait or run, which is this gateway's limit "
                "(setting sessions.max_waiting_calls)."
            )
        if self.held_bytes + job.held_bytes > self._limits.max_waiting_bytes:
            raise OverloadedError(
                "The waiting calls of all sessions hold as much text as this gateway keeps "
                "(setting sessions.max_waiting_bytes)."
            )
        self._check_sessions(job)
        self._check_line(job)

    def _check_sessions(self, job: Job) -> None:
        """Refuse a cycle through several sessions."""
        if job.output is None or not (self._foreign or job.foreign):
            return
        if job.output.id in job.inputs:
            raise CycleError([job.node.name or job.id, job.output.name])
        for _, reader in self._downstream(job.output):
            if reader.output is not None and reader.output.id in job.inputs:
                raise CycleError([job.node.name or job.id, reader.output.name])

    def _check_line(self, job: Job) -> None:
        """Refuse a cycle through a context: an earlier call in its queue needs this one's
        output.
        """
        if job.output is None or job.context is None:
            return
        context = job.context.context
        for variable, reader in self._downstream(job.output):
            if reader.context is not None and reader.context.context is context:
                names = (job.node.name, variable.name, reader.node.name)
                raise CycleError([*names, f"context {context.name}"])

    def _downstream(self, variable: Variable) -> Iterator[tuple[Variable, Job]]:
        """Yield all calls that need a variable, directly or not, with the variable each reads."""
        stack, seen = [variable], {variable.id}
        while stack:
            variable = stack.pop()
            for reader in self._readers.get(variable.id, ()):
                yield variable, reader
                if reader.output is not None and reader.output.id not in seen:
                    seen.add(reader.output.id)
                    stack.append(reader.output)

    def add(self, job: Job) -> None:
        """Add a job, and pin the sessions that it reads from until `remove`."""
        self._jobs[job.id] = job
        self._by_session[job.session.id].add(job)
        for variable_id in job.inputs:
            self._readers[variable_id].add(job)
        self.held_bytes += job.held_bytes
        self._foreign += len(job.foreign)
        for session in job.foreign.values():
            session.pin()

    def remove(self, job: Job) -> None:
        del self._jobs[job.id]
        _discard(self._by_session, job.session.id, job)
        for variable_id in job.inputs:
            _discard(self._readers, variable_id, job)
        self.held_bytes -= job.held_bytes
        self._foreign -= len(job.foreign)
        for session in job.foreign.values():
            session.unpin()

    @property
    def is_empty(self) -> bool:
        """Return true if all indexes are empty; for tests."""
        return not (self._jobs or self._by_session or self._readers or self._foreign)


def _discard(index: defaultdict[str, set[Job]], key: str, job: Job) -> None:
    index[key].discard(job)
    if not index[key]:
        del index[key]
