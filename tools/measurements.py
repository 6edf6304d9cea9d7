"""Write what the records say: `python -m tools.measurements` makes their page, its chart and README lines.

From `fixtures/measurements/*.json` it writes README.md and draft_tree.svg beside them, and the lines of the project's
README.md between two markers. `--check` compares instead and exits 1 where they differ.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from math import log10
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "fixtures" / "measurements"
BUDGETS = (16, 64, 256, 1024)
AIMS = {16: 20, 64: 25, 256: 40, 1024: 80}
MARKERS = "<!-- measured: written by tools/measurements.py -->\n", "<!-- end of measured -->"
STACK = ("torch.topk", "torch.logsumexp", "to the host", "heap in Python", "visibility in numpy", "to the GPU")
FIRST_PARTS = {
    "to_first_tree_s": "`python -c` to the first tree", "python_s": "Python", "import_s": "imports",
    "device_and_logits_s": "device, logits", "first_call_s": "first call",
}  # fmt: skip
ONE, PEAKED = "[15, 151936] float32", "[15, 151936] float32, peaked"
BATCH = "[64, 15, 151936] bfloat16"


def read(name: str) -> dict[str, Any]:
    """A record by its name without .json."""
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def rows(record: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a record with these values."""
    return [row for row in record["rows"] if all(row.get(name) == value for name, value in wanted.items())]


def median(found: list[dict[str, Any]]) -> float:
    """The median of the one row that was found; raises SystemExit for none or several."""
    if len(found) != 1:
        raise SystemExit(f"tools.measurements: found {len(found)} rows where one was expected: {found[:2]}")
    return float(found[0]["us"]["median"])


def pipeline(record: dict[str, Any], logits: str, budget: int) -> float:
    """Logits to a laid-out tree, in µs."""
    return median(rows(record, group="pipeline", logits=logits, budget=budget, step="draft_tree"))


def stack(record: dict[str, Any], budget: int) -> float:
    """The same by torch, a Python heap and numpy masks, in µs of wall time."""
    steps = rows(record, group="stack", logits=ONE, budget=budget)
    return sum(median([row for row in steps if row["step"] == step]) for step in STACK)


def where(record: dict[str, Any]) -> str:
    """Card or processor, date, versions and command of a record, as one line."""
    environment = record.get("environment", {})
    machine = "; ".join(environment.get("gpus") or [environment.get("cpu", record.get("gpu", "unknown"))])
    packages = environment.get("packages", {})
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("numpy", "numba-cuda", "cuda-core") if packages.get(name)
    )
    compiled = f" Compiled: {record['compiled']}." if record.get("compiled") else ""
    today = f" Today: `{command}`." if (command := today_command(record["command"])) != record["command"] else ""
    if (script := re.match(r"python (\S+\.py)", command)) and not (ROOT / script[1]).exists():
        today = " This script was not kept."
    known = machine, record.get("date", "date not recorded"), versions or "versions not recorded"
    note = "" if record.get("date") else f" {record['note']}"
    return f"{'; '.join(known)}; `{record['command']}`.{today}{compiled}{note}"


def today_command(command: str) -> str:
    """A recorded command as it is run today: some scripts were in tests/ then and are modules of tools now."""
    script = re.match(r"python tests/(\w+)\.py", command)
    if script is None or not (ROOT / "tools" / f"{script[1]}.py").exists():
        return command
    return f"python -m tools.{script[1]}{command[script.end() :]}"


def unsaid(record: dict[str, Any]) -> list[str]:
    """What a record does not say of its run: its date, the versions."""
    said = {"date": record.get("date"), "versions": record.get("environment", {}).get("packages")}
    return [name for name, value in said.items() if not value]


def table(head: list[str], lines: list[list[str]]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines]) + "\n"


def draft_section(record: dict[str, Any]) -> str:
    """Logits to a finished tree."""
    lines = []
    for logits, name in (
        (ONE, "normal × 4: trees of two or three levels"),
        (PEAKED, "normal × 16: trees of 15 levels"),
    ):
        lines.append([f"`draft_tree`, {name}", *(f"{pipeline(record, logits, budget):.1f}" for budget in BUDGETS)])
        steps = [row["step"] for row in rows(record, group="pipeline", logits=logits, budget=64)][1:]
        for step in steps:
            found = (median(rows(record, group="pipeline", logits=logits, budget=b, step=step)) for b in BUDGETS)
            lines.append([f"of that: `{step}`", *(f"{value:.1f}" for value in found)])
    lines.append(
        ["torch.topk, logsumexp, Python heap, numpy masks: wall time", *(f"{stack(record, b):,.0f}" for b in BUDGETS)]
    )
    lines.append(["our aim", *(str(AIMS[budget]) for budget in BUDGETS)])
    return table(["[15, 151936] float32, µs in a graph, at a budget of", *map(str, BUDGETS)], lines)


