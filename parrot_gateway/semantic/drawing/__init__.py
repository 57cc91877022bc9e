"""Pictures of a session's graph: JSON, Mermaid and text for terminals.

All are made from a `GraphSnapshot`, contain no values of variables, and are safe to show whatever
the names contain. Their size is bounded: omitted nodes are counted and mentioned.
"""

from __future__ import annotations

from parrot_gateway.semantic.drawing.mermaid import to_mermaid
from parrot_gateway.semantic.drawing.text import to_text
from parrot_gateway.semantic.graph.snapshot import to_json

__all__ = ["to_json", "to_mermaid", "to_text"]
