"""What the PTX machine must never let pass: races of random kernels, planted faults, pointers that go astray, endless
launches, and launches of other threads."""

import gc
import sys
import threading
import weakref
from typing import Annotated, Any

import numpy as np
import pytest
import race_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.cuda import PtxDevice, cuda, kernel, watch_launches
from ddtree.ptx import GlobalMemory, launch, load_ptx
from ddtree.ptx.text import PtxError


@settings(max_examples=250)
@given(race_oracle.KERNELS, st.booleans())
def test_a_random_kernel_races_exactly_if_vector_clocks_of_all_threads_say_so(made, apart):
    program, memory = load_ptx(race_oracle.text(made)), GlobalMemory()
    address = memory.bind(np.zeros(race_oracle.WORDS, "u4"))
    lanes = race_oracle.THREADS if apart else 1 << 16
    blocks = race_oracle.BLOCKS, race_oracle.THREADS
    try:
        launch(program, "k", *blocks, [address], memory, 0, check=True, count=False, lanes_at_once=lanes)
        found = False
    except PtxError as error:
        assert error.kind == "race", error
        found = True
    assert found == race_oracle.races(made, apart)
