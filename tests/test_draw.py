"""Drawings of draft trees: the recorded rounds, then generated trees, then hostile tokens and paths."""

import os
import re
import subprocess
import sys
import time
import unicodedata
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.draw import TreeView, plot_acceptance, plot_budgets, plot_ranks, tree_svg, tree_text, visible_text
from ddtree.kdtr import load
from ddtree.tree import DraftTree, build_tree, follow_tree, top_log_probs

matplotlib.use("Agg")
FIXTURES = Path(__file__).parent.parent / "fixtures"
SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("root", "drafted", "bonus", "accepted")


def byte_text(token):
    return bytes([token]) if token < 256 else f"<{token}>"


def make_tree(parents, scores=None, tokens=None):
    """A tree from its links; scores default to falling ones in index order."""
    n = len(parents)
    depths = np.zeros(n, np.int32)
    for node in range(1, n):
        depths[node] = depths[parents[node]] + 1
    scores = -np.arange(n) / 4 if scores is None else np.array(scores, np.float64)
    tokens = np.arange(97, 97 + n) if tokens is None else np.array(tokens)
    return DraftTree(tokens.astype(np.int64), np.array(parents, np.int32), depths, scores, np.zeros(n, np.int32))


def recorded_round(prompt, number, budget):
    """The tree of one recorded round with what the target took of it."""
    recorded = load(FIXTURES / "e2e_qwen3.kdtr")
    text = recorded[f"{prompt}.ar_tokens"]
    first = int(recorded[f"{prompt}.b64.acceptance_lengths"][:number].sum())
    logits = recorded[f"{prompt}.b64.draft_logits"][number]
    tree = build_tree(*top_log_probs(logits, budget), budget, root_token=text[first])
    return tree, *follow_tree(tree, text[np.minimum(first + 1 + tree.depths, len(text) - 1)])


def corners(edge):
    """The corners of one edge of a path: rounded corners become their control points."""
    start, *commands = re.findall(r"([MHQV])([^MHQV]*)", edge)
    points = [tuple(map(int, start[1].split()))]
    for letter, numbers in commands:
        values = list(map(int, numbers.split()))
        if letter == "Q":
            points.append((values[0], values[1]))
        elif letter == "H":
            last = (values[0], points[-1][1])
    return [*points, last]


def layers(svg):
    """The layers of a picture: (name, group)."""
    return [(group.get("class").removeprefix("ddt-"), group) for group in ElementTree.fromstring(svg).iter(f"{SVG}g")]


def read(svg):
    """Nodes by index, or "bonus": (kind, left, top, right, bottom, rx); and a list of edges: (kind, corners)."""
    boxes, edges = {}, []
    for kind, group in layers(svg):
        for shape in group:
            title = shape.find(f"{SVG}title")
            if title is not None:
                index = "bonus" if kind == "bonus" else int(re.search(r": node (\d+), ", title.text)[1])
                assert index not in boxes, f"node {index} is drawn twice"
                if shape.tag == f"{SVG}rect":
                    x, y, width, height = (int(shape.get(name)) for name in ("x", "y", "width", "height"))
                    boxes[index] = (kind, x, y, x + width, y + height, int(shape.get("rx")))
                else:
                    left, middle, half, right = re.match(r"M(\d+) (\d+)L\d+ (\d+)H\d+L(\d+) ", shape.get("d")).groups()
                    half = int(middle) - int(half)
                    boxes[index] = (kind, int(left), int(middle) - half, int(right), int(middle) + half, None)
            elif shape.get("fill") == "none":
                edges += [(kind, corners("M" + edge)) for edge in shape.get("d").split("M")[1:]]
    return boxes, edges