def batch_section(record: dict[str, Any]) -> str:
    """64 requests at once."""
    found = rows(record, group="pipeline", logits=BATCH, budget=64)
    lines = [[f"`{row['step']}`", f"{row['us']['median']:.0f}"] for row in found]
    lines += [
        [f"{row['step']} in a graph", f"{row['us']['median']:,.0f}"]
        for row in rows(record, group="torch in a graph", logits=BATCH)
    ]
    lines.append(["floor: the logits read once", f"{found[0]['floor_us']:.0f}"])
    return table(["[64, 15, 151936] bfloat16, 64 nodes", "µs"], lines)


def builder_section(record: dict[str, Any]) -> str:
    """The builder alone, both kernels."""
    lines = []
    for kind in ("normal", "bfloat16", "peaked"):
        for step in ("build_trees", "build_trees_one_warp"):
            cells = []
            for budget in (64, 128, 256, 1024):
                pair = (
                    median(rows(record, group="builder", rows=kind, budget=budget, requests=n, step=step))
                    for n in (1, 64)
                )
                cells.append(" / ".join(f"{value:,.1f}" for value in pair))
            lines.append([f"`{step}`, {kind}", *cells])
    return table(["1 / 64 requests, µs, nodes:", "64", "128", "256", "1024"], lines)


def first_call_section(record: dict[str, Any]) -> str:
    """What a user meets first: the parts of a fresh process, and with torch the first call and later ones."""
    fresh = [
        [row["kernels"], *(f"{row[part]['median']:.2f} s" for part in FIRST_PARTS)] for row in record["first_tree"]
    ]
    lines = [
        [row["kernels"], f"{row['first_call_s']:.2f} s", f"{row['host_us_a_call']['median']:.0f} µs"]
        for row in record["rows"]
    ]
    calls = table(["with torch, machine code", "first call", "the host, a later call into places of ours"], lines)
    return table(["a fresh process, machine code", *FIRST_PARTS.values()], fresh) + "\n" + calls


CALLS = (
    "plan.run", "plan.run, numbers of the host", "draft_tree", "draft_tree, all results read", "replay", "in a graph",
)  # fmt: skip


def calls_of(record: dict[str, Any], logits: str, budget: int) -> list[float]:
    """Microseconds of each of `CALLS`: of the host, the last one of the GPU."""
    found = {row["call"]: row for row in record["times"] if (row["logits"], row["budget"]) == (logits, budget)}
    return [found[call].get("host_us", found[call].get("gpu_us"))["median"] for call in CALLS]


def plan_section(record: dict[str, Any]) -> str:
    """What a call costs the host, beside what it costs the GPU."""
    sizes = dict.fromkeys((row["logits"], row["budget"]) for row in record["times"])
    lines = [[f"{logits}, {budget} nodes", *(f"{us:.1f}" for us in calls_of(record, logits, budget))]
             for logits, budget in sizes]  # fmt: skip
    heads = (
        "`plan.run`",
        "with numbers of the host that change",
        "`draft_tree`",
        "and all results read",
        "a replay",
        "the GPU, in a graph",
    )
    return table(["torch's tensors, µs of the host", *heads], lines) + "\n" + two_figures(record)


def two_figures(plan: dict[str, Any]) -> str:
    """Why the time in a graph is not that of the first table."""
    tree = read("tree_h200")
    here, many = (calls_of(plan, logits, 64)[-1] for logits in (ONE, BATCH))
    return f"""\
One tree of 64 nodes takes {here:.1f} µs in a graph here and {pipeline(tree, ONE, 64):.1f} in the first table: here two
logits of 9.1 MB take turns, which the L2 cache of 50 MB holds; there eight do, which it does not. The logits of 64
requests fit neither way, and take {many:.0f} and {pipeline(tree, BATCH, 64):.0f}.
"""


def text_section(record: dict[str, Any]) -> str:
    """The second top-k kernel as three texts, with both runs."""
    lines = []
    for name in dict.fromkeys(row["text"] for row in record["rows"]):
        found = rows(record, text=name)
        times = [
            [f"{row['us']['median']:.1f}" for row in found if (row["step"] == "draft_tree") == whole]
            for whole in (False, True)
        ]
        lines.append([name, str(found[0]["registers"]), *(" / ".join(pair) for pair in times)])
    return table(["64 requests, µs, two runs", "registers", "second top-k kernel", "`draft_tree`"], lines)


