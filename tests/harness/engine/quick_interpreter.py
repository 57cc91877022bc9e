"""Triton's interpreter without what it does over and over again.

A launch first puts the interpreter's functions into the language, and so does each call that a
kernel makes of another function, `tl.sum` and `tl.zeros` among them: it is most of the time of a
small kernel. Once a launch gives the same. Of what is left, a quarter goes into the shapes of
types and of tensors, written out anew for each value: here values of one shape share them. What a
kernel computes is left alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype

_init_block_type = language.block_type.__init__
_broadcast = TritonSemantic.broadcast_impl_value
_unwrap = language.core._unwrap_if_constexpr

#: Names of the modules of the language that the running launch has changed.
_changed: set[str] = set()
_numpy_types: dict[str, Any] = {}


class _Shape(NamedTuple):
    """Answers for a type and a tensor of one shape."""

    of_type: Any
    numel: int
    name: str


_shapes: dict[tuple[int, ...], _Shape] = {}


def install() -> None:
    """Make all launches of this process quicker from now on."""
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _numpy_type
    language.block_type.__init__ = _begin_block_type
    language.tensor.__init__ = _begin_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_unequal
    language.core._unwrap_if_constexpr = _unwrap_constexpr


def _patch_once(function: Any) -> Any:
    """For a launch, which takes its changes back at its end, or a call within one."""
    modules = _modules(function)
    if modules <= _changed:
        return None
    scope = _patch_lang(function)
    if not _changed:
        restore = scope.restore

        def end() -> None:
            _changed.clear()
            restore()

        scope.restore = end
    _changed.update(modules)
    return scope


@functools.cache
def _modules(function: Any) -> frozenset[str]:
    """Name the modules that the interpreter changes for `function`."""
    seen = [id(value) for value in function.__globals__.values()]
    return frozenset(m.__name__ for m in (language, language.core) if id(m) in seen)


def _numpy_type(dtype: Any) -> Any:
    """A table is built at each call of the original."""
    name = dtype.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _get_np_dtype(dtype)
    return _numpy_types[name]


def _begin_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`; a shape is checked when it is first met."""
    sizes = tuple([getattr(size, "value", size) for size in shape])
    if sizes not in _shapes:
        _init_block_type(self, element_ty, shape)
        _shapes[sizes] = _Shape(self.shape, self.numel, str(self.shape))
        return
    self.element_ty = element_ty
    self.shape, self.numel, name = _shapes[sizes]
    self.name = f"<{name}, {element_ty}>"


def _begin_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _of_tensor(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Shape and number of elements as a kernel reads them, for all tensors of a shape."""
    shape = language.tuple([language.constexpr(size) for size in sizes])
    return shape, language.constexpr(math.prod(sizes))


def _broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
    """Operands of one shape are what they become."""
    of_lhs, of_rhs = lhs.type, rhs.type
    if of_lhs.is_block() and of_rhs.is_block() and of_lhs.shape is of_rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _unwrap_constexpr(value: Any) -> Any:
    """Most are a number or a type: neither has anything inside."""
    if isinstance(value, (int, language.dtype)):
        return value
    return _unwrap(value)
