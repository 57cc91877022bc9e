"""The decorator: a function whose docstring is a template becomes a call.

This file reads signatures and binds arguments; the session sends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    TypeAlias,
    get_args,
    get_origin,
    overload,
)

from parrot_functions._exceptions import ArgumentError, DefinitionError
from parrot_functions._session import Call, Session, Submission, Text, current_session
from parrot_functions._template import (
    Placeholder,
    is_placeholder_name,
    parse_template,
    render,
    write_prompt,
)

P = ParamSpec("P")


class InputMark:
    """Marks a parameter as an input, unlike one that is a plain Python value."""


#: A parameter whose text the server inserts: a string, or a text that may not be written yet.
#: Parameters with any other annotation are rendered with `str` before sending.
Input: TypeAlias = Annotated[str | Text | Call, InputMark()]


@dataclass(frozen=True, slots=True)
class Output:
    """A parameter that the model writes, with its options. Callers never pass it.

    Fields left at None are not sent, so the server decides. Its default of `max_tokens` is 16, as
    for `/v1/completions`.

    Attributes:
        transform: a pipeline of the server's transforms; later parts of the template, other
            functions and readers see the transformed text.
        extra: further fields of the request's body, such as `{"top_k": 20}`.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    transform: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self) -> dict[str, Any]:
        """Return the fields for the body of a completion request."""
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop
            if self.stop is None or isinstance(self.stop, str)
            else list(self.stop),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {**{name: value for name, value in named.items() if value is not None}, **self.extra}


#: The server inserts a parameter, it is rendered here, or the model writes it.
_Role: TypeAlias = Literal["input", "plain"] | Output


