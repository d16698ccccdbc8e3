"""What the Hopper attention kernels share: work lines, the snake over programs, tails and stores.

The kernels are written in Gluon (which comes with Triton), persistent and warp-specialized: one warp feeds operands
through TMA, two warpgroups of 64 rows each compute. Their arithmetic is that of the portable kernels, taken from the
same device functions, and their bits are equal (scripts/gpu/attention_checks.py); only time differs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def item(i, total):
    """The i-th work item of this program. Items are ordered by work, heaviest first; the snake balances programs."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return i * programs + (program if i % 2 == 0 else programs - 1 - program)


@gluon.jit
def work_line(work, index, total, lanes):
    """Line `index // lanes` of the table: first row, rows, position, origin, length. Behind the end, the last line."""
    line = work + gl.minimum(index, total - 1) // lanes * 5
    return gl.load(line), gl.load(line + 1), gl.load(line + 2), gl.load(line + 3), gl.load(line + 4)


@gluon.jit
def zero_tail(tile, present, ROWS: gl.constexpr, D: gl.constexpr):
    """Rows of a tile in shared memory from `present` on become zero: they are another sequence's, or padding."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(ROWS // 16):
        if present < (i + 1) * 16:
            part = tile.slice(i * 16, 16)
            row = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            value = part.load(layout)
            part.store(gl.where((row < present)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
