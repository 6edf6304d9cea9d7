"""Time the PTX machine: `python -m tools.bench_ptx` writes `fixtures/measurements/ptx_groups.json`.

Instructions: a straight run of 400 of them on one block of 1,024 lanes, less an empty run, by 400. Kernels: a whole
launch by the number of groups it ran, with and without the checks and counts.
"""

import sys
import time
from pathlib import Path

import numpy as np

from ddtree.bench import spread, write_measurement
from ddtree.ptx import GlobalMemory, load_ptx

ROOT = Path(__file__).parent.parent
INSTRUCTIONS = {
    "add.s32": "%r1, %r2, %r3",
    "mul.lo.s32": "%r1, %r2, %r3",
    "mad.lo.s32": "%r1, %r2, %r3, %r4",
    "mul.wide.u32": "%d1, %r2, %r3",
    "add.s64": "%d1, %d2, %d3",
    "and.b32": "%r1, %r2, %r3",
    "shl.b32": "%r1, %r2, 3",
    "min.s32": "%r1, %r2, %r3",
    "popc.b32": "%r1, %r2",
    "setp.lt.s32": "%p1, %r2, %r3",
    "selp.b32": "%r1, %r2, %r3, %p2",
    "cvt.u64.u32": "%d1, %r2",
    "add.f32": "%r1, %r2, %r3",
    "mul.f32": "%r1, %r2, %r3",
    "fma.rn.f32": "%r1, %r2, %r3, %r4",
    "div.rn.f32": "%r1, %r2, %r3",
    "max.f32": "%r1, %r2, %r3",
    "setp.gt.f32": "%p1, %r2, %r3",
    "ex2.approx.ftz.f32": "%r1, %r2",
    "rcp.approx.f32": "%r1, %r2",
    "add.f64": "%d1, %d2, %d3",
    "fma.rn.f64": "%d1, %d2, %d3, %d4",
    "cvt.rzi.s32.f32": "%r1, %r2",
    "shfl.sync.bfly.b32": "%r1, %r2, 16, 31, -1",
    "ld.global.u32": "%r1, [%d5]",
    "ld.shared.u32": "%r1, [%r5]",
}
HEAD = """.version 9.5
.target sm_120
.shared .align 16 .b8 tile[4096];
.entry k(.param .u64 a) { .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %d<6>;
ld.param.u64 %d5, [a]; mov.u32 %r5, %tid.x; mad.wide.u32 %d5, %r5, 4, %d5; shl.b32 %r5, %r5, 2;
    ld.global.u32 %r2, [%d5];
st.shared.u32 [%r5], %r2; ld.global.u32 %r3, [%d5+4096]; ld.global.u32 %r4, [%d5+8192]; cvt.f64.f32 %d2, %r2;
cvt.f64.f32 %d3, %r3; cvt.f64.f32 %d4, %r4; setp.lt.u32 %p2, %r5, 2000; bar.sync 0;
"""


def seconds(text):
    """The time of one launch on one block of 1,024 lanes, without checks and counts."""
    x, memory, program = np.random.default_rng(0).standard_normal(3072).astype("f4"), GlobalMemory(), load_ptx(text)
    address = memory.bind(x)
    start = time.perf_counter()
    program.launch("k", 1, 1024, [address], memory=memory, check=False, count=False)
    return time.perf_counter() - start


def instructions(repeats=25):
    """Microseconds of each instruction; each round goes through all, so that a busy moment does not hit one alone."""
    texts = {opcode: HEAD + f"{opcode} {operands};\n" * 400 + "ret; }" for opcode, operands in INSTRUCTIONS.items()}
    rounds = [
        {opcode: seconds(text) for opcode, text in [*texts.items(), ("", HEAD + "ret; }")]} for _ in range(repeats + 1)
    ]
    empty = min(each[""] for each in rounds)
    return [
        {"opcode": opcode, "microseconds": spread([(each[opcode] - empty) / 400 * 1e6 for each in rounds[1:]])}
        for opcode in texts
    ]


def kernel(blocks, check, count, repeats=5):
    """The best-first search of fixtures/ptx, one warp a block."""
    program, memory = load_ptx((ROOT / "fixtures/ptx/best_first.ptx").read_text()), GlobalMemory()
    scores = np.random.default_rng(0).standard_normal(40 * blocks)
    arrays = (scores, np.zeros(16 * blocks, "i4"), np.zeros(16 * blocks))
    flat = [[0, 0, a.size, a.itemsize, memory.bind(a), a.size, a.itemsize] for a in arrays]
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        counters = program.launch(
            "best_first", blocks, 32, [*flat[0], 40, *flat[1], *flat[2]], memory=memory, check=check, count=count
        ).counters
        times.append((time.perf_counter() - start) / counters.groups * 1e6)
    return {
        "kernel": "best_first",
        "blocks": blocks,
        "check": check,
        "count": count,
        "groups": counters.groups,
        "warp_instructions": counters.warp_instructions,
        "microseconds_a_group": spread(times[1:]),
    }


def main():
    rows = instructions()
    kernels = [
        kernel(blocks, check, count)
        for blocks in (1, 32)
        for check, count in ((True, True), (True, False), (False, False))
    ]
    path = ROOT / "fixtures" / "measurements" / "ptx_groups.json"
    write_measurement(path, "python -m tools.bench_ptx", {"lanes": 1024, "instructions": rows, "kernels": kernels})
    for row in rows:
        print(f"{row['opcode']:20} {row['microseconds']['q1']:6.2f} {row['microseconds']['median']:6.2f} us")
    for row in kernels:
        print(
            row["kernel"],
            row["blocks"],
            row["check"],
            row["count"],
            f"{row['microseconds_a_group']['median']:.1f} us a group",
        )


if __name__ == "__main__":
    sys.exit(main())