class SemanticFunction(Generic[P]):
    """A function that a model carries out. Made by `semantic_function`.

    Calling it submits the calls and returns at once; see `Call`. The function's own code never
    runs.

    Attributes:
        name: name of the function.
        model: model of its calls; None uses the session's.
    """

    def __init__(self, function: Callable[P, object], *, model: str | None = None) -> None:
        update_wrapper(self, function)
        self.name = getattr(function, "__name__", "function")
        self.model = model
        if inspect.iscoroutinefunction(function):
            self._refuse("it is declared with 'async def'; its code never runs, use 'def'")
        template = inspect.getdoc(function)
        if not template:
            self._refuse("it has no docstring, which is its template")
        try:
            self._signature = inspect.signature(function, eval_str=True)
        except NameError as error:
            raise DefinitionError(
                f"'{self.name}' cannot be a semantic function: its annotations name something "
                f"that its module does not have ({error})."
            ) from error
        self._roles = {
            name: self._role(parameter) for name, parameter in self._signature.parameters.items()
        }
        self._pieces = parse_template(template, self._roles)
        self._check()

    def __repr__(self) -> str:
        return f"<semantic function {self.name}{self._signature}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Submit it to the current session.

        Raises:
            SessionError: no session is open here.
            ArgumentError: see `submit`.
        """
        return self.submit(current_session(), *args, **kwargs)

    def submit(self, session: Session, /, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Submit it to a session; returns at once.

        Raises:
            ArgumentError: the arguments do not fit the signature, an output is among them, an
                input is no text, or no model is named anywhere.
            SessionError: the session is closed.
        """
        model = self.model or session.model
        if model is None:
            raise ArgumentError(
                f"'{self.name}' needs a model: @semantic_function(model=…) or Session(model=…)."
            )
        inputs, values = self._bind(session, args, kwargs)
        pieces = render(self._pieces, values)
        outputs: dict[str, Text] = {}
        submissions: list[Submission] = []
        for position, piece in enumerate(pieces):
            if not isinstance(piece, Placeholder) or piece.name in outputs:
                continue
            role = self._roles[piece.name]
            if not isinstance(role, Output):
                continue
            prompt = write_prompt(pieces[:position])
            texts = {**inputs, **outputs}
            output = Text(session, session._new_name(piece.name))
            parrot = {"name": f"{self.name}.{piece.name}"}
            if role.transform is not None:
                parrot["transform"] = role.transform
            submissions.append(
                Submission(
                    output,
                    {"model": model, "prompt": prompt.text, **role.sampling()},
                    parrot,
                    {**{name: texts[name] for name in prompt.inputs}, **prompt.values},
                )
            )
            outputs[piece.name] = output
        session._submit(submissions)
        return Call(self.name, outputs)

    def _role(self, parameter: inspect.Parameter) -> _Role:
        name, annotation, default = parameter.name, parameter.annotation, parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            self._refuse(f"'{name}' collects arguments; every parameter needs a name")
        if not is_placeholder_name(name):
            self._refuse(f"'{name}' cannot stand in a template: ASCII letters, digits and _ can")
        notes: tuple[object, ...] = (annotation,)
        if get_origin(annotation) is Annotated:
            notes = get_args(annotation)
        marked = next((note for note in notes if isinstance(note, Output)), None)
        if marked is not None or Output in notes or isinstance(default, Output):
            if default is not parameter.empty and not isinstance(default, Output):
                self._refuse(f"the output '{name}' has a default that is no Output(…)")
            if isinstance(default, Output):
                return default
            return marked if marked is not None else Output()
        return "input" if any(isinstance(note, InputMark) for note in notes) else "plain"

    def _check(self) -> None:
        """Check that the template has a place for every parameter, and text before its first
        output.
        """
        names = [piece.name for piece in self._pieces if isinstance(piece, Placeholder)]
        for name, role in self._roles.items():
            if name not in names:
                self._refuse(f"its template has no {{{{{name}}}}}")
            if not isinstance(role, Output):
                continue
            if self._pieces[0] == Placeholder(name):
                self._refuse(f"its template begins with the output '{name}'")
        ends = [names.index(name) for name, role in self._roles.items() if isinstance(role, Output)]
        if not ends:
            self._refuse("it has no output: annotate a parameter with Output")
        behind = set(names[max(ends) :]) - set(names[: max(ends) + 1])
        if behind:
            self._refuse(f"'{min(behind)}' stands only behind the last output, where none reads it")

    def _refuse(self, why: str) -> NoReturn:
        raise DefinitionError(f"'{self.name}' cannot be a semantic function: {why}.")

    def _bind(
        self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, str | Text], dict[str, str]]:
        """Return the inputs, and the texts of plain values."""
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{self.name}(): {error}.") from None
        for name in bound.arguments:
            if isinstance(self._roles[name], Output):
                raise ArgumentError(f"{self.name}(): '{name}' is an output; the model writes it.")
        bound.apply_defaults()
        inputs: dict[str, str | Text] = {}
        values: dict[str, str] = {}
        for name, role in self._roles.items():
            if isinstance(role, Output):
                continue
            if name not in bound.arguments:
                raise ArgumentError(f"{self.name}(): '{name}' is missing.")
            argument = bound.arguments[name]
            if role == "input":
                inputs[name] = self._input(session, name, argument)
            elif isinstance(argument, Text | Call):
                raise ArgumentError(
                    f"{self.name}(): '{name}' is a plain value and would be rendered now. "
                    "Annotate it with Input to pass on a text that may not be written yet."
                )
            else:
                values[name] = str(argument)
        return inputs, values

    def _input(self, session: Session, name: str, argument: object) -> str | Text:
        if isinstance(argument, Call):
            argument = argument.only
        if isinstance(argument, Text) and argument.session.client is not session.client:
            if not argument.is_ready:
                raise ArgumentError(
                    f"{self.name}(): '{name}' is of another client's session; read it first."
                )
            return str(argument)
        if isinstance(argument, str | Text):
            return argument
        raise ArgumentError(
            f"{self.name}(): the input '{name}' must be a text, not {type(argument).__name__}; "
            "without the annotation Input it would be rendered with str()."
        )


@overload
def semantic_function(function: Callable[P, object], /) -> SemanticFunction[P]: ...


@overload
def semantic_function(
    *, model: str | None = None
) -> Callable[[Callable[P, object]], SemanticFunction[P]]: ...


def semantic_function(
    function: Callable[P, object] | None = None, /, *, model: str | None = None
) -> SemanticFunction[P] | Callable[[Callable[P, object]], SemanticFunction[P]]:
    """Turn a function into a call; its docstring is the template.

    `{{name}}` marks the place of a parameter's text. Parameters annotated with `Input` take strings
    and texts that may not be written yet. The model writes those with `Output`, each from
    everything before it in the template. All others are rendered with `str`. All other braces are
    ordinary text. Text after the last output is not sent.

        @semantic_function(model="parrot-demo")
        def tell(hero: Input, story: Output = Output(max_tokens=60)) -> None:
            \"\"\"Once there was {{hero}}. {{story}}\"\"\"

    Raises:
        DefinitionError: the function cannot be one; the message says why.
    """
    if function is not None:
        return SemanticFunction(function, model=model)
    return lambda decorated: SemanticFunction(decorated, model=model)
