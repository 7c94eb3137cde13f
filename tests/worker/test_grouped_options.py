"""Which kernel multiplies grouped weights, and with which options."""

import pytest
import torch

from services.worker.layers.grouped import GroupedLinear, GroupedWeights
from tests.worker.interpreter import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("bits", "group", "outputs", "offsets", "supported"),
    [
        (4, 32, 72, True, True), (8, 128, 72, False, True),
        (8, 128, 72, True, False), (8, 32, 72, False, True), (8, 96, 72, False, False), (4, 128, 70, False, False),
    ],
)  # fmt: skip
def test_what_the_kernel_of_hopper_takes(monkeypatch, bits, group, outputs, offsets, supported):
    from services.worker.layers import triton_grouped

    linear = GroupedLinear(3 * 256, outputs, bits=bits, group=group, offsets=offsets)
    for hopper in (False, True):
        monkeypatch.setattr(triton_grouped, "is_hopper", lambda _, hopper=hopper: hopper)
        assert triton_grouped.supports_wide(GroupedWeights.of(linear)) == (supported and hopper)


@pytest.mark.parametrize("programs", [1, 78, 114, 132, 144])
def test_shared_blocks_fill_the_multiprocessors_at_most_once(programs):
    from services.worker.layers.triton_grouped import share_blocks

    for blocks in range(1, 300):
        for tiles in (1, 15, 16, 17, 32, 112, 519):
            shared, parts = share_blocks(blocks, tiles, programs)
            assert shared * parts <= programs
            assert (blocks - shared) % programs == 0 or shared == 0
            assert parts == 1 or tiles >= 8 * parts
    assert share_blocks(448, 32, 132) == (52, 2)
    assert share_blocks(64, 112, 132) == (64, 2)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (4096, 4096), (4096, 28672), (14336, 4096)])
def test_a_start_runs_each_kernel_of_a_product(inputs, outputs):
    from services.worker.layers.triton_grouped import choose_rows, choose_tiles, most_fused_rows, row_changes

    with torch.device("meta"):
        weights = GroupedWeights.of(GroupedLinear(inputs, outputs, bits=4))
    changes = row_changes(weights)
    most = most_fused_rows(outputs, inputs)
    assert {9, 17, 33, most + 1} <= set(changes)
    few, many = range(1, 17), range(17, most + 1)
    begun = {choose_rows(rows, weights) for rows in {1, *changes}.intersection(few)}
    assert begun == {choose_rows(rows, weights) for rows in few}
    begun = {choose_tiles(outputs, inputs, rows, weights) for rows in set(changes).intersection(many)}
    assert begun == {choose_tiles(outputs, inputs, rows, weights) for rows in many}


@pytest.mark.parametrize(("bits", "group", "most"), [(4, 32, 3072), (4, 128, None), (8, 32, 1536)])
def test_many_rows_on_hopper_leave_its_kernel_where_slices_are_faster(monkeypatch, bits, group, most):
    from services.worker.layers import triton_grouped

    monkeypatch.setattr(triton_grouped, "is_hopper", lambda _: True)
    called = []
    for name in ("launch_wide", "multiply_slices"):
        monkeypatch.setattr(triton_grouped, name, lambda x, *_, name=name: called.append((len(x), name)))
    linear = GroupedLinear(128, 72, bits=bits, group=group)
    for rows in (512, 1536, 1537, 3072, 3073, 8192):
        triton_grouped.grouped_product(torch.zeros(rows, 128), linear.codes, linear.scales, None, None, bits)
    assert called == [(rows, "launch_wide" if rows <= (most or rows) else "multiply_slices") for rows, _ in called]
    assert len(called) == 6
    changes = triton_grouped.row_changes(GroupedWeights.of(linear))
    assert [each for each in changes if each > 300] == ([] if most is None else [most + 1])


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (4096, 28672), (14336, 1024)])
def test_a_start_on_hopper_runs_each_kernel_of_a_product(monkeypatch, inputs, outputs):
    from services.worker.layers import triton_grouped

    monkeypatch.setattr(triton_grouped, "is_hopper", lambda _: True)
    with torch.device("meta"):
        weights = GroupedWeights.of(GroupedLinear(inputs, outputs, bits=4))
    changes = triton_grouped.row_changes(weights)
    assert {9, 17, 33, 65, 129} <= set(changes)
    options = {rows: triton_grouped.choose_wide(rows, weights) for rows in range(33, 9000)}
    assert {rows: options[rows].rows for rows in (64, 65, 256, 8192)} == {64: 64, 65: 128, 256: 256, 8192: 256}
    begun = {options[rows] for rows in changes if rows in options}
    assert begun == set(options.values())


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("rows", [17, 129, 256])
def test_tiles_fit_into_the_shared_memory_of_gpus_before_hopper(rows, offsets):
    from services.worker.layers.triton_grouped import choose_tiles

    with torch.device("meta"):
        weights = GroupedWeights.of(GroupedLinear(14336, 5120, bits=4, offsets=offsets))
    assert choose_tiles(5120, 14336, rows, weights).rows <= 128
