"""Random straight kernels, and whether they race, by one vector clock for each thread: a second opinion.

A kernel is a list of operations that all threads run in step: (what, where, who). `where` is a formula of the thread's
number in the launch, `who` the threads that take part in an access.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

BLOCKS, THREADS, WORDS = 2, 64, 128
FORMULAS = {"own": lambda g: g, "zero": lambda g: 0, "seven": lambda g: 7, "twin": lambda g: g % 64}
FORMULAS |= {f"xor {k}": k.__xor__ for k in (1, 16, 32, 64)}
WHO = {"all": lambda g: True, "first": lambda g: g % 64 == 0, "last": lambda g: g % 64 == 63, "one": lambda g: g == 70}
WHO |= {"even": lambda g: g % 2 == 0, "warp": lambda g: g % 64 < 32}
ACCESSES = {  # PTX, bytes, write, strong
    "ld": ("ld.{}.u32 %v, [%p];", 4, False, False),
    "st": ("st.{}.u32 [%p], %g;", 4, True, False),
    "ld byte": ("ld.{}.u8 %h, [%p+1];", 1, False, False),
    "st byte": ("st.{}.u8 [%p+2], %h0;", 1, True, False),
    "red": ("red.{}.add.u32 [%p], 1;", 4, True, True),
    "atom": ("atom.{}.exch.b32 %v, [%p], %g;", 4, True, True),
    "ld volatile": ("ld.volatile.{}.u32 %v, [%p];", 4, False, True),
    "st volatile": ("st.volatile.{}.u32 [%p], %g;", 4, True, True),
}
SYNCS = {
    "block": "bar.sync 0;",
    "warp": "bar.warp.sync -1;",
    "halves": "bar.warp.sync %m;",
    "pairs of warps": "bar.sync 1, 64;",
    "fence": "membar.gl;",
    "fence.cta": "membar.cta;",
}
OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(sorted(ACCESSES)),
        st.sampled_from(["global", "shared"]),
        st.sampled_from(sorted(FORMULAS)),
        st.sampled_from(sorted(WHO)),
    ),
    st.tuples(st.sampled_from(sorted(SYNCS))),
)
KERNELS = st.lists(OPERATIONS, min_size=1, max_size=12)


def text(kernel):
    """The PTX of a kernel: shared memory is written first, each thread its word, then a barrier."""
    lines = [".version 9.5\n.target sm_120\n.shared .align 16 .b8 tile[512];\n.entry k(.param .u64 a) {"]
    lines += [".reg .pred %q;\n.reg .b32 %g, %t, %b, %v, %m, %i;\n.reg .b16 %h, %h0;\n.reg .b64 %a, %s, %p, %w;"]
    lines += ["ld.param.u64 %a, [a]; mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mad.lo.u32 %g, %b, 64, %t;"]
    lines += ["cvt.u16.u32 %h0, %g; mov.u64 %s, tile;"]
    lines += ["and.b32 %m, %t, 16; setp.ne.u32 %q, %m, 0; selp.u32 %m, 0xffff0000, 0xffff, %q;"]
    lines += ["mad.wide.u32 %p, %t, 4, %s; st.shared.u32 [%p], %g; st.shared.u32 [%p+256], %g; bar.sync 0;"]
    for number, (what, *rest) in enumerate(kernel):
        if what in SYNCS:
            lines.append(SYNCS[what])
            continue
        space, where, who = rest
        lines += [_index(where), f"mad.wide.u32 %p, %i, 4, {'%a' if space == 'global' else '%s'};", _skip(who, number)]
        lines.append(ACCESSES[what][0].format(space) + f"\nover{number}:")
    return "\n".join([*lines, "ret;\n}"])


def _index(where):
    fixed = {"own": "mov.u32 %i, %g;", "zero": "mov.u32 %i, 0;", "seven": "mov.u32 %i, 7;", "twin": "mov.u32 %i, %t;"}
    return fixed.get(where) or f"xor.b32 %i, %g, {where.split()[1]};"


def _skip(who, number):
    test = {
        "first": "setp.ne.u32 %q, %t, 0;",
        "last": "setp.ne.u32 %q, %t, 63;",
        "one": "setp.ne.u32 %q, %g, 70;",
        "even": "and.b32 %v, %t, 1; setp.ne.u32 %q, %v, 0;",
        "warp": "setp.ge.u32 %q, %t, 32;",
    }
    return f"{test[who]} @%q bra over{number};" if who in test else ""


@dataclass
class Oracle:
    """Vector clocks of all threads, every access so far by byte, and what flags say."""

    clock: np.ndarray = field(default_factory=lambda: np.eye(BLOCKS * THREADS, dtype=int))
    fence: dict = field(default_factory=dict)  # (thread, wide): its clock at its last fence
    seen: dict = field(default_factory=dict)  # (space, byte): accesses
    posts: dict = field(default_factory=dict)  # (space, byte): (clock at a fence, the block it reaches, or None)

    def sync(self, what, threads):
        """All threads of `threads`, of one block, come to a synchronising instruction."""
        if what.startswith("fence"):
            for g in threads:
                self.fence[g, what == "fence"] = self.clock[g].copy()
                self.clock[g, g] += 1
            return
        parts = {"warp": lambda g: g // 32, "halves": lambda g: g // 16}.get(what, lambda g: 0)
        for part in {parts(g) for g in threads}:
            members = [g for g in threads if parts(g) == part]
            self.clock[members] = self.clock[members].max(axis=0)
            self.clock[members, members] += 1

    def access(self, what, space, where, who, threads):
        """An access of those of `threads` that take part; whether it races."""
        _, size, write, strong = ACCESSES[what]
        first, race = {"ld byte": 1, "st byte": 2}.get(what, 0), False
        taking = [g for g in threads if WHO[who](g)]
        for g in taking:
            place = (space if space == "global" else g // THREADS, 4 * FORMULAS[where](g))
            for byte in range(first, first + size):
                old = self.seen.setdefault((*place, byte), [])
                race |= any(self._races(g, write, strong, *other) for other in old)
                old.append((g, self.clock[g, g], write, strong))
        for g in taking if strong else ():
            self._flag(g, (space if space == "global" else g // THREADS, 4 * FORMULAS[where](g)), what)
        return race

    def _races(self, g, write, strong, other, time, wrote, was_strong):
        conflict = g != other and (write or wrote) and not (strong and was_strong)
        return conflict and self.clock[g, other] < time

    def _flag(self, g, place, what):
        if what != "st volatile":
            for clock, block in self.posts.get(place, []):
                if block in (None, g // THREADS):
                    self.clock[g] = np.maximum(self.clock[g], clock)
        for wide in (True, False) if what != "ld volatile" else ():
            if (g, wide) in self.fence:
                self.posts.setdefault(place, []).append((self.fence[g, wide], None if wide else g // THREADS))


def races(kernel, apart):
    """Whether a kernel races. `apart`: the second block runs when the first has ended, else in step with it."""
    oracle, every = Oracle(), np.arange(BLOCKS * THREADS)
    for block in range(BLOCKS):
        oracle.sync("block", every[block * THREADS : (block + 1) * THREADS].tolist())
    groups = [every[:THREADS], every[THREADS:]] if apart else [every]
    for group in groups:
        for what, *rest in kernel:
            if what in SYNCS:
                for block in sorted({g // THREADS for g in group.tolist()}):
                    oracle.sync(what, [g for g in group.tolist() if g // THREADS == block])
            elif oracle.access(what, *rest, group.tolist()):
                return True
    return False
