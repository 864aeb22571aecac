"""Fixed-width vectors for Numba: a row of channels, or a group of queries, held in registers.

Numba keeps small arrays in memory, so a running sum over rows would be stored and loaded again at every key. These
intrinsics give it LLVM's own vector type instead; LLVM splits a vector into whatever registers the processor has, so
the same code serves SSE, AVX2, AVX-512 and NEON. Vectors of one type add, subtract and multiply with `+`, `-`, `*`.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import (
    NativeValue,
    intrinsic,
    lower_builtin,
    models,
    register_model,
    type_callable,
    typeof_impl,
    unbox,
)


class Constant:
    """An integer that is part of a function's signature: each value gets compiled code of its own."""

    def __init__(self, number: int):
        self.number = number


class ConstantType(types.Type):
    """The type of a Constant."""

    def __init__(self, number):
        self.number = number
        super().__init__(name=f"Constant({number})")


register_model(ConstantType)(models.OpaqueModel)


@typeof_impl.register(Constant)
def _typeof_constant(constant, context):
    return ConstantType(constant.number)


@unbox(ConstantType)
def _unbox_constant(kind, constant, context):
    return NativeValue(context.context.get_dummy_value())


@lower_constant(ConstantType)
def _lower_constant(context, builder, kind, constant):
    return context.get_dummy_value()


@intrinsic
def value_of(typing, constant):
    """The value of a Constant, known to the compiler."""

    def emit(context, builder, signature, args):
        return context.get_constant(types.intp, constant.number)

    return types.intp(constant), emit


class Vector(types.Type):
    """`width` lanes of the scalar type `scalar`."""

    def __init__(self, scalar, width):
        self.scalar = scalar
        self.width = width
        super().__init__(name=f"Vector({scalar}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        lane = manager.lookup(vector.scalar).get_value_type()
        super().__init__(manager, vector, ir.VectorType(lane, vector.width))


_INDEX = ir.IntType(32)

# entries of an array that are computed together: arrays have as many to spare behind their last one
SPARE = 16
BATCH = Constant(SPARE)
FOUR = Constant(4)


def _address(context, builder, array_type, array, offset):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _splat(builder, scalar, kind):
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INDEX, 0))
    lanes = ir.Constant(ir.VectorType(_INDEX, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, undefined, lanes)


def _call(builder, name, kind, args):
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * len(args)), name)
    return builder.call(function, args)


def _suffix(kind, vector):
    return f"v{kind.count}f{vector.scalar.bitwidth}"


# memory


