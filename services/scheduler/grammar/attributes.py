"""Attributes of rules in llguidance's Lark that change nothing here."""

import re

# What stands in a rule's brackets, between its name and the colon, all in one line.
_STRING, _REGEX = r'"(?:\\.|[^"\\\n])*"', r"/(?:\\.|[^/\\\n])*/"
_HEAD = re.compile(rf'^[ \t]*\w[^\n\["/]*\[((?:[^\]\n"/]|{_STRING}|{_REGEX})*)\][ \t]*:', re.MULTILINE)
_VALUE = re.compile(f"{_STRING}|{_REGEX}")
_IDLE = {
    "temperature": "a request has one temperature: set its own",
    "capture": "nothing of an answer is returned apart",
    "stop_capture": "nothing of an answer is returned apart",
    "stop": "an answer keeps all of its tokens: use suffix or lazy",
}


def idle_attribute(lark: str) -> str:
    """The first one, and what to do; empty where there is none."""
    for head in _HEAD.finditer(lark):
        for attribute in _VALUE.sub("", head[1]).split(","):
            name = attribute.partition("=")[0].strip()
            if name in _IDLE:
                return f"the attribute {name!r} has no effect here; {_IDLE[name]}"
    return ""
