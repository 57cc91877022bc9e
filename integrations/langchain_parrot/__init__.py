"""LangChain on Parrot Gateway.

`ChatParrot` and `ParrotLLM` are LangChain models with Parrot's fields; `ParrotEmbeddings` serves
retrievers. Importing this loads neither `openai` nor the gateway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parrot_client.versions import VersionError, check_versions

#: The ranges of the extra `langchain` in pyproject.toml.
_RANGES = {"langchain-core": ">=1.7,<2", "openai": ">=2.45,<4"}
check_versions("langchain_parrot", "langchain", _RANGES)

from langchain_parrot.chat import ChatParrot  # noqa: E402
from langchain_parrot.composition import JoinTexts, asubmit, submit  # noqa: E402
from langchain_parrot.deferred import DeferredText  # noqa: E402
from langchain_parrot.embeddings import ParrotEmbeddings  # noqa: E402
from langchain_parrot.exceptions import (  # noqa: E402
    DeferredCancelledError,
    DeferredError,
    DeferredExpiredError,
    DeferredFailedError,
    DeferredTimeoutError,
    DeferredUnreachableError,
    ParrotError,
    ParrotFeatureError,
)
from langchain_parrot.install import InstallError, install, uninstall  # noqa: E402
from langchain_parrot.llm import ParrotLLM  # noqa: E402
from langchain_parrot.program import session  # noqa: E402

if TYPE_CHECKING:
    from langchain_parrot._openai_errors import (
        ParrotAuthenticationError,
        ParrotConflictError,
        ParrotConnectionError,
        ParrotContextOverflowError,
        ParrotFieldError,
        ParrotInvalidRequestError,
        ParrotNotFoundError,
        ParrotPermissionDeniedError,
        ParrotRateLimitError,
        ParrotServerError,
        ParrotServerTimeoutError,
        ParrotStatusError,
        ParrotStreamError,
        ParrotTimeoutError,
    )

__all__ = [
    "ChatParrot",
    "DeferredCancelledError",
    "DeferredError",
    "DeferredExpiredError",
    "DeferredFailedError",
    "DeferredText",
    "DeferredTimeoutError",
    "DeferredUnreachableError",
    "InstallError",
    "JoinTexts",
    "ParrotAuthenticationError",
    "ParrotConflictError",
    "ParrotConnectionError",
    "ParrotContextOverflowError",
    "ParrotEmbeddings",
    "ParrotError",
    "ParrotFeatureError",
    "ParrotFieldError",
    "ParrotInvalidRequestError",
    "ParrotLLM",
    "ParrotNotFoundError",
    "ParrotPermissionDeniedError",
    "ParrotRateLimitError",
    "ParrotServerError",
    "ParrotServerTimeoutError",
    "ParrotStatusError",
    "ParrotStreamError",
    "ParrotTimeoutError",
    "VersionError",
    "asubmit",
    "install",
    "session",
    "submit",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Load the errors that subclass `openai`'s when one is named."""
    if name in __all__:
        from langchain_parrot import _openai_errors

        return getattr(_openai_errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
