"""The fingerprint of a model's files. Workers compare it to detect different revisions. No torch."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from services.common.model.checkpoint_files import weight_paths
from services.common.model.files import read_config
from services.common.model.gguf_file import is_gguf

_DIGEST_BYTES = 8
_FIRST_BYTES = 1 << 16  # of each file, which begins with a header: names, shapes and dtypes of its tensors
# Training changes most weights, so a few samples show it. To read all weights would take minutes.
_SAMPLES = 32  # of all files together, at least one of each
_SAMPLE_BYTES = 1 << 12


def model_fingerprint(directory: Path, *, weights: bool) -> str:
    """Return a digest of ``config.json`` and, with ``weights``, of the sizes and samples of the weight files.

    ``directory`` may also be a GGUF file, whose configuration is in its header. It is read as a weight file, also
    without ``weights``. Raises ``InvalidRequest`` if a file is missing.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if not is_gguf(directory):
        digest.update(json.dumps(read_config(directory), sort_keys=True).encode())
    paths = weight_paths(directory) if weights or is_gguf(directory) else []
    for path in paths:
        for part in _parts(path, -(-_SAMPLES // len(paths))):
            digest.update(part)
    return digest.hexdigest()


def _parts(path: Path, samples: int) -> Iterator[bytes]:
    """Yield name and size of a file, its first bytes, and ``samples`` parts at equal distances, up to its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        yield f"{path.name} {size}\n".encode()
        yield file.read(_FIRST_BYTES)
        for index in range(samples):
            file.seek(max(0, size - _SAMPLE_BYTES) * (index + 1) // samples)
            yield file.read(_SAMPLE_BYTES)
