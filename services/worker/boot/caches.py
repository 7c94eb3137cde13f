"""The directory of compiled kernels, which a restart reuses. This module does not import torch."""

import os
import tempfile
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.host.private_files import WRITING, warn_if_shared

# Environment variable -> subdirectory. Inductor and Triton read theirs when they compile, FlashInfer and numba when
# they are loaded.
_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba",
}


def keep_compiled_code_in(directory: str) -> None:
    """Set the cache of every compiler to a subdirectory of ``directory``.

    Call it before FlashInfer and numba are loaded. Creates the directories and overwrites the compilers' own variables.
    Raises ``InvalidRequest`` if ``directory`` cannot be written.
    """
    base = Path(directory).expanduser().absolute()
    try:
        for name in _VARIABLES.values():
            (base / name).mkdir(parents=True, exist_ok=True)
            # Write a file, since permissions do not show that a file system is mounted read-only.
            with tempfile.TemporaryFile(dir=base / name):
                pass
    except OSError as error:
        raise InvalidRequest(
            f"flag compile_cache_dir={directory}: cannot write there ({error.strerror or error});"
            " choose a directory that this user may write, or leave the flag out",
            field="compile_cache_dir",
        ) from error
    # The compilers run the code in these directories, so other users must not be able to write it.
    warn_if_shared("compiled code", [base, *(base / name for name in _VARIABLES.values())], WRITING)
    os.environ |= {variable: str(base / name) for variable, name in _VARIABLES.items()}
