"""One field of a multipart form, found without reading the rest of it.

Linear in the body: parts are cut at their boundary, and of each only the beginning is looked at.
Files are passed over. Nothing is decoded or checked; that is the upstream's business.
"""

from __future__ import annotations

import re

#: Headers of one part, and the value of a field.
MAX_PART_HEAD_BYTES = 4096
MAX_VALUE_BYTES = 256
#: Parts that are looked at; a field behind them counts as left out.
MAX_PARTS = 1024

_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"\r\n]{1,200})"|([^;"\s]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb';[ \t]*name=(?:"([^"\r\n]*)"|([^;"\s]*))', re.IGNORECASE)


def form_field(content_type: bytes, body: bytes, name: bytes) -> str | None:
    """The value of the first field of that name; None without one, empty when it is too long.

    Args:
        content_type: the header, with the boundary.
        body: the whole form.
        name: of the field.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    mark = b"--" + (found[1] or found[2])
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if start == 1:
        return None
    for _ in range(MAX_PARTS):
        head = body.find(b"\r\n", start + len(mark), start + len(mark) + MAX_PART_HEAD_BYTES)
        if head < 0:
            return None
        end = body.find(b"\r\n" + mark, head)
        if end < 0:
            return None
        blank = body.find(b"\r\n\r\n", head, min(head + MAX_PART_HEAD_BYTES, end))
        if blank >= 0 and _name_of(body[head:blank]) == name:
            value = body[blank + 4 : end]
            return value.decode("utf-8", "replace").strip() if len(value) <= MAX_VALUE_BYTES else ""
        start = end + 2
    return None


def _name_of(head: bytes) -> bytes | None:
    """The field of a part with these headers."""
    for line in head.split(b"\r\n"):
        title, _, text = line.partition(b":")
        if title.strip().lower() == b"content-disposition":
            found = _NAME.search(text)
            return None if found is None else found[1] if found[1] is not None else found[2]
    return None
