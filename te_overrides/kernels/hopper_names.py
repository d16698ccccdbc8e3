"""Names in Gluon that Triton 3.6 and later versions spell differently; kernels take them from here."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the long names alone, later versions the short ones alone.
_SHORT = hasattr(tma, "async_load")
async_load = tma.async_load if _SHORT else tma.async_copy_global_to_shared
async_store = tma.async_store if _SHORT else tma.async_copy_shared_to_global

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """A buffer of shared memory seen with another dtype, shape and layout."""
        return buffer.reinterpret(DTYPE, SHAPE, LAYOUT)

else:

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """A buffer of shared memory seen with another dtype, shape and layout."""
        return buffer._reinterpret(DTYPE, SHAPE, LAYOUT)
