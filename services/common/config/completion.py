"""Shell completion of flags and their values.

The script of each shell holds all names and choices, so that completing starts no program. Where a value is free text,
files are offered. ``flag=value``, ``--flag=value`` and ``--flag value`` are all completed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from services.common.config.flag import Flag, flags_of
from services.common.flags import Config, FlagError

OPTION = "--completion"


class _Shell(NamedTuple):
    """The two functions that make the script for one shell."""

    complete: Callable[[str, str, Sequence[Flag]], str]  # (program, function, flags) -> a function that completes them
    register: Callable[[str, Sequence[str]], str]  # (program, its commands) -> what calls these functions


def completion(program: str, shell: str, commands: Mapping[str, type[Config]]) -> str:
    """Return the script that completes the flags of each command of ``program``.

    A program without commands has one with an empty name. Raises ``FlagError`` for an unknown shell.
    """
    if shell not in _SHELLS:
        raise FlagError(f"{OPTION} {shell}: expected one of {', '.join(_SHELLS)}")
    made = _SHELLS[shell]
    parts = [made.complete(program, command, flags_of(kind)) for command, kind in commands.items()]
    names = [command for command in commands if command]
    # zsh reads the first line of a file.
    return made.register(program, names).replace("FUNCTIONS\n", "".join(parts))


def _function(program: str, command: str = "") -> str:
    return "_" + re.sub(r"\W", "_", f"{program} {command}".strip())


def _quoted(text: str) -> str:
    """Quote for bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _alternatives(flags: Sequence[Flag]) -> str:
    """Return a pattern of ``case`` that matches the names of ``flags``."""
    return "|".join(flag.name for flag in flags) or "-"


def _bash(program: str, command: str, flags: Sequence[Flag]) -> str:
    choices = "\n".join(f"        {flag.name}) words='{' '.join(flag.choices)}' ;;" for flag in flags if flag.choices)
    names = " ".join(f"{flag.name}=" for flag in flags)
    options = " ".join(f"{flag.option}{'' if flag.is_boolean else '='}" for flag in flags)
    # Where = divides words, which is bash's default, only the part behind it is completed.
    return f"""\
{_function(program, command)}() {{
    local line=${{COMP_LINE:0:COMP_POINT}} word previous name= value words= prefix=
    word=${{line##* }} previous=${{line% *}} previous=${{previous##* }}
    COMPREPLY=()
    if [[ $word == *=* ]]; then
        name=${{word%%=*}} value=${{word#*=}}
        [[ $COMP_WORDBREAKS == *=* ]] || prefix=$name=
    elif [[ $previous == --?* && $previous != *=* ]]; then
        name=$previous value=$word
    fi
    name=${{name#--}} name=${{name//-/_}}
    [[ $word == *=* ]] || case $name in {_alternatives([flag for flag in flags if flag.is_boolean])}) name= ;; esac
    if [[ -z $name ]]; then
        words='{names} help'
        [[ $word == -* ]] && words='{options} --help'
        COMPREPLY=($(compgen -W "$words" -- "$word"))
        [[ ${{COMPREPLY-}} == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    case $name in
{choices}
        {_alternatives([flag for flag in flags if flag.is_text])})
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
"""


def _register_bash(program: str, commands: Sequence[str]) -> str:
    cases = "".join(f"        {name}) {_function(program, name)} ;;\n" for name in commands)
    chosen = f"""\
{_function(program)}() {{
    local -a typed
    read -ra typed <<< "${{COMP_LINE:0:COMP_POINT}}x"
    if (( ${{#typed[@]}} == 2 )); then
        COMPREPLY=($(compgen -W '{" ".join(commands)} --help' -- "${{COMP_WORDS[COMP_CWORD]}}"))
        return
    fi
    case ${{typed[1]}} in
{cases}    esac
}}
"""
    return f"""\
# {program}: eval "$({program} {OPTION} bash)"
FUNCTIONS
{chosen if commands else ""}complete -F {_function(program)} {program}
"""


