"""What in the head of an HTTP request is refused although the parser would take it.

A proxy before this server and the server itself must agree where a request ends, or the rest of one client's request is
taken for the beginning of another's (request smuggling). So whatever RFC 9112 lets a recipient repair is refused here:
lines that end without a carriage return (section 2.2), headers folded over lines (5.2), a length given twice or in a
list, and a length beside a transfer coding (6.1 and 6.3).
"""

from __future__ import annotations

import re

_END = re.compile(rb"\n\r?\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_BARE_CR = re.compile(rb"\r[^\n]")
_FOLD = re.compile(rb"\n[ \t]")
_NAME = re.compile(rb"\n([^\s:]+)[ \t]*:")
_LISTED_LENGTH = re.compile(rb"\ncontent-length[ \t]*:[ \t]*+(?![0-9]+[ \t]*\r)[^\r]*\r", re.IGNORECASE)
_LENGTH, _CODING = b"content-length", b"transfer-encoding"


def has_end(data: bytes, begin: int) -> bool:
    """Whether a head is there to its end, which was not among the first `begin` bytes."""
    return _END.search(data, max(0, begin - 2)) is not None


def head_fault(data: bytes, max_headers: int) -> str:
    """What is wrong with the head that `data` begins with, which is there to its end (`has_end`); "" if nothing is.

    What this does not name is for the parser to judge.
    """
    end = _END.search(data)
    assert end is not None, "a head is looked at when it is whole"
    head = data[: end.end()]
    if _BARE_LF.search(head):
        return "a line of the head ends with a line feed alone"
    if _BARE_CR.search(head):
        return "the head has a carriage return without a line feed"
    if _FOLD.search(head):
        return "a header is folded over two lines"
    names = [name.lower() for name in _NAME.findall(head)]
    if len(names) > max_headers:
        return f"the request has {len(names)} headers or more, at most {max_headers} are taken"
    if names.count(_LENGTH) > 1 or names.count(_CODING) > 1:
        return "Content-Length or Transfer-Encoding is given twice"
    if _LISTED_LENGTH.search(head):
        return "Content-Length is not one number"
    if _CODING in names and _LENGTH in names:
        return "Content-Length and Transfer-Encoding are given together"
    if _CODING in names and head.partition(b"\r\n")[0].endswith(b"HTTP/1.0"):
        return "Transfer-Encoding is given, and the version is HTTP/1.0"
    return ""
