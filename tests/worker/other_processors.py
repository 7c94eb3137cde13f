"""Products compiled as on processors other than this one."""

import contextlib
from collections.abc import Iterator

import pytest

from services.worker.layers import pairs_cpu, products_cpu

_MADE = products_cpu.make_product, products_cpu.make_team_product, products_cpu.compiled_product


@contextlib.contextmanager
def compiled_for(*, rows: int, tiles: bool | None = None, pairs: bool | None = None) -> Iterator[None]:
    """Compile products for a processor whose registers hold the sums of ``rows`` rows.

    ``tiles`` and ``pairs``: whether it has these instructions for bfloat16; None = as this processor. Products that
    were made before or meanwhile are made again afterwards.
    """
    _forget()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products_cpu, "most_rows", lambda: rows)
        if tiles is not None:
            patched.setattr(products_cpu, "multiplies_tiles", lambda: tiles)
        if pairs is not None:
            patched.setattr(pairs_cpu, "multiplies_bfloat16", lambda: pairs)
        yield
    _forget()


def _forget() -> None:
    for made in _MADE:
        made.cache_clear()
