"""Arrays made in compiled functions: quicker to compile than NumPy's, and from the beginning of a cache line on."""

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed, impl_ret_new_ref
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from .compiled import inlined

# bytes, which vectors that begin there do not straddle
_LINE = 64


def _maker(name: str, cleared: bool):
    @intrinsic
    def make(typing, shape, like):
        depth = len(shape) if isinstance(shape, types.BaseTuple) else 1
        kind = types.Array(like.dtype, depth, "C")

        def emit(context, builder, signature, args):
            counts = cgutils.unpack_tuple(builder, args[0]) if isinstance(shape, types.BaseTuple) else [args[0]]
            lane = context.get_data_type(kind.dtype)
            itemsize = size = context.get_constant(types.intp, context.get_abi_sizeof(lane))
            strides = []
            for count in reversed(counts):
                strides.insert(0, size)
                size = builder.mul(size, count)
            meminfo = context.nrt.meminfo_alloc_aligned_unchecked(builder, size, _LINE)
            with builder.if_then(cgutils.is_null(builder, meminfo), likely=False):
                context.call_conv.return_user_exc(builder, MemoryError, (f"no room for {name}",))
            data = context.nrt.meminfo_data(builder, meminfo)
            if cleared:
                cgutils.memset(builder, data, size, 0)
            array = context.make_array(kind)(context, builder)
            data = builder.bitcast(data, lane.as_pointer())
            populate_array(array, data, counts, strides, itemsize, meminfo)
            return impl_ret_new_ref(context, builder, kind, array._getvalue())

        return kind(shape, like), emit

    make.__doc__ = (
        f"An array with {name}, a number of entries or a tuple; of the type of the array, or the type, `like`."
    )
    return make


@intrinsic
def seen_as(typing, array, kind):
    """The bytes of a flat array as numbers of the NumPy type `kind`."""
    seen = types.Array(kind.dtype, 1, "C")

    def emit(context, builder, signature, args):
        source = context.make_array(array)(context, builder, args[0])
        lane = context.get_data_type(kind.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(lane))
        count = builder.sdiv(builder.mul(source.nitems, source.itemsize), itemsize)
        made = context.make_array(seen)(context, builder)
        data = builder.bitcast(source.data, lane.as_pointer())
        populate_array(made, data, [count], [itemsize], itemsize, source.meminfo, source.parent)
        return impl_ret_borrowed(context, builder, seen, made._getvalue())

    return seen(array, kind), emit


empty = _maker("entries that are still to be written", cleared=False)
zeroed = _maker("zeros", cleared=True)


@inlined
def ones(count, like):
    """So many ones of the type of `like`."""
    made = empty(count, like)
    made[:] = 1.0
    return made
