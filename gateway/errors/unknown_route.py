"""The error for a path without a route."""

import re
from typing import Final

_DOUBLED: Final = re.compile(r"^(/+v1)?/+v1(?P<rest>/.*)$")


def unknown_route(path: str) -> str:
    """Return the message for a path without a route; it names the base URL to set where the path shows a wrong one."""
    plain = re.sub("/{2,}", "/", path)
    doubled = _DOUBLED.match(plain)
    if doubled is not None and (plain != path or doubled[1]):
        return f"unknown path {path}; did you mean /v1{doubled['rest']}? The client's base URL must end with one /v1"
    return f"unknown path {path}; inference is served below /v1 (chat/completions, messages, responses, ...)"
