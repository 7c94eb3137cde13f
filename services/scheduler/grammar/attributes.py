"""Detects attributes of rules in llguidance's Lark that have no effect here."""

import re

# The attributes in a rule's brackets, between its name and the colon, on one line.
_STRING, _REGEX = r'"(?:\\.|[^"\\\n])*"', r"/(?:\\.|[^/\\\n])*/"
_HEAD = re.compile(rf'^[ \t]*\w[^\n\["/]*\[((?:[^\]\n"/]|{_STRING}|{_REGEX})*)\][ \t]*:', re.MULTILINE)
_VALUE = re.compile(f"{_STRING}|{_REGEX}")
_WITHOUT_EFFECT = {
    "temperature": "a request has one temperature: set its own",
    "capture": "no part of an answer is returned separately",
    "stop_capture": "no part of an answer is returned separately",
    "stop": "an answer keeps all of its tokens: use suffix or lazy",
}


def unsupported_attribute(lark: str) -> str:
    """Return the first attribute without effect and the remedy, or an empty string."""
    for head in _HEAD.finditer(lark):
        for attribute in _VALUE.sub("", head[1]).split(","):
            name = attribute.partition("=")[0].strip()
            if name in _WITHOUT_EFFECT:
                return f"the attribute {name!r} has no effect here; {_WITHOUT_EFFECT[name]}"
    return ""
