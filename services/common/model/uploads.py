"""Directories of uploaded weights: ``toka-uploads/OWNER/UPDATE_ID`` in the first of ``weight_directories``."""

import hashlib
import os
import socket
from pathlib import Path

_FOLDER = "toka-uploads"
_UNIX = "unix:"


def uploads_folder(directory: str | Path) -> Path:
    """Return the directory of the uploads of all workers below ``directory``, the first of ``weight_directories``."""
    return Path(directory).expanduser().resolve() / _FOLDER


def uploads_of(directory: str | Path, address: str) -> Path:
    """Return the directory of the uploads to the worker at ``address`` of this host."""
    if address.startswith(_UNIX):
        address = _UNIX + os.path.abspath(address.removeprefix(_UNIX))
    owner = hashlib.blake2b(f"{socket.gethostname()} {address}".encode(), digest_size=8).hexdigest()
    return uploads_folder(directory) / owner
