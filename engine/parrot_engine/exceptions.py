"""Errors of the engine package, outside of the events that report a failed context.

    ParrotEngineError
    └── ModelError                 a checkpoint cannot be served
        ├── UnsupportedModelError  valid, but not by this engine: another kind may run it
        └── CheckpointError        files missing, broken, or not matching the configuration

Failures of single contexts are values (`protocol.Failed`), not exceptions.
"""

from __future__ import annotations


class ParrotEngineError(Exception):
    """Base of every error raised on purpose by this package."""


class ModelError(ParrotEngineError):
    """A checkpoint cannot be served."""


class UnsupportedModelError(ModelError):
    """The builtin engine does not know how to run this model; the huggingface engine may."""

    def __init__(self, feature: str, *, architecture: str | None = None) -> None:
        of_model = f" (architecture {architecture})" if architecture else ""
        super().__init__(
            f"the builtin engine does not support {feature}{of_model}; "
            "use the huggingface engine for this model"
        )
        #: What is not supported, e.g. `rope type 'su'`.
        self.feature = feature
        self.architecture = architecture


class CheckpointError(ModelError):
    """The files of a checkpoint are missing, broken, or do not match its configuration."""
