"""Semantic functions: Python functions that a model carries out, on a Parrot Gateway.

    from parrot_functions import Input, Output, Session, semantic_function

It speaks HTTP to the gateway and needs only httpx. The gateway renders prompts with values,
schedules calls, and retries failed generations.

    with Session("http://127.0.0.1:8000/v1"):
        print(tell("a brave ship").get())

Speaks HTTP to the gateway and needs httpx, nothing else. It does not render prompts with values,
schedule or retry failed generations: the gateway does.
"""

from __future__ import annotations

from parrot_functions._client import Client
from parrot_functions._exceptions import (
    ArgumentError,
    DeadlineError,
    DefinitionError,
    DependencyFailedError,
    FunctionsError,
    NotReadyError,
    OverloadedError,
    ProtocolError,
    ServerError,
    SessionError,
    UnreachableError,
)
from parrot_functions._function import Input, Output, SemanticFunction, semantic_function
from parrot_functions._session import Call, Session, Text, current_session

__all__ = [
    "ArgumentError",
    "Call",
    "Client",
    "DeadlineError",
    "DefinitionError",
    "DependencyFailedError",
    "FunctionsError",
    "Input",
    "NotReadyError",
    "Output",
    "OverloadedError",
    "ProtocolError",
    "SemanticFunction",
    "ServerError",
    "Session",
    "SessionError",
    "Text",
    "UnreachableError",
    "current_session",
    "semantic_function",
]
