"""Where compiled kernels are kept, so that a restart finds them. No torch here."""

import os
import tempfile
from pathlib import Path

from services.common.errors import InvalidRequest
from services.common.host.private_files import WRITING, warn_if_shared

# Read by inductor and Triton when they compile, by FlashInfer when it is loaded.
_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def keep_compiled_code_in(directory: str) -> None:
    """Point every compiler's cache into ``directory``, which is made. Call it before any of them runs.

    Takes precedence over those compilers' own variables. Raises ``InvalidRequest`` where it cannot be written.
    """
    base = Path(directory).expanduser().absolute()
    try:
        for name in _VARIABLES.values():
            (base / name).mkdir(parents=True, exist_ok=True)
            # Only writing tells: permissions do not know of read-only mounts.
            with tempfile.TemporaryFile(dir=base / name):
                pass
    except OSError as error:
        raise InvalidRequest(
            f"flag compile_cache_dir={directory}: cannot write there ({error.strerror or error});"
            " choose a directory that this user may write, or leave the flag out",
            field="compile_cache_dir",
        ) from error
    # The compilers load and run what they find there.
    warn_if_shared("compiled code", [base, *(base / name for name in _VARIABLES.values())], WRITING)
    os.environ |= {variable: str(base / name) for variable, name in _VARIABLES.items()}