@intrinsic
def load(typing, array, offset, lanes):
    """The entries of the flat `array` from `offset` on, as many as the Constant `lanes` says."""
    vector = Vector(array.dtype, lanes.number)

    def emit(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        address = builder.bitcast(address, context.get_value_type(vector).as_pointer())
        return builder.load(address, align=array.dtype.bitwidth // 8)

    return vector(array, types.intp, lanes), emit


@intrinsic
def store(typing, array, offset, vector):
    """Write `vector` to the flat `array` from `offset` on."""

    def emit(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], args[0], args[1])
        address = builder.bitcast(address, context.get_value_type(vector).as_pointer())
        builder.store(args[2], address, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), emit


@intrinsic
def prefetch(typing, array, offset, lanes):
    """Have the cache fetch what `load` would read."""
    line = 64 * 8 // array.dtype.bitwidth

    def emit(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # to read, into the second level, data: the first has too few misses at a time for what comes from far away
        how = [ir.Constant(number, choice) for choice in (0, 2, 1)]
        for i in range(0, lanes.number, line):
            place = builder.add(args[1], ir.Constant(args[1].type, i))
            address = _address(context, builder, signature.args[0], args[0], place)
            builder.call(function, [builder.bitcast(address, byte), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def at(typing, array, offset):
    """`array[offset]` for an offset known not to be negative: no test for it."""

    def emit(context, builder, signature, args):
        return builder.load(_address(context, builder, signature.args[0], args[0], args[1]))

    return array.dtype(array, types.intp), emit


@intrinsic
def put(typing, array, offset, scalar):
    """`array[offset] = scalar` for an offset known not to be negative."""

    def emit(context, builder, signature, args):
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), emit


def _count(comparison, toward):
    @intrinsic
    def count(typing, array, offset, place):
        vector = Vector(array.dtype, SCAN)

        def emit(context, builder, signature, args):
            kind = context.get_value_type(vector)
            address = _address(context, builder, signature.args[0], args[0], args[1])
            points = builder.load(builder.bitcast(address, kind.as_pointer()), align=array.dtype.bitwidth // 8)
            bound = args[2] if array.dtype == types.float64 else _float32_beside(builder, args[2], toward)
            mask = builder.fcmp_ordered(comparison, points, _splat(builder, bound, kind))
            return builder.zext(builder.ctpop(builder.bitcast(mask, ir.IntType(SCAN))), ir.IntType(64))

        return types.int64(array, types.intp, types.float64), emit

    return count


def _float32_beside(builder, number, toward):
    """The float32 next to a float64 on one side of it, `toward` 1 or -1: numbers in float32 compare alike with both."""
    integer = ir.IntType(32)
    near = builder.fptrunc(number, ir.FloatType())
    short = builder.fcmp_ordered("<" if toward > 0 else ">", builder.fpext(near, ir.DoubleType()), number)
    # the next float32 away from zero has the next bit pattern; none of those that are short is zero toward zero
    away = builder.fcmp_ordered(">=" if toward > 0 else "<=", near, ir.Constant(ir.FloatType(), 0.0))
    step = builder.select(away, ir.Constant(integer, 1), ir.Constant(integer, -1))
    moved = builder.bitcast(builder.add(builder.bitcast(near, integer), step), ir.FloatType())
    return builder.select(short, moved, near)


# points that the counts below look at together
SCAN = 16
count_below = _count("<", 1)
count_up_to = _count("<=", -1)


# making vectors and taking them apart


@intrinsic
def zeros(typing, array, lanes):
    """A vector of zeros of the array's scalar type."""
    vector = Vector(array.dtype, lanes.number)

    def emit(context, builder, signature, args):
        kind = context.get_value_type(vector)
        return ir.Constant(kind, [0.0] * kind.count)

    return vector(array, lanes), emit


@intrinsic
def splat(typing, scalar, lanes):
    """A vector with `scalar` in every lane."""
    vector = Vector(scalar, lanes.number)

    def emit(context, builder, signature, args):
        return _splat(builder, args[0], context.get_value_type(vector))

    return vector(scalar, lanes), emit


@intrinsic
def pack(typing, first, second, third, fourth):
    """A vector of four lanes."""
    vector = Vector(first, 4)

    def emit(context, builder, signature, args):
        packed = ir.Constant(context.get_value_type(vector), ir.Undefined)
        for i, scalar in enumerate(args):
            packed = builder.insert_element(packed, scalar, ir.Constant(_INDEX, i))
        return packed

    return vector(first, first, first, first), emit


def _shuffle(lanes):
    @intrinsic
    def shuffle(typing, vector):
        wide = Vector(vector.scalar, len(lanes))

        def emit(context, builder, signature, args):
            mask = ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes)
            return builder.shuffle_vector(args[0], ir.Constant(args[0].type, ir.Undefined), mask)

        return wide(vector), emit

    return shuffle


# four lanes as sixteen: each four times in a row, or all of them four times
repeat = _shuffle([i // 4 for i in range(16)])
cycle = _shuffle([i % 4 for i in range(16)])


@intrinsic(prefer_literal=True)
def lane(typing, vector, index):
    """One lane of a vector; `index` is a literal."""

    def emit(context, builder, signature, args):
        return builder.extract_element(args[0], ir.Constant(_INDEX, index.literal_value))

    return vector.scalar(vector, index), emit


@intrinsic
def widen(typing, vector):
    """The vector in float64."""
    wide = Vector(types.float64, vector.width)

    def emit(context, builder, signature, args):
        return args[0] if vector.scalar == types.float64 else builder.fpext(args[0], context.get_value_type(wide))

    return wide(vector), emit


@intrinsic
def narrow(typing, vector, array):
    """The float64 vector rounded to the array's scalar type."""
    thin = Vector(array.dtype, vector.width)

    def emit(context, builder, signature, args):
        return args[0] if array.dtype == types.float64 else builder.fptrunc(args[0], context.get_value_type(thin))

    return thin(vector, array), emit


@intrinsic
def float_from_bits(typing, bits):
    """The float32 whose bit pattern is the int32 `bits`."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


# arithmetic


@intrinsic
def multiply_add(typing, scalar, vector, total):
    """`scalar * vector + total`, rounded once."""

    def emit(context, builder, signature, args):
        kind = context.get_value_type(vector)
        factor = _splat(builder, args[0], kind)
        return _call(builder, f"llvm.fma.{_suffix(kind, vector)}", kind, [factor, args[1], args[2]])

    return vector(vector.scalar, vector, vector), emit


def _register(symbol, instruction):
    @type_callable(symbol)
    def _type(context):
        return lambda left, right: left if isinstance(left, Vector) and left == right else None

    @lower_builtin(symbol, Vector, Vector)
    def _emit(context, builder, signature, args):
        return getattr(builder, instruction)(*args)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _register(_symbol, _instruction)


@intrinsic
def spread(typing, scalar, vector):
    """`scalar` in every lane of a vector like this one."""

    def emit(context, builder, signature, args):
        return _splat(builder, args[0], context.get_value_type(vector))

    return vector(vector.scalar, vector), emit


def _lane_by_lane(name, text):
    @intrinsic
    def apply(typing, vector):
        def emit(context, builder, signature, args):
            kind = context.get_value_type(vector)
            return _call(builder, f"llvm.{name}.{_suffix(kind, vector)}", kind, list(args))

        return vector(vector), emit

    apply.__doc__ = text
    return apply


absolute = _lane_by_lane("fabs", "Every lane without its sign.")
floor = _lane_by_lane("floor", "The largest whole numbers that are not above the lanes.")
each_exp = _lane_by_lane("exp", "e^x of every lane, one after the other, by the library of C.")


@intrinsic
def power_of_two(typing, vector):
    """2 to the power of every lane of a float32 vector; lanes are whole numbers from -126 to 127."""

    def emit(context, builder, signature, args):
        kind = context.get_value_type(vector)
        bits = ir.VectorType(ir.IntType(32), vector.width)
        bias, place = (ir.Constant(bits, [number] * vector.width) for number in (127, 23))
        power = builder.add(builder.fptosi(args[0], bits), bias)
        return builder.bitcast(builder.shl(power, place), kind)

    return vector(vector), emit


def _extreme(comparison):
    @intrinsic
    def choose(typing, left, right):
        def emit(context, builder, signature, args):
            return builder.select(builder.fcmp_ordered(comparison, *args), *args)

        return left(left, right), emit

    return choose


# lane by lane; the right one where either is no number
smaller = _extreme("<")
larger = _extreme(">")


def _where(comparison):
    @intrinsic
    def choose(typing, place, left, right):
        def emit(context, builder, signature, args):
            zero = ir.Constant(args[0].type, [0.0] * args[0].type.count)
            return builder.select(builder.fcmp_ordered(comparison, args[0], zero), args[1], args[2])

        return left(place, left, right), emit

    return choose


# lane by lane, the left one where `place` is positive, or not negative; elsewhere the right one
positive = _where(">")
from_zero = _where(">=")


@intrinsic
def signed(typing, place, vector):
    """`vector` where `place` is positive, its negative where that is negative, zero at zero."""

    def emit(context, builder, signature, args):
        kind = context.get_value_type(vector)
        bits = ir.VectorType(ir.IntType(vector.scalar.bitwidth), vector.width)
        sign = ir.Constant(bits, [1 << (vector.scalar.bitwidth - 1)] * vector.width)
        # two instructions instead of the four that choosing among two signs takes
        turned = builder.xor(builder.bitcast(args[1], bits), builder.and_(builder.bitcast(args[0], bits), sign))
        zero = ir.Constant(kind, [0.0] * kind.count)
        return builder.select(builder.fcmp_ordered("!=", args[0], zero), builder.bitcast(turned, kind), zero)

    return vector(vector, vector), emit


@intrinsic
def heaviside(typing, place, vector):
    """`vector` where `place` is positive, half of it at zero, zero elsewhere."""

    def emit(context, builder, signature, args):
        kind = context.get_value_type(vector)
        zero, half = (ir.Constant(kind, [number] * kind.count) for number in (0.0, 0.5))
        tied = builder.select(builder.fcmp_ordered("==", args[0], zero), builder.fmul(args[1], half), zero)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), args[1], tied)

    return vector(vector, vector), emit


@intrinsic
def inner(typing, left, right):
    """The inner product of two vectors, always summed in the same tree order."""

    def emit(context, builder, signature, args):
        total = builder.fmul(args[0], args[1])
        width = left.width
        while width > 1:
            width //= 2
            lanes = ir.VectorType(_INDEX, width)
            undefined = ir.Constant(total.type, ir.Undefined)
            low = builder.shuffle_vector(total, undefined, ir.Constant(lanes, list(range(width))))
            high = builder.shuffle_vector(total, undefined, ir.Constant(lanes, list(range(width, 2 * width))))
            total = builder.fadd(low, high)
        return builder.extract_element(total, ir.Constant(_INDEX, 0))

    return left.scalar(left, right), emit