def check_geometry(tree, svg, accepted=(), bonus=None):
    """Every node once, edges from parent to child, no overlap, no crossing, everything inside the picture."""
    boxes, edges = read(svg)
    assert set(boxes) == {*range(len(tree)), *(["bonus"] if bonus is not None else [])}
    parents = dict(enumerate(tree.parents.tolist())) | ({"bonus": int(accepted[-1])} if bonus is not None else {})
    left_of = {(x, (top + bottom) // 2): index for index, (_, x, top, _, bottom, _) in boxes.items()}
    right_of = {(x, (top + bottom) // 2): index for index, (_, _, top, x, bottom, _) in boxes.items()}
    assert len(left_of) == len(right_of) == len(boxes)
    links = [(right_of[points[0]], left_of[points[-1]], kind, points) for kind, points in edges]
    assert sorted((str(child), parent) for parent, child, _, _ in links) == sorted(
        (str(child), parent) for child, parent in parents.items() if child != 0
    )
    assert all(kind == boxes[child][0] for _, child, kind, _ in links)
    root = ElementTree.fromstring(svg)
    places = np.array([box[1:5] for box in boxes.values()])
    assert places[:, 0].min() >= 20 and places[:, 1].min() > 31
    assert places[:, 2].max() < int(root.get("width")) and places[:, 3].max() < int(root.get("height"))
    for one in range(len(places)):
        x0, y0, x1, y1 = places[one]
        others = np.delete(places, one, axis=0)
        assert not ((others[:, 0] < x1) & (others[:, 2] > x0) & (others[:, 1] < y1) & (others[:, 3] > y0)).any()
    segments = np.array(
        [
            (parent, min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]), max(a[1], b[1]))
            for parent, _, _, points in links
            for a, b in pairwise(points)
        ]
    ).reshape(-1, 5)
    for parent, x0, y0, x1, y1 in segments:
        others = segments[segments[:, 0] != parent]
        assert not ((others[:, 1] <= x1) & (others[:, 3] >= x0) & (others[:, 2] <= y1) & (others[:, 4] >= y0)).any()
        assert not ((places[:, 0] < x1) & (places[:, 2] > x0) & (places[:, 1] < y1) & (places[:, 3] > y0)).any()


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3"])
@pytest.mark.parametrize("number", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("max_labels", [0, 20, 96])
def test_recorded_trees_are_drawn_without_overlaps_or_crossings(prompt, number, max_labels):
    tree, accepted, bonus = recorded_round(prompt, number, 64)
    svg = tree_svg(tree, accepted, bonus, byte_text, max_labels)
    check_geometry(tree, svg, accepted, bonus)
    boxes, _ = read(svg)
    assert [index for index, box in boxes.items() if box[0] == "accepted"] == accepted.tolist()
    tall = {index for index, box in boxes.items() if box[4] - box[2] == 22}
    assert len(tall) == max(len(accepted) + 1, min(max_labels, len(boxes))) and {*accepted.tolist(), "bonus"} <= tall


def test_readme_picture_is_what_the_code_draws():
    tree, accepted, bonus = recorded_round("p1", 1, 24)
    stored = (FIXTURES / "readme_tree.svg").read_text(encoding="utf-8")
    assert tree_svg(tree, accepted, bonus, byte_text) == stored, "if the change is meant, store the new text"


@pytest.mark.parametrize("change", [-1e-6, 1e-6])
def test_readme_picture_does_not_hang_on_the_last_bits_of_the_scores(change):
    tree, accepted, bonus = recorded_round("p1", 1, 24)
    moved = DraftTree(tree.tokens, tree.parents, tree.depths, tree.scores * (1 + change), tree.ranks)
    assert tree_svg(moved, accepted, bonus, byte_text) == tree_svg(tree, accepted, bonus, byte_text)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_same_bytes_in_another_process_with_another_hash_seed_and_no_matplotlib(seed):
    code = """
import sys
import numpy as np
from ddtree.draw import DraftTree, tree_svg
links, depths, scores = np.array([-1, 0, 0, 1], np.int32), np.array([0, 1, 1, 2], np.int32), -np.arange(4.0)
tree = DraftTree(np.arange(4), links, depths, scores, np.zeros(4, np.int32))
sys.stdout.buffer.write(tree_svg(tree, [0, 2], 7).encode())
assert "matplotlib" not in sys.modules, "matplotlib takes half a second to import and is needed by the plots alone"
"""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(FIXTURES.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    tree = make_tree([-1, 0, 0, 1], [0, -1, -2, -3], [0, 1, 2, 3])
    assert done.stdout == tree_svg(tree, [0, 2], 7).encode()


@st.composite
def trees(draw):
    n = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, n)]
    scores = [0.0] + [draw(st.floats(-800, 0)) for _ in range(1, n)]
    tree = make_tree(parents, scores, draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)))
    return tree, tree.path(draw(st.integers(0, n - 1)))


@settings(max_examples=60, deadline=None)
@given(trees(), st.sampled_from([None, 0, 65]), st.integers(0, 45))
def test_any_tree_is_drawn_without_overlaps_or_crossings(case, bonus, max_labels):
    tree, accepted = case
    svg = tree_svg(tree, accepted, bonus, byte_text, max_labels)
    check_geometry(tree, svg, accepted, bonus)
    assert len(tree_text(tree, accepted, bonus, byte_text).splitlines()) == len(tree) + (bonus is not None)