def _zsh(program: str, command: str, flags: Sequence[Flag]) -> str:
    def described(spelling: str, flag: Flag) -> str:
        return f"            {_quoted(f'{spelling}:{flag.description}'.rstrip(':'))}\n"

    choices = "".join(
        f"        {flag.name}) compadd -- {' '.join(flag.choices)} ;;\n" for flag in flags if flag.choices
    )
    names = "".join(described(f"{flag.name}=", flag) for flag in flags)
    plain = "".join(described(flag.option, flag) for flag in flags if flag.is_boolean)
    valued = "".join(described(f"{flag.option}=", flag) for flag in flags if not flag.is_boolean)
    return f"""\
{_function(program, command)}() {{
    local name= previous=${{words[CURRENT-1]}}
    if [[ $PREFIX == *=* ]]; then
        name=${{${{${{PREFIX%%=*}}#--}}//-/_}}
        compset -P '*='
    elif [[ $previous == --?* && $previous != *=* ]]; then
        name=${{${{previous#--}}//-/_}}
        case $name in {_alternatives([flag for flag in flags if flag.is_boolean])}) name= ;; esac
    fi
    if [[ -z $name && $PREFIX == -* ]]; then
        local -a plain=(
{plain}        ) valued=(
{valued}        )
        _describe -o -t options option plain
        _describe -o -t options option valued -S ''
        return
    elif [[ -z $name ]]; then
        local -a flags=(
{names}        )
        _describe -t flags flag flags -S ''
        return
    fi
    case $name in
{choices}        {_alternatives([flag for flag in flags if flag.is_text])}) _files ;;
    esac
}}
"""


def _register_zsh(program: str, commands: Sequence[str]) -> str:
    cases = "".join(f"        {name}) {_function(program, name)} ;;\n" for name in commands)
    chosen = f"""\
{_function(program)}() {{
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(commands)}
        return
    fi
    case ${{words[2]}} in
{cases}    esac
}}
"""
    return f"""\
#compdef {program}
# {program}: eval "$({program} {OPTION} zsh)", after compinit
FUNCTIONS
{chosen if commands else ""}compdef {_function(program)} {program}
"""


def _fish(program: str, command: str, flags: Sequence[Flag]) -> str:
    seen = f"__fish_seen_subcommand_from {command}; and " if command else ""

    def line(condition: str, *more: str) -> str:
        return " ".join([f"complete -c {program} -n {_quoted_for_fish(seen + condition)}", *filter(None, more)]) + "\n"

    at = "(commandline -ct)"
    lines = []
    for flag in flags:
        description = f"-d {_quoted_for_fish(flag.description)}" if flag.description else ""
        option, values = f"-l {flag.option.removeprefix('--')}", f"-a {_quoted_for_fish(' '.join(flag.choices))}"
        kind = "" if flag.is_boolean else "-rF" if flag.is_text else f"-x {values}" if flag.choices else "-x"
        lines.append(line("true", option, kind, description))
        lines.append(line(f'not string match -q "*=*" -- {at}', f"-a {_quoted_for_fish(flag.name + '=')}", description))
        inside = f'string match -q "{flag.name}=*" -- {at}'
        if flag.choices:
            whole = " ".join(f"{flag.name}={choice}" for choice in flag.choices)
            lines.append(line(inside, f"-a {_quoted_for_fish(whole)}"))
        elif flag.is_text:
            lines.append(line(inside, "-F"))
    return "".join(lines)


def _register_fish(program: str, commands: Sequence[str]) -> str:
    chosen = f"complete -c {program} -n __fish_use_subcommand -a '{' '.join(commands)}'\n" if commands else ""
    return f"""\
# {program}: {program} {OPTION} fish | source
complete -c {program} -f
{chosen}FUNCTIONS
"""


def _quoted_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS = {
    "bash": _Shell(_bash, _register_bash),
    "zsh": _Shell(_zsh, _register_zsh),
    "fish": _Shell(_fish, _register_fish),
}
