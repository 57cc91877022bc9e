"""Errors of the engine package.

    ParrotEngineError
    ├── ModelError                 a checkpoint cannot be served
    │   ├── UnsupportedModelError  valid, but not by this engine: another kind may run it
    │   ├── PoolingModelError      valid, but its vectors or scores cannot be computed here
    │   ├── CheckpointError        files missing, broken, or not matching the configuration
    │   └── AdapterError           an adapter cannot be read, or does not fit the model
    ├── SettingsError              a setting is invalid, or does not fit the machine
    ├── GenerationError            `LLM` only: a context failed; carries the `Failed` event
    ├── PrimitiveError             one context cannot continue; becomes a `Failed` event
    ├── ShardError                 a process of a multi-process engine was lost, and so the engine
    └── EngineStateError           a bug of the engine itself, with the story of the object
        ├── BlockStateError        an illegal transition of a KV block
        └── ContextStateError      an illegal transition of a context

Failures of single contexts leave an engine as values (`protocol.Failed`), not as exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence

from parrot_engine.protocol import Failed, FailureCode


class ParrotEngineError(Exception):
    """Base of every error raised on purpose by this package."""


class ModelError(ParrotEngineError):
    """A checkpoint cannot be served."""


class UnsupportedModelError(ModelError):
    """The builtin engine does not support this model; the huggingface engine may."""

    def __init__(self, feature: str, *, architecture: str | None = None) -> None:
        of_model = f" (architecture {architecture})" if architecture else ""
        super().__init__(
            f"the builtin engine does not support {feature}{of_model}; "
            "use the huggingface engine for this model"
        )
        #: The unsupported feature, e.g. `rope type 'su'`.
        self.feature = feature
        self.architecture = architecture


class PoolingModelError(ModelError):
    """A model of vectors or scores is not supported by any engine."""

    def __init__(self, feature: str, architecture: str | None = None) -> None:
        of_model = f" (architecture {architecture})" if architecture else ""
        super().__init__(
            f"vectors or scores with {feature}{of_model} cannot be computed here; let another "
            "server do it, and pass its calls on (--upstream)"
        )
        self.feature = feature
        self.architecture = architecture


class CheckpointError(ModelError):
    """The files of a checkpoint are missing, broken, or do not match its configuration."""


class AdapterError(ModelError):
    """A LoRA adapter cannot be read, is not supported, or belongs to another model."""


class SettingsError(ParrotEngineError):
    """A setting is invalid, or does not fit model and machine."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class GenerationError(ParrotEngineError):
    """A context of an `LLM` failed."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure

    @property
    def code(self) -> FailureCode:
        return self.failure.code


class PrimitiveError(ParrotEngineError):
    """One context cannot continue; the engine turns this into a `Failed` event."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ShardError(ParrotEngineError):
    """A rank of a tensor-parallel engine was lost or failed alone, which ends the engine."""


class EngineStateError(ParrotEngineError):
    """A bug of the engine: the state of an object does not allow an operation."""

    def __init__(self, what: str, problem: str, story: Sequence[str] = ()) -> None:
        lines = "".join(f"\n  {line}" for line in story)
        super().__init__(f"{what}: {problem}" + (f"; what happened to it:{lines}" if lines else ""))
        self.what = what
        self.problem = problem
        #: The last changes of the object, oldest first.
        self.story = tuple(story)


class BlockStateError(EngineStateError):
    """An illegal transition of a KV block."""


class ContextStateError(EngineStateError):
    """An illegal transition of a context."""
