"""The interface through which a call gets an engine, and the metadata that it is placed by.

Plain values and protocols: which engine it becomes is decided by the scheduler, behind
`parrot_gateway.scheduling`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parrot_scheduler.task import LATENCY, GroupRef, Objective

if TYPE_CHECKING:
    from parrot_engine.protocol import EngineInfo, Retention
    from parrot_engine.text import Tokenizer

    from parrot_gateway.engines.remote import RemoteEngine
    from parrot_gateway.generation.generation_request import GenerationRequest


#: Whose requests those with the gateway's key are.
DEFAULT_TENANT = "default"


def salt_of(tenant: str) -> str:
    """The salt of a tenant's prompts in engines' prefix caches, which keeps tenants apart."""
    return "" if tenant == DEFAULT_TENANT else tenant


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """Facts about a call beside its prompt. The default is an ordinary call: a client waits for
    it, and nothing else is known."""

    tenant: str = DEFAULT_TENANT
    #: Its id, if it is a session's; more may become known of such a call while it waits.
    call: str = ""
    #: The session that it belongs to; empty: it is an application of its own.
    application: str = ""
    #: Key of what calls of its kind have in common; empty: the prefix of its prompt.
    template: str = ""
    objective: Objective = LATENCY
    groups: tuple[GroupRef, ...] = ()
    #: As its caller gave it: larger is earlier, within the tenant.
    priority: int = 0
    #: Calls on the longest chain that waits for it.
    successors: int = 0
    #: Chance that a later call of its session goes on from it.
    returns: float = 0.0
    #: Share of its prompt, from the beginning, that any applications may share; None: not known.
    common_share: float | None = None
    #: Name of an engine that holds something of it already.
    prefers: str | None = None
    #: Tenant and id under which it can be asked why it ran where it did, where `call` is empty.
    explained_as: tuple[str, str] | None = None
    #: See `salt_of`.
    salt: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "salt", salt_of(self.tenant))

    def common_tokens_of(self, prompt_tokens: int) -> int | None:
        """Compute `Task.common_tokens` for a prompt of `prompt_tokens` tokens."""
        return None if self.common_share is None else round(self.common_share * prompt_tokens)


ORDINARY_CALL = CallMetadata()


class ServedModel(Protocol):
    """A model as known without an engine to run it on."""

    @property
    def info(self) -> EngineInfo:
        """Description of its engines."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def parses_reasoning(self) -> bool:
        """True if reasoning is parted from the content; also for models that write none."""


class Placement(Protocol):
    """A call's place on an engine, or its wait for one; `close` it when the call has ended."""

    @property
    def priority(self) -> int:
        """For the engine's own queue, once taken: smaller runs earlier."""

    @property
    def adapter(self) -> str:
        """Id of the adapter that it is computed with; empty for none."""

    @property
    def retention(self) -> Retention:
        """How its KV is retained when it has ended, once taken."""

    @property
    def application(self) -> str:
        """Whose call it is, for what is kept of its KV."""

    async def engine(self) -> RemoteEngine:
        """The engine, as soon as there is a place. A cancelled wait can be taken up again.

        Raises:
            OverloadedError: there is too much to do, or no engine any more.
            ContextLengthError: no engine of the model can hold it.
        """

    @property
    def engine_name(self) -> str:
        """The engine's own name, once there is one."""

    @property
    def queued_s(self) -> float:
        """Seconds that the call waited for it."""

    @property
    def reason(self) -> str:
        """Why it is this engine, in a few words."""

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """Tokens so far: of the prompts, of these found in a cache, and of the answers."""

    def succeed(self) -> None:
        """The call has all its tokens; anything else that ends it was no success."""

    def close(self) -> None:
        """The call has ended, and its contexts are freed. Safe to call twice."""


class Placer(ServedModel, Protocol):
    """The engines of one model, as a call sees them before it has one."""

    def place(self, request: GenerationRequest) -> Placement:
        """Ask for a place for a call; must be closed."""
