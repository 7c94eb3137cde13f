"""What ``help`` prints."""

import itertools
import os
import shutil
import sys
import textwrap

from services.common.config.flag import BOOLEANS, Flag, flags_of
from services.common.flags import Config, Examples

_NAMES, _NARROWEST, _WIDEST = 36, 80, 160


def usage(kind: type[Config]) -> str:
    """Return what the program is for, examples, and a paragraph for each flag: name, default, meaning."""
    program = os.path.basename(sys.argv[0])
    width = min(max(shutil.get_terminal_size((120, 24)).columns, _NARROWEST), _WIDEST)
    examples: Examples = vars(kind).get("examples", ())
    lines = [f"usage: {program} [flag=value ...]", *([""] if examples else [])]
    for arguments, meaning in examples:
        lines.append(f"  {program} {arguments}".rstrip())
        lines += textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += [
        "",
        *textwrap.wrap(
            "Each flag is also an environment variable, TOKA_<FLAG>; the command line wins. T and F are booleans,"
            " numbers in parentheses are evaluated: '(512 * 1024)'. A flag without a value here has none, or one of the"
            f' model\'s. Shells complete flags and their values: eval "$({program} --completion bash)", or zsh, or'
            " fish.",
            width,
        ),
    ]
    for group, flags in itertools.groupby(flags_of(kind), key=lambda flag: flag.group):
        lines += ["", *textwrap.wrap((group.__doc__ or "").split("\n\n")[0].strip().replace("``", ""), width)]
        for flag in flags:
            lines += _paragraph(flag, width)
    others = [name for name in kind.known() if name in kind.translations]
    if others:
        text = "Flags of the original Tokasaurus are accepted, too; docs/flags.md says what each does here: "
        lines += ["", *textwrap.wrap(f"{text}{', '.join(others)}.", width)]
    return "\n".join(lines)


def _paragraph(flag: Flag, width: int) -> list[str]:
    head = f"  {flag.name}={flag.default or ''}"
    parts = ["must be given"] if flag.default is None else []
    parts += [flag.description] if flag.description else []
    if len(flag.choices) > 1 and flag.choices != BOOLEANS:
        parts.append(f"({' | '.join(flag.choices)})")
    meaning = textwrap.wrap(" ".join(parts), width - _NAMES) or [""]
    if len(head) >= _NAMES:
        return [head, *(" " * _NAMES + line for line in meaning)]
    return [f"{head:<{_NAMES}}{meaning[0]}".rstrip(), *(" " * _NAMES + line for line in meaning[1:])]
