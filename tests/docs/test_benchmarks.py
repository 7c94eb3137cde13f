"""The README's plot shows figures that were measured."""

import runpy
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "benchmarks.py"))


def test_every_figure_of_the_plot_is_one_of_the_measurements(program):
    measured = (ROOT / "docs" / "performance" / "gpu.md").read_text()
    for bar in (*program["SAMPLING"], *program["MIXED"], *program["LATENCY"]):
        for figure in bar.figures:
            assert f" {figure} " in measured, f"{bar.name}: {figure}"


def test_the_plot_can_be_drawn(program, tmp_path):
    program["draw"](tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