def test_siblings_stand_in_the_order_of_their_probability():
    tree = make_tree([-1, 0, 0, 0, 2], [0, -3, -1, -2, -1.5])
    boxes, _ = read(tree_svg(tree))
    assert boxes[2][2] < boxes[3][2] < boxes[1][2]
    assert boxes[0][2] == boxes[2][2] == boxes[4][2], "the most probable path is one straight row"


def test_accepted_path_differs_in_shape_colour_and_line():
    svg = tree_svg(make_tree([-1, 0, 0, 1]), [0, 1], 99)
    boxes, edges = read(svg)
    kinds = {index: box[0] for index, box in boxes.items()}
    assert kinds == {0: "accepted", 1: "accepted", 2: "drafted", 3: "drafted", "bonus": "bonus"}
    assert {(box[0], box[5]) for box in boxes.values()} == {("accepted", 2), ("drafted", 11), ("bonus", None)}
    assert sorted(kind for kind, _ in edges) == ["accepted", "bonus", "drafted", "drafted"]
    lines = {kind: group for kind, group in layers(svg) if any(path.get("fill") == "none" for path in group)}
    assert float(lines["accepted"].get("stroke-width")) >= 2 * float(lines["drafted"].get("stroke-width"))
    assert len({group.get("fill") for group in lines.values()}) == len({g.get("stroke") for g in lines.values()}) == 3


