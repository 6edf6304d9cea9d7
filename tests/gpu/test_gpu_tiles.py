"""Tensor cores, matrix loads and asynchronous copies: the GPU's bits are numpy's and the PTX machine's."""

import pytest

from tools import gpu_tiles


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_the_card_rounds_as_the_rule_says(gpu, kind):
    assert gpu_tiles.check_rule(gpu)[kind].startswith("as recorded")


def test_the_recorded_inputs_give_the_recorded_bits(gpu):
    assert sum(gpu_tiles.check_recorded(gpu).values()) == 26_624


def test_fresh_products_have_numpys_bits(gpu):
    assert len(gpu_tiles.check_products(gpu)) == 8


def test_matrix_loads_and_stores_are_those_of_the_machine(gpu):
    assert set(gpu_tiles.check_loads(gpu).values()) == {"equal"}


def test_asynchronous_copies_of_every_size_and_length(gpu):
    assert set(gpu_tiles.check_copies(gpu).values()) == {"equal"}


def test_pipelines_have_numpys_bits(gpu):
    assert set(gpu_tiles.check_pipelines(gpu).values()) == {"equal"}
