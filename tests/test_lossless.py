from ddtree.engine import Sampling
from random_models import FAMILIES, NANO, PAIRS
from tools.lossless import SAMPLINGS, engines, row_of


def test_text_with_trees_is_the_text_without_for_every_model():
    samplings = (Sampling(), SAMPLINGS[2])
    rows = [row_of(name, engine, texts[:2], 24, (20,), samplings) for name, engine, texts in engines()]
    assert len(rows) == len(PAIRS) + len(NANO) + len(FAMILIES)
    assert all(row["tokens"] == 2 * 2 * 24 for row in rows)
    assert all(row["tokens_per_round"] > 1.2 for row in rows), "trees that accept nothing prove nothing"