def luminance(colour):
    channels = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """The contrast ratio of WCAG 2."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def mixed(fill, card, opacity):
    pairs = [(int(fill[start : start + 2], 16), int(card[start : start + 2], 16)) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(a * opacity + b * (1 - opacity)):02x}" for a, b in pairs)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("accepted, bonus", [([0, 1], 99), ((), None)])
def test_contrast_is_enough_in_both_themes(theme, accepted, bonus):
    svg = tree_svg(make_tree([-1, 0, 0, 1, 3], [0, -1e-9, -30, -1e-9, -1e-9]), accepted, bonus)
    colours = {name: (group.get("fill"), group.get("stroke")) for name, group in layers(svg)}
    if theme == "dark":
        style = ElementTree.fromstring(svg).find(f"{SVG}style").text
        assert style.startswith("@media (prefers-color-scheme:dark){") and style.endswith("}")
        dark = {name: pair for name, *pair in re.findall(r"\.ddt-(\w+)\{fill:(\S+?);stroke:(\S+?)\}", style)}
        assert set(dark) >= set(colours)
        colours = dark
    card, ink = colours["card"][0], colours["ink"][0]
    assert contrast(colours["note"][0], card) >= 4.5
    shapes = [(name, shape) for name, group in layers(svg) if name in KINDS for shape in group]
    for fill, stroke, opacity in [(*colours[name], float(shape.get("fill-opacity", 0))) for name, shape in shapes]:
        assert contrast(stroke, card) >= 3
        assert contrast(ink, mixed(fill, card, opacity)) >= 4.5


def test_fill_grows_with_probability_and_the_tooltip_tells_it():
    svg = tree_svg(make_tree([-1, 0, 0, 0], [0, -0.1, -1, -6]))
    shapes = [shape for name, group in layers(svg) if name in KINDS for shape in group if len(shape)]
    opacities = [float(shape.get("fill-opacity")) for shape in shapes]
    assert opacities == sorted(set(opacities), reverse=True) and len(opacities) == 4
    assert [shape[0].text for shape in shapes][1::2] == [
        "98 (token 98): node 1, probability 90.5%, depth 1, drafted",
        "100 (token 100): node 3, probability 0.248%, depth 1, drafted",
    ]


def test_a_root_alone_is_a_picture():
    tree = make_tree([-1])
    check_geometry(tree, tree_svg(tree, token_text=byte_text))
    check_geometry(tree, tree_svg(tree, [0], 98), [0], 98)
    assert tree_text(tree) == "○ 97 100%"


def test_picture_is_accessible():
    tree, accepted, bonus = recorded_round("p1", 1, 24)
    root = ElementTree.fromstring(tree_svg(tree, accepted, bonus, byte_text))
    assert root.get("role") == "img"
    assert (root[0].tag, root[0].text) == (f"{SVG}title", "Draft tree (drafted tokens: 24, accepted: 7)")
    assert root[1].tag == f"{SVG}desc" and root[1].text.endswith("Accepted path: R e t u r n ␣ t. Bonus token: h.")


def test_the_largest_tree_is_quick_and_small():
    tree, accepted, bonus = recorded_round("p0", 5, 1024)
    start = time.process_time()
    svg = tree_svg(tree, accepted, bonus, byte_text)
    assert time.process_time() - start < 1
    assert len(tree) == 1025 and len(svg.encode()) < 400_000
    check_geometry(tree, svg, accepted, bonus)
    assert len(dict(layers(svg))["ink"]) == 96
    tall = [index for index, box in read(svg)[0].items() if box[4] - box[2] == 22]
    likeliest = np.argsort(-tree.scores, kind="stable")
    assert len(tall) == 96 and {*accepted.tolist(), "bonus", *likeliest[:80].tolist()} <= set(tall)


def test_a_chain_of_a_thousand_is_no_recursion():
    tree = make_tree(list(range(-1, 1024)))
    check_geometry(tree, tree_svg(tree, range(1025), 5), range(1025), 5)
    assert tree_text(tree).count("\n") == 1024


@pytest.mark.parametrize("token", range(256))
def test_every_byte_gives_well_formed_xml(token):
    (label,) = dict(layers(tree_svg(make_tree([-1], tokens=[token]), token_text=byte_text)))["ink"]
    if 33 <= token < 127:
        assert label.text == chr(token)
    elif token >= 128:
        assert label.text == f"\\x{token:02x}"
    assert label.text.isprintable() and " " not in label.text


@given(st.text(st.characters(codec=None), max_size=30) | st.binary(max_size=30), st.integers(1, 20))
def test_any_text_becomes_visible_and_fits(text, limit):
    seen = visible_text(text, limit)
    assert 1 <= len(seen) <= limit
    assert not re.search(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", seen)
    seen.encode("utf-8")
    root = ElementTree.fromstring(tree_svg(make_tree([-1]), [0], 9, lambda _: text))
    assert visible_text(text) in root.find(f"{SVG}desc").text


def test_no_control_format_or_space_character_stays():
    unicode = unicodedata.ucd_3_2_0  # the same in every version of Python
    visible_formats = {"\u06dd", "\u070f"}  # signs that enclose or precede letters, but are seen
    for character in set(map(chr, range(sys.maxunicode + 1))) - visible_formats:
        if unicode.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}:
            assert re.fullmatch(r"[␣⏎⇥]|\\[a-zA-Z0-9]+", visible_text(character)), hex(ord(character))


def test_a_shape_holds_its_label():
    words = [" return", "漢字漢字漢字", "x", "a_rather_long_name"]
    tree = make_tree([-1, 0, 1], tokens=range(3))
    boxes, _ = read(tree_svg(tree, [0, 1, 2], 3, words.__getitem__))
    widths = {index: box[3] - box[1] for index, box in boxes.items()}
    assert widths == {0: 8 * 7 + 12, 1: 8 * 12 + 12, 2: 22, "bonus": 8 * 12 + 12}, "8 pixels a cell, and a margin"


def test_a_text_is_cut_to_cells_not_to_characters():
    assert visible_text("abcdef", 6) == "abcdef"
    assert visible_text("abcdefg", 6) == "abcde…"
    assert visible_text("漢字漢字", 8) == "漢字漢字"
    assert visible_text("漢字漢字", 7) == "漢字漢…"
    assert visible_text("漢字漢字", 6) == "漢字…"
    assert visible_text("ab", 1) == "…"


def test_text_drawing_of_a_small_tree():
    tree = make_tree([-1, 0, 0, 1, 1, 2], np.log([1, 0.6, 0.3, 0.0996, 0.0004, 0.0955]), list(b"r \nx<y"))
    assert tree_text(tree, [0, 1, 4], 65, byte_text) == (
        "● r 100%\n├─ ● ␣ 60%\n│  ├─ ○ x 10%\n│  └─ ● < <0.1%\n│     └─ ◆ A bonus\n└─ ○ ⏎ 30%\n   └─ ○ y 9.6%"
    )
    assert tree_text(tree, width=9) == ("○ 114 10…\n├─ ○ 32 …\n│  ├─ ○ …\n│  └─ ○ …\n└─ ○ 10 …\n   └─ ○ …")


def test_no_token_can_steer_a_terminal():
    drawing = tree_text(make_tree([-1, 0]), token_text=lambda _: "\x1b[2J\x9b\x07\u202e")
    assert drawing.splitlines()[0] == "○ \\x1b[2J\\x9b… 100%"


def test_a_tree_shows_itself_in_a_notebook():
    tree, accepted, bonus = recorded_round("p1", 1, 24)
    assert tree._repr_svg_() == tree_svg(tree)
    view = TreeView(tree, accepted, bonus, byte_text, max_labels=10)
    assert view._repr_svg_() == tree_svg(tree, accepted, bonus, byte_text, 10)
    assert repr(view) == tree_text(tree, accepted, bonus, byte_text)


@pytest.mark.parametrize(
    "accepted, message",
    [
        ([1], r"accepted\[0\] is node 1, whose parent is 0, not -1"),
        ([0, 3], r"accepted\[1\] is node 3, whose parent is 1, not 0"),
        ([0, 1, 1], r"accepted\[2\] is node 1, whose parent is 0, not 1"),
        ([0, 4], r"accepted\[1\] is 4, but the tree's nodes are 0 to 3"),
        ([0, -1], r"accepted\[1\] is -1, but the tree's nodes are 0 to 3"),
        ([0.0, 1.0], r"accepted is float64 of shape \(2,\)"),
        ([[0, 1]], r"accepted is int64 of shape \(1, 2\)"),
        ([True, False], r"accepted is bool of shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("draw", [tree_svg, tree_text])
def test_a_wrong_path_is_refused_with_its_step(draw, accepted, message):
    with pytest.raises(ValueError, match=message):
        draw(make_tree([-1, 0, 0, 1]), accepted)


def test_other_wrong_arguments_are_refused():
    tree = make_tree([-1, 0])
    with pytest.raises(ValueError, match="bonus is 5 but accepted is empty"):
        tree_svg(tree, (), 5)
    with pytest.raises(ValueError, match="max_labels is -1, allowed is 0 or more"):
        tree_svg(tree, max_labels=-1)
    with pytest.raises(ValueError, match="limit of a text is 0 cells, allowed is 1 or more"):
        tree_text(tree, width=0)
    with pytest.raises(TypeError, match=r"token_text\(97\) returned int, allowed are str and bytes"):
        tree_svg(tree, token_text=lambda token: token)
    with pytest.raises(ValueError, match=r"acceptance_lengths is \[3, 0\]"):
        plot_acceptance([3, 0])
    with pytest.raises(ValueError, match=r"acceptance_lengths is \[\]"):
        plot_acceptance([])
    with pytest.raises(ValueError, match="0 prompts"):
        plot_budgets([1], {})
    with pytest.raises(ValueError, match="'a' has 1 means for 2 budgets"):
        plot_budgets([1, 2], {"a": [1.0]})
    with pytest.raises(ValueError, match="no drafted token was accepted"):
        plot_ranks([(tree, [0])])
    with pytest.raises(ValueError, match="most is 0"):
        plot_ranks([(tree, [0, 1])], most=0)


def test_acceptance_plot_shows_every_round_and_the_mean():
    rounds, histogram = plot_acceptance([3, 1, 3, 5])
    assert [bar.get_height() for bar in rounds.patches] == [3, 1, 3, 5]
    assert rounds.lines[0].get_ydata()[0] == 3
    assert [bar.get_width() for bar in histogram.patches] == [1, 2, 1]
    assert rounds.figure.get_size_inches().tolist() == [8, 3]


def test_budget_plot_shows_every_prompt():
    axes = plot_budgets([15, 64], {"a": [4.0, 5.0], "b": [3.0, 3.5]})
    assert [line.get_ydata().tolist() for line in axes.lines] == [[4, 5], [3, 3.5]]
    assert len({line.get_marker() for line in axes.lines}) == 2, "lines differ in shape too"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["15", "64"]


def test_rank_plot_counts_accepted_nodes():
    tree = DraftTree(
        *(np.array([1, 2, 3], np.int64), np.array([-1, 0, 1], np.int32), np.array([0, 1, 2], np.int32)),
        *(np.array([0.0, -1, -2]), np.array([-1, 0, 9], np.int32)),
    )
    axes = plot_ranks([(tree, [0, 1, 2]), (tree, [0, 1]), (tree, [0])], most=4)
    assert axes.images[0].get_array().tolist() == [[0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert [text.get_text() for text in axes.texts] == ["2", "1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3", "4+"]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
