"""Facts about a call besides its prompt, and about a model without a running engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from parrot_scheduler.task import LATENCY, GroupRef, Objective

if TYPE_CHECKING:
    from parrot_engine.protocol import EngineInfo
    from parrot_engine.text import Tokenizer


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
