"""Bitwise checks that a token's logits do not depend on the pass they come from: `python tests/invariance.py`.

It is a program because OpenBLAS picks its kernels and threads when it is loaded: test_models.py runs it with others.
"""

import numpy as np

from ddtree.check import assert_equal
from ddtree.layers import KEY_BLOCK
from ddtree.models import Model, prefill
from random_models import FAMILIES, FIXTURES, NANO, PAIRS, random_engine


def random_tree(rng, n):
    return [int(rng.integers(-1, i)) if i else -1 for i in range(n)]


def path_to(node, parents):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def check_model(model, rng, prompt, nodes):
    """Nodes of a random tree against plain decoding and one prefill along their own paths."""
    vocabulary, taps = model.config.vocab_size, range(model.config.num_hidden_layers)
    text, tokens = rng.integers(0, vocabulary, size=prompt), rng.integers(0, vocabulary, size=nodes)
    parents, cache = random_tree(rng, nodes), model.new_cache()
    prefill(model, text, cache)
    single = model.new_cache()
    for token in text:
        single.commit(model.forward([token], [-1], single).new_kv, [0])
    for layer in range(model.config.num_hidden_layers):
        assert_equal(
            single.layer(layer), cache.layer(layer), name=f"cache of layer {layer}, token by token and by prefill"
        )
    tree = model.forward(tokens, parents, cache, taps)
    for node in rng.permutation(nodes)[:4]:
        path, one = path_to(int(node), parents), model.new_cache()
        prefill(model, text, one)
        for token in tokens[path[:-1]]:
            one.commit(model.forward([token], [-1], one).new_kv, [0])
        alone = model.forward(tokens[node : node + 1], [-1], one, taps)
        chain = [*text, *tokens[path]]
        whole = model.forward(chain, np.arange(len(chain)) - 1, model.new_cache(), taps)
        for name in ("logits", "features"):
            of_tree = getattr(tree, name)[node]
            assert_equal(of_tree, getattr(alone, name)[0], name=f"{name} of node {node} in a tree and alone")
            assert_equal(of_tree, getattr(whole, name)[-1], name=f"{name} of node {node} in a tree and in prefill")


def check_random(seed, family):
    rng = np.random.default_rng(seed)
    check_model(random_engine(seed, family=family).target, rng, int(rng.integers(1, KEY_BLOCK + 20)), 12)


def check_fixture(folder, absorb, prompt=70, nodes=65):
    check_model(Model.load(folder, absorb=absorb), np.random.default_rng(0), prompt, nodes)


def main():
    for family in FAMILIES:
        check_random(5, family)
    for name in NANO:
        check_fixture(FIXTURES / "models" / name, absorb=True)
    for name in PAIRS:
        check_fixture(FIXTURES / f"pycode_{name}" / "target", absorb=True, prompt=20)


if __name__ == "__main__":
    main()
