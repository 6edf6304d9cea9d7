"""Whole rounds on the PTX machine: a recorded graph against numpy, round by round; texts against plain decoding."""

from dataclasses import dataclass

import numpy as np
import pytest

from ddtree.accept import Requests
from ddtree.check import assert_equal
from ddtree.compact import CompactPlan
from ddtree.cuda import PtxDevice, link, watch_launches
from ddtree.draft import DraftPlan
from ddtree.round import (
    RoundPlan,
    StandIn,
    StandInCache,
    StandInModel,
    forward_kernel,
    forward_ref,
    logits_kernel,
    propose_kernel,
    propose_ref,
    round_ref,
    rows_of_text,
    write_text_kernel,
)
from deep import DEEP

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

WATCHED, FAST = PtxDevice(), PtxDevice(check=False, count=False)
MODEL, POSITIONS, LONGEST, ROOM = StandIn(vocabulary=32, arrays=2, size=4), 4, 5, 64


@dataclass
class Serving:
    """Requests that are served by one recorded round, beside the same in numpy; arrays are changed in place."""

    requests: Requests
    cache: StandInCache
    budgets: np.ndarray
    texts: np.ndarray
    stops: np.ndarray
    plan: RoundPlan
    wanted: list

    @classmethod
    def make(cls, device, count, nodes, page, stops=0, seed=0):
        rng = np.random.default_rng(seed)
        pages = ROOM // page
        table = rng.permutation(count * pages).astype(np.int32).reshape(count, pages)
        cache = StandInCache(np.zeros((MODEL.arrays, count * pages, page, MODEL.size), np.uint32), table)
        requests = Requests(*(np.zeros(count, np.int64) for _ in range(3)))
        stop_rows = rng.integers(-1, 32, (count, stops)).astype(np.int64)
        draft = DraftPlan((count, POSITIONS, MODEL.vocabulary), budget=nodes - 1, device=device)
        compact = CompactPlan(cache.rows, nodes, row_axes=1, paged=True, device=device)
        texts = np.full((count, ROOM), -1, np.int64)
        plan = RoundPlan(
            draft, compact, requests, texts=texts, longest=LONGEST, stop_tokens=stop_rows, page_table=table
        )
        return cls(requests, cache, np.full(count, nodes - 1, np.int32), texts, stop_rows, plan, [None] * count)

    def record(self):
        nodes, device = self.plan.draft.places, self.plan.device
        there = StandInModel(MODEL, self.cache, self.requests, POSITIONS, nodes, device)
        return self.plan.graph(there.propose, there.verify, budget=self.budgets)

    def admit(self, rng, r):
        """A new request in place r: a prompt in the cache and in the text, but for its last token."""
        nodes = self.plan.draft.places
        prompt = rng.integers(0, 32, rng.integers(1, 8))
        tokens = int(rng.integers(1, ROOM - nodes - len(prompt)))
        page = self.cache.rows.shape[2]
        for at, row in enumerate(rows_of_text(prompt[:-1], MODEL.arrays * MODEL.size)):
            self.cache.rows[:, self.cache.page_table[r, at // page], at % page] = row.reshape(MODEL.arrays, -1)
        self.texts[r] = -1
        self.texts[r, : len(prompt)] = prompt
        self.requests.root_tokens[r], self.requests.lengths[r] = prompt[-1], len(prompt) - 1
        self.requests.remaining[r], self.wanted[r] = tokens, (prompt, tokens)

    def check_text(self, r):
        """The text of a request that ended, and its cache, are those of plain decoding, up to a stop token."""
        prompt, tokens = self.wanted[r]
        text = MODEL.decode(prompt, tokens)
        ends = np.flatnonzero(np.isin(text[len(prompt) :], self.stops[r]))
        text = text[: len(prompt) + ends[0] + 1] if ends.size else text
        assert_equal(self.texts[r], np.pad(text, (0, ROOM - len(text)), constant_values=-1), "text")
        at, page = np.arange(len(text) - 1), self.cache.rows.shape[2]
        rows = self.cache.rows[:, self.cache.page_table[r, at // page], at % page].swapaxes(0, 1).reshape(len(at), -1)
        assert_equal(rows, rows_of_text(text[:-1], rows.shape[1]), "cache")

    def copy(self):
        state = Requests(*(values.copy() for values in vars(self.requests).values()))
        return state, StandInCache(self.cache.rows.copy(), self.cache.page_table)

    def step_ref(self, state, cache):
        """The round in numpy, on copies of the state and the cache."""
        nodes = self.plan.draft.places
        logits = propose_ref(state.lengths, POSITIONS, MODEL.vocabulary)

        def verify(trees):
            pad = ((0, 0), (0, nodes - trees.tokens.shape[1]))
            return np.pad(forward_ref(MODEL, cache, trees, state)[0], pad)

        return round_ref(logits, self.budgets, state, verify, cache.rows, self.stops, LONGEST, cache.page_table)


def serve(serving, rounds, seed):
    """Replay so many rounds; places are given to new requests at random, budgets change; returns how many ended."""
    rng, graph, ended, moved = np.random.default_rng(seed), serving.record(), 0, 0
    for _ in range(rounds):
        for r in np.flatnonzero(serving.requests.remaining == 0):
            if serving.wanted[r] is not None:
                serving.check_text(r)
                serving.wanted[r], ended = None, ended + 1
            if rng.random() < 0.5:
                serving.admit(rng, r)
        serving.budgets[:] = rng.integers(0, serving.plan.draft.places, len(serving.budgets))
        state, cache = serving.copy()
        _, accepted, after = serving.step_ref(state, cache)
        graph.replay()
        made = serving.plan.accepted
        for name in ("counts", "tokens", "nodes", "ends"):
            assert_equal(getattr(made, name), getattr(accepted, name), name)
        for name, values in vars(after).items():
            assert_equal(getattr(serving.requests, name), values, name)
        assert_equal(serving.cache.rows, cache.rows, "the whole cache")
        prefix = (accepted.nodes == np.arange(LONGEST)) | (accepted.nodes < 0)
        moved += int((~prefix.all(axis=1)).sum())
    return ended, moved


@pytest.mark.parametrize(("page", "stops"), [(1, 0), (4, 1), (16, 0), (64, 2)])
def test_a_recorded_round_is_the_references_for_requests_that_come_and_go(page, stops):
    serving = Serving.make(FAST, count=12, nodes=9, page=page, stops=stops, seed=page)
    rounds = 400 if DEEP else 40
    ended, moved = serve(serving, rounds, seed=page)
    assert ended > rounds // 2 and moved > rounds  # the test means something only if requests end and rows move


def test_thousands_of_rounds_of_the_reference_give_the_texts_of_plain_decoding():
    serving, rng, rounds = Serving.make(FAST, count=1, nodes=17, page=4, stops=1), np.random.default_rng(5), 0
    serving.budgets[:] = 16
    while rounds < (20_000 if DEEP else 2_000):
        serving.admit(rng, 0)
        while serving.requests.remaining[0]:
            _, accepted, after = serving.step_ref(serving.requests, serving.cache)
            start, count = serving.requests.lengths[0] + 1, accepted.counts[0]
            serving.texts[0, start : start + count] = accepted.tokens[0, :count]
            for name, values in vars(after).items():
                getattr(serving.requests, name)[:] = values
            rounds += 1
        serving.check_text(0)


def test_a_round_without_a_race_and_what_ended_stays_as_it_is():
    serving, rng = Serving.make(WATCHED, count=2, nodes=9, page=4), np.random.default_rng(1)
    serving.admit(rng, 0)
    serving.requests.root_tokens[1], serving.requests.lengths[1] = 7, 5
    graph, pages, before = serving.record(), serving.cache.page_table[1], serving.texts[1].copy()
    serving.cache.rows[:, pages] = 77
    while serving.requests.remaining[0]:
        graph.replay()
    serving.check_text(0)
    assert [int(values[1]) for values in vars(serving.requests).values()] == [7, 5, 0]
    assert (serving.cache.rows[:, pages] == 77).all() and serving.plan.accepted.counts[1] == 0
    assert_equal(serving.texts[1], before, "text")


def test_a_row_of_the_target_without_a_choice_ends_its_request_alone():
    serving, rng = Serving.make(FAST, count=2, nodes=9, page=4), np.random.default_rng(2)
    for r in range(2):
        serving.admit(rng, r)
    serving.requests.remaining[:] = 12
    there = StandInModel(MODEL, serving.cache, serving.requests, POSITIONS, 9, FAST)

    def verify(draft, stream):
        logits = there.verify(draft, stream)
        logits[0, 0, 3] = np.nan
        return logits

    lengths = serving.requests.lengths.copy()
    serving.plan.run(there.propose, verify)
    assert serving.plan.accepted.ends.tolist() == [-1, 0]
    assert serving.requests.remaining[0] == 0 and serving.requests.lengths[0] == lengths[0]
    assert serving.requests.lengths[1] > lengths[1]


def test_tokens_instead_of_logits_are_taken_too():
    serving, rng = Serving.make(FAST, count=2, nodes=9, page=16), np.random.default_rng(3)
    for r in range(2):
        serving.admit(rng, r)
    there, choices = (
        StandInModel(MODEL, serving.cache, serving.requests, POSITIONS, 9, FAST),
        np.zeros((2, 9), np.int64),
    )

    def verify(draft, stream):
        choices[:] = there.verify(draft, stream).argmax(axis=2)
        return choices

    while serving.requests.remaining.any():
        serving.plan.run(there.propose, verify)
    serving.check_text(0)
    serving.check_text(1)


def test_a_recorded_round_has_eleven_launches_and_no_more():
    serving = Serving.make(FAST, count=2, nodes=9, page=16)
    with watch_launches() as seen:
        serving.record()
    assert len(seen) == 11


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_kernel_compiles_for_every_architecture_without_spills(arch):
    for kernel in (propose_kernel, forward_kernel, logits_kernel, write_text_kernel):
        assert " 0 bytes spill stores" in link(kernel.ptx(arch), arch)[1], kernel.name


def test_plans_of_different_trees_are_refused():
    serving = Serving.make(FAST, count=1, nodes=9, page=4)
    other = CompactPlan(serving.cache.rows, 8, row_axes=1, paged=True, device=FAST)
    with pytest.raises(ValueError, match=r"9 places .* 8 nodes"):
        RoundPlan(serving.plan.draft, other, serving.requests)