def decoding_section(record: dict[str, Any]) -> str:
    """Decoding on a CPU."""
    lines, plain = [], next(row for row in record["rows"] if not row["budget"])["tokens_per_second"]["median"]
    for row in record["rows"]:
        speed = row["tokens_per_second"]
        lines.append([
            "plain decoding" if not row["budget"] else str(row["budget"]),
            f"{speed['median']:.0f} ({speed['q1']:.0f} to {speed['q3']:.0f})",
            f"{row['tokens_per_round']:.2f}", f"{plain * row['tokens_per_round'] / speed['median']:.1f}",
        ])  # fmt: skip
    return table(
        ["budget", "tokens per second (quartiles)", "tokens per round", "a round costs, in plain passes"], lines
    )


def mutation_section(record: dict[str, Any]) -> str:
    """What became of changed models, by what was changed."""
    names = ["tried", "read", "clear line", "told by its numbers", "escapes", "weights read in vain"]
    return table(
        ["changed", *names], [[row["reader"], *(f"{row[name]:,}" for name in names)] for row in record["rows"]]
    )


TOP = """# Measurements

Written by `python -m tools.measurements` from the records beside it. Every record has its machine, its date, its
versions and its command as it was run then. The exceptions: {exceptions}.
Times on a GPU are medians inside a CUDA graph unless a line says otherwise; "of that": a kernel alone, in a graph.
"""
SHOWN = "tree_h200", "first_call_h200", "plan_h200", "topk_select_h200", "cpu_decoding", "mutations"
FALLBACK = "Rows of zeros and trees beyond what shared memory holds fall back to the search of one warp."


def top() -> str:
    """The head of the page, with the records that do not say all."""
    lacking = {path.name: unsaid(read(path.stem)) for path in sorted(RECORDS.glob("*.json"))}
    exceptions = [f"{name} (no {' and no '.join(missing)})" for name, missing in lacking.items() if missing]
    return TOP.format(exceptions=", ".join(exceptions))


def page() -> str:
    """The text of fixtures/measurements/README.md."""
    tree, decoding = read("tree_h200"), read("cpu_decoding")
    parts = [top(), f"## Logits to a finished tree\n\n{where(tree)}\n\n![chart](draft_tree.svg)\n"]
    parts += [draft_section(tree), batch_section(tree)]
    parts.append(f"## The tree builder alone\n\n{FALLBACK}\n\n{builder_section(tree)}")
    first, texts = read("first_call_h200"), read("topk_select_h200")
    parts.append(f"## The first call\n\n{where(first)}\n\n{first_call_section(first)}")
    plan = read("plan_h200")
    parts.append(f"## Every call, and a call in a graph\n\n{where(plan)}\n\n{plan_section(plan)}")
    parts.append(f"## Registers of the second top-k kernel\n\n{where(texts)}\n\n{text_section(texts)}")
    parts.append(f"## Decoding on a CPU\n\n{where(decoding)}\n\n{decoding_section(decoding)}")
    parts.append(f"## Models with one change\n\n{where(read('mutations'))}\n\n{mutation_section(read('mutations'))}")
    others = sorted(path for path in RECORDS.glob("*.json") if path.stem not in SHOWN)
    listed = [f"- [{path.name}]({path.name}): {where(read(path.stem))}" for path in others]
    return "\n".join([*parts, "## The other records\n", *listed]) + "\n"


def chart() -> str:
    """Bars, log scale: our time and the stack's at each budget, as SVG text."""
    record, left, width, top = read("tree_h200"), 210, 430, 34
    bars = [(budget, pipeline(record, ONE, budget), stack(record, budget)) for budget in BUDGETS]
    parts, y = [], top
    for budget, ours, theirs in bars:
        parts.append(f'<text x="8" y="{y + 19}" font-weight="bold">budget {budget:,}</text>')
        for value, color, name in ((ours, "#2a6f97", "draft_tree"), (theirs, "#b9b9b9", "torch and Python")):
            length = width * log10(value) / 4
            parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end" fill="#444">{name}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="15" fill="{color}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 12}">{value:,.{int(value < 100)}f} µs</text>')
            y += 18
        y += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y}" font-family="sans-serif" font-size="12">'
    title = "<title>Logits to a finished tree on an H200, microseconds, logarithmic</title>"
    back = f'<rect width="760" height="{y}" fill="white"/>'
    label = (
        '<text x="8" y="20" font-size="13">[15, 151936] float32 logits to a laid-out tree, H200, µs (log scale): '
        "draft_tree in a graph, the other by the clock</text>"
    )
    return "\n".join([head, title, back, label, *parts, "</svg>"]) + "\n"


def host_lines(first: dict[str, Any], plan: dict[str, Any]) -> str:
    """What the README says of the first tree and of every later call."""
    made, kept = (row["to_first_tree_s"]["median"] for row in first["first_tree"])
    run, _, call, _, replay, _ = calls_of(plan, ONE, 64)
    return (
        f"From `python -c` to the first tree: {made:.1f} s, {kept:.1f} s once machine code is kept; no compiler is "
        f"installed.\n"
        f"  Afterwards `plan.run` costs the host {run:.0f} µs, `draft_tree` {call:.0f}, a replay {replay:.0f}."
    )


