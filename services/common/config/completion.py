"""Shells' completion of ``key=value``: a script for each, with all names and choices in it, so that no program starts
when somebody presses the key. Where a value is free text, files are offered."""

import re
from collections.abc import Callable, Sequence

from services.common.config.flag import Flag, flags_of
from services.common.flags import Config, FlagError

OPTION = "--completion"


def completion(program: str, shell: str, kind: type[Config]) -> str:
    """The script of ``program``, whose flags are those of ``kind``. Raises ``FlagError`` for a shell that is not
    known."""
    if shell not in _SHELLS:
        raise FlagError(f"{OPTION} {shell}: expected one of {', '.join(_SHELLS)}")
    return _SHELLS[shell](program, flags_of(kind))


def _function(program: str) -> str:
    return "_" + re.sub(r"\W", "_", program)


def _quoted(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _bash(program: str, flags: Sequence[Flag]) -> str:
    cases = [f"        {flag.name}) words='{' '.join(flag.choices)}' ;;" for flag in flags if flag.choices]
    texts = "|".join(flag.name for flag in flags if flag.is_text)
    # Where = divides words, which it does unless the user says otherwise, only what is behind it is completed.
    return f"""\
# {program}: eval "$({program} {OPTION} bash)"
{_function(program)}() {{
    local line=${{COMP_LINE:0:COMP_POINT}} name value words= prefix=
    line=${{line##* }}
    COMPREPLY=()
    if [[ $line != *=* ]]; then
        words='{" ".join(f"{flag.name}=" for flag in flags)} help'
        COMPREPLY=($(compgen -W "$words" -- "$line"))
        [[ ${{COMPREPLY-}} == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    name=${{line%%=*}} value=${{line#*=}}
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=$name=
    case $name in
{chr(10).join(cases)}
        {texts or "-"})
            local IFS=$'\\n'
            COMPREPLY=($(compgen -P "$prefix" -f -- "$value"))
            if [[ -z $prefix ]]; then
                compopt -o filenames 2>/dev/null
            elif [[ ${{#COMPREPLY[@]}} == 1 && -d ${{COMPREPLY#*=}} ]]; then
                COMPREPLY+=/
                compopt -o nospace 2>/dev/null
            fi
            return ;;
    esac
    COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$value"))
}}
complete -F {_function(program)} {program}
"""


def _zsh(program: str, flags: Sequence[Flag]) -> str:
    cases = [f"        {flag.name}) compadd -- {' '.join(flag.choices)} ;;" for flag in flags if flag.choices]
    texts = "|".join(flag.name for flag in flags if flag.is_text)
    names = [f"        {_quoted(f'{flag.name}=:{flag.description}'.rstrip(':'))}" for flag in flags]
    return f"""\
#compdef {program}
# {program}: eval "$({program} {OPTION} zsh)", after compinit
{_function(program)}() {{
    if [[ $PREFIX != *=* ]]; then
        local -a flags=(
{chr(10).join(names)}
        )
        _describe -t flags flag flags -S ''
        return
    fi
    local name=${{PREFIX%%=*}}
    compset -P '*='
    case $name in
{chr(10).join(cases)}
        {texts or "-"}) _files ;;
    esac
}}
compdef {_function(program)} {program}
"""


def _fish(program: str, flags: Sequence[Flag]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def told(condition: str, *more: str) -> str:
        return " ".join([f"complete -c {program} -n {quoted(condition)}", *more])

    at = "(commandline -ct)"
    lines = [f"# {program}: {program} {OPTION} fish | source", f"complete -c {program} -f"]
    for flag in flags:
        description = f"-d {quoted(flag.description)}" if flag.description else ""
        lines.append(told(f'not string match -q "*=*" -- {at}', f"-a {quoted(flag.name + '=')}", description).rstrip())
        inside = f'string match -q "{flag.name}=*" -- {at}'
        if flag.choices:
            values = " ".join(f"{flag.name}={choice}" for choice in flag.choices)
            lines.append(told(inside, f"-a {quoted(values)}"))
        elif flag.is_text:
            lines.append(told(inside, "-F"))
    return "\n".join(lines) + "\n"


_SHELLS: dict[str, Callable[[str, Sequence[Flag]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
