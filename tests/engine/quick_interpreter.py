"""Triton's interpreter without what it does over and over again.

A launch first puts the interpreter's functions into the language, and so does each call that a
kernel makes of another function, `tl.sum` and `tl.zeros` among them: it is most of the time of a
small kernel. Once a launch gives the same. What a kernel computes is left alone.
"""

from __future__ import annotations

import functools
from typing import Any

from triton import language
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype

#: Names of the modules of the language that the running launch has changed.
_changed: set[str] = set()
_numpy_types: dict[str, Any] = {}


def install() -> None:
    """Make all launches of this process quicker from now on."""
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _numpy_type


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
    """Those that the interpreter changes for `function`."""
    seen = [id(value) for value in function.__globals__.values()]
    return frozenset(m.__name__ for m in (language, language.core) if id(m) in seen)


def _numpy_type(dtype: Any) -> Any:
    """A table is built at each call of the original."""
    name = dtype.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _get_np_dtype(dtype)
    return _numpy_types[name]
