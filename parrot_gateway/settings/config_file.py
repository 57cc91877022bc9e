"""A YAML settings file that remembers the line of each value.

It does not interpret the settings: `parrot_gateway.settings.sources` checks them and reports the
lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

#: Maximum bytes of a file, and maximum values, where an alias counts as its whole target.
MAX_BYTES = 1_000_000
MAX_VALUES = 200_000


class ConfigError(Exception):
    """Settings that cannot be used; the message is for the operator.

    Args:
        message: a line for each fault.
        field: the first faulty setting, if there is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The parsed file and the YAML nodes it came from."""

    #: A description in words if the text was no file.
    path: Path | str | None
    data: dict[str, Any]
    root: yaml.Node | None

    @classmethod
    def empty(cls) -> ConfigFile:
        return cls(path=None, data={}, root=None)

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Parse `path`.

        Raises:
            ConfigError: unreadable, too large, not YAML, or not a mapping.
        """
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes")
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path | str) -> ConfigFile:
        """Parse a text; `path` names or describes it.

        Raises:
            ConfigError: the text is not YAML, or not a mapping.
        """
        try:
            loader = yaml.SafeLoader(text)
            root = loader.get_single_node()
            if root is not None and _expanded(root, {}) > MAX_VALUES:
                raise ConfigError(f"{path}: its aliases (*name) come to over {MAX_VALUES:,} values")
            _check_keys(root, path, set())
            data = None if root is None else loader.construct_document(root)
        except RecursionError:
            raise ConfigError(f"{path}: nested too deeply, or an alias inside itself") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            line = f", line {mark.line + 1}" if mark is not None else ""
            raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise ConfigError(f"{path}, line 1: it must be a mapping of settings")
        return cls(path=path, data={str(key): value for key, value in data.items()}, root=root)

    def locate(self, location: tuple[Any, ...]) -> str:
        """Return `FILE, line N` of the deepest existing node on the path to `location`."""
        if self.path is None:
            return "settings"
        if self.root is None:
            return f"{self.path}, line 1"
        node, line = self.root, self.root.start_mark.line
        for part in location:
            found = _child(node, part)
            if found is None:
                break
            node, line = found
        return f"{self.path}, line {line + 1}"


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Count the values of a node and below, an alias as often as it is used."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    size = known.get(node)
    if size is None:
        pairs = isinstance(node, yaml.MappingNode)
        below = [part for pair in node.value for part in pair] if pairs else node.value
        size = known[node] = 1 + sum(_expanded(each, known) for each in below)
    return size


def _check_keys(node: yaml.Node | None, path: Path | str, seen: set[yaml.Node]) -> None:
    """Refuse mappings with a duplicate key, of which YAML would silently take the last.

    Raises:
        ConfigError: a mapping has a key twice.
    """
    if not isinstance(node, yaml.CollectionNode) or node in seen:
        return
    seen.add(node)
    lines: dict[str, int] = {}
    for each in node.value:
        key, value = each if isinstance(each, tuple) else (None, each)
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{path}, line {line}: '{key.value}' stands twice in the same mapping (first "
                    f"on line {lines[key.value]})"
                )
            lines[key.value] = line
        _check_keys(value, path, seen)


def _child(node: yaml.Node, part: Any) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark.line
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        value = node.value[part]
        return value, value.start_mark.line
    return None