def attention_lines(record: dict[str, Any], joined: Callable[[list[float]], str]) -> str:
    """What the README says of attention."""
    times = {(row["nodes"], row["context"]): row for row in record["times"]}
    tree, torch, one = ([times[nodes, context][key] for context in (1024, 8192, 32768)]
                        for nodes, key in ((65, "us"), (65, "torch_us"), (1, "us")))  # fmt: skip
    return f"""\
- Attention of 65 nodes to 1,024 / 8,192 / 32,768 keys, 32 heads of 128, 8 key heads, bfloat16: **{joined(tree)} µs**;
  torch with the same mask {joined(torch)}. Plain decoding: {joined(one)}. A node's bits are those of plain
  decoding of its path: {record["one result"]} results in trees of 1 to 1,025 nodes, none differs."""


def round_lines(record: dict[str, Any]) -> str:
    """What the README says of a round's end."""
    rounds = {
        row["path"]: row for row in record["times"]["rounds"] if row["requests"] == 1 and row["logits"] == "bfloat16"
    }
    soak = record["soak"]
    moved, still = (rounds[path]["walk_and_compaction_us"] for path in (6, 1))
    return f"""\
- The walk and the compaction of 36 layers: {moved:.1f} µs for a path of 6, {still:.1f} where nothing moves.
  {soak["replays"]:,} replayed rounds of a stand-in model gave the {soak["tokens"]:,} tokens of plain decoding."""


def readme_lines() -> str:
    """The lines for the README."""
    robust = read("ptx_faults")
    faults, correct, threads, strays = (robust[name] for name in ("faults", "correct", "threads", "strays"))
    found = sum(row["found"] for row in faults)
    tree, decoding = read("tree_h200"), read("cpu_decoding")
    one, peaked = ([pipeline(tree, logits, budget) for budget in BUDGETS] for logits in (ONE, PEAKED))
    torch = next(row["us"]["median"] for row in rows(tree, group="torch in a graph", logits=ONE, budget=64))
    batch = pipeline(tree, BATCH, 64)
    first = read("first_call_h200")
    best = max(decoding["rows"], key=lambda row: row["tokens_per_round"])
    plain = next(row for row in decoding["rows"] if not row["budget"])

    def joined(values: list[float]) -> str:
        return " / ".join(f"{value:.1f}" for value in values)

    changed = read("mutations")
    peak, keys = changed["peak_mib"], ("clear line", "told by its numbers", "escapes")
    refused, told, escaped = (sum(row[key] for row in changed["rows"]) for key in keys)
    floor, slow = rows(tree, group="pipeline")[0]["floor_us"], best["tokens_per_second"]["median"]
    return f"""\
- One request's logits to a laid-out tree on an H200, in one graph, budgets 16 / 64 / 256 / 1,024: **{joined(one)} µs**;
  peaked logits, whose trees have all 15 levels: {joined(peaked)}.
- torch.topk alone takes {torch:.0f} µs for the same logits; one read of them takes {floor:.1f}.
- 64 requests in bfloat16: {batch:.0f} µs, against an aim of 110.
{attention_lines(read("attention_h200"), joined)}
{round_lines(read("round_h200"))}
- {host_lines(first, read("plan_h200"))}
- On two CPU cores a tree brings up to {best["tokens_per_round"]:.2f} tokens per round and no speed: plain decoding runs
  at {plain["tokens_per_second"]["median"]:.0f} tokens per second, a budget of {best["budget"]} at {slow:.0f}.
- The PTX machine finds {found} of {len(faults)} planted races and flags {len(correct["flagged"])} of
  {correct["kernels"]} correct kernels; {threads["wrong"]} of {threads["launches"]:,} launches by {threads["threads"]}
  threads on one device go wrong; {strays["caught"]:,} of {strays["offsets"]:,} stray pointers are caught.
- Of {changed["cases"]:,} models with one change in a file {refused:,} were refused in a clear line, no weight read;
  {told} were when their weights gave no number; {escaped} ended in another error; the others ran. Peak: {peak} MiB.
"""


def written() -> dict[Path, str]:
    """Every file that this tool writes, with its text."""
    readme = ROOT / "README.md"
    start, end = MARKERS
    text = re.sub(
        f"{re.escape(start)}.*{re.escape(end)}",
        lambda _: start + readme_lines() + end,
        readme.read_text("utf-8"),
        flags=re.S,
    )
    return {RECORDS / "README.md": page(), RECORDS / "draft_tree.svg": chart(), readme: text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    wrong = [(path, text) for path, text in written().items() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in wrong:
        verdict = "not what the records say; run: python -m tools.measurements" if check else "written"
        print(f"{path.relative_to(ROOT)}: {verdict}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
