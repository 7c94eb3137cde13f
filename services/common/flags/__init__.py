"""Flags: their types, the rules between them, and the one parser of command lines and environment variables.

Used once at the start of a program, by its main thread.
"""

from services.common.flags.command_line import (
    ENV_PREFIX,
    asks_for_help,
    load,
    misspelt,
    notes,
    read_environment,
    split_arguments,
    without_flags,
)
from services.common.flags.config import Config, Examples, Translation, build
from services.common.flags.errors import FlagError
from services.common.flags.rules import CudaOnly, Excludes, Needs, Rule, cuda_only
from services.common.flags.values import (
    AutoBool,
    AutoInt,
    Bool,
    Float,
    Int,
    Ints,
    Strings,
    arithmetic,
    as_text,
    distinct,
    each,
    true_false,
    types_of,
    within,
)
