"""LangChain on Parrot Gateway.

`ChatParrot` and `ParrotLLM` are LangChain models with Parrot's extras. Importing this loads neither
`openai` nor anything of the gateway's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_parrot._versions import VersionError, check_versions

check_versions()

from langchain_parrot._deferred_errors import (  # noqa: E402
    DeferredCancelledError,
    DeferredError,
    DeferredExpiredError,
    DeferredFailedError,
    DeferredTimeoutError,
    DeferredUnreachableError,
)
from langchain_parrot._errors import ParrotError, ParrotFeatureError  # noqa: E402
from langchain_parrot.chat import ChatParrot  # noqa: E402
from langchain_parrot.deferred import DeferredText  # noqa: E402
from langchain_parrot.install import InstallError, install, uninstall  # noqa: E402
from langchain_parrot.llm import ParrotLLM  # noqa: E402

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
    "ParrotAuthenticationError",
    "ParrotConflictError",
    "ParrotConnectionError",
    "ParrotContextOverflowError",
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
    "install",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """The errors that are of `openai` too, loaded with it when somebody names one."""
    if name in __all__:
        from langchain_parrot import _openai_errors

        return getattr(_openai_errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
