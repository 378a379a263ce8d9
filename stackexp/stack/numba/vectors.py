"""The building blocks of the scan kernels: views without reference counts, and loops over contiguous numbers.

The intrinsics generate LLVM code where numba has no equivalent (pointers and atomic operations) or is slower: slices
instead of `view` would slow a scan down by 35 %.
"""

import math
from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

LANES = 8  # numbers in a vector register; matrix rows are padded to a multiple of it
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # fast-math flags: sums in any order, infinities and NaN as usual
TANH = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)  # Taylor coefficients of x^11, x^9, ..., x
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": SUMS, "error_model": "numpy"}
plain = njit(**OPTIONS)
inlined = njit(inline="always", **OPTIONS)  # for functions with one caller: compiled once, with it


def _data_pointer(context, builder, kind, value):
    return value if isinstance(kind, types.CPointer) else make_array(kind)(context, builder, value).data


@intrinsic
def view(typing_context, source, start, count):
    """Return source[start : start + count] of an array or pointer, without a bounds check and without a reference.

    The caller must keep the owner alive while it uses the view. numba frees an array after the last use of its name.
    """

    def generate(context, builder, signature, arguments):
        part = make_array(signature.return_type)(context, builder)
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(source.dtype)))
        data = cgutils.gep_inbounds(
            builder, _data_pointer(context, builder, signature.args[0], arguments[0]), arguments[1]
        )
        populate_array(part, data=data, shape=[arguments[2]], strides=[size], itemsize=size, meminfo=None)
        return part._getvalue()

    return types.Array(source.dtype, 1, "C")(source, types.intp, types.intp), generate


@intrinsic
def pointer(typing_context, source, start):
    """Return a pointer to source[start] of an array or pointer."""

    def generate(context, builder, signature, arguments):
        data = _data_pointer(context, builder, signature.args[0], arguments[0])
        return cgutils.gep_inbounds(builder, data, arguments[1])

    return types.CPointer(source.dtype)(source, types.intp), generate


@intrinsic
def to_pointers(typing_context, addresses, offset, like):
    """Return a NamedTuple of pointers to the dtype of `like` for a NamedTuple of addresses, each plus an offset.

    Pointers are not reference-counted. Arrays in a NamedTuple are, which would slow a scan down by 30 %.
    """
    kind = types.CPointer(like.dtype)
    result = types.NamedUniTuple(kind, len(addresses), addresses.instance_class)

    def generate(context, builder, signature, arguments):
        offset = context.cast(builder, arguments[1], signature.args[1], types.intp)
        values = [builder.add(value, offset) for value in cgutils.unpack_tuple(builder, arguments[0])]
        return context.make_tuple(
            builder, result, [builder.inttoptr(value, context.get_value_type(kind)) for value in values]
        )

    return result(addresses, offset, like), generate


@intrinsic
def is_given(typing_context, source):
    """Return False for a missing tensor, which has the address 0."""

    def generate(context, builder, signature, arguments):
        return cgutils.is_not_null(builder, arguments[0])

    return types.boolean(source), generate


@intrinsic
def take_next(typing_context, counter):
    """Return counter[0] and add 1 to it, as one atomic operation."""

    def generate(context, builder, signature, arguments):
        address = make_array(counter)(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", address, context.get_constant(types.intp, 1), "monotonic")

    return types.intp(counter), generate


def pad_columns(columns):
    """Return the row length of a padded matrix: the next multiple of LANES."""
    return (columns + LANES - 1) // LANES * LANES


padded = plain(pad_columns)


@plain
def part(rows, number, length):
    """Return the row `number` of rows of this length."""
    return view(rows, number * length, length)


@plain
def copy(source, target):
    """Copy source into target, which has the length to copy."""
    for i in range(target.shape[0]):
        target[i] = source[i]


@plain
def clear(target):
    """Set all elements to 0."""
    for i in range(target.shape[0]):
        target[i] = 0


@plain
def add(numbers, out):
    """Add numbers to out, in place."""
    for i in range(out.shape[0]):
        out[i] += numbers[i]


@plain
def dot(a, b):
    """Return the inner product of two vectors."""
    total = a.dtype.type(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@plain
def add_product(vector, matrix, out):
    """Add vector [m] times matrix [m, n] to out [n], four rows at a time to load and store `out` less often."""
    columns, fours = out.shape[0], vector.shape[0] // 4 * 4
    for k in range(0, fours, 4):
        a, b, c, d = vector[k], vector[k + 1], vector[k + 2], vector[k + 3]
        row_a, row_b = part(matrix, k, columns), part(matrix, k + 1, columns)
        row_c, row_d = part(matrix, k + 2, columns), part(matrix, k + 3, columns)
        for i in range(columns):
            out[i] += a * row_a[i] + b * row_b[i] + c * row_c[i] + d * row_d[i]
    for k in range(fours, vector.shape[0]):
        row, factor = part(matrix, k, columns), vector[k]
        for i in range(columns):
            out[i] += factor * row[i]


@plain
def add_outer(left, a, right, b, out):
    """Add left [m] times a [n] and right [m] times b [n] to out [m, n]."""
    columns = a.shape[0]
    for k in range(left.shape[0]):
        row, scale_a, scale_b = part(out, k, columns), left[k], right[k]
        for i in range(columns):
            row[i] += scale_a * a[i] + scale_b * b[i]


@plain
def tanh_into(numbers, out):
    """Write tanh of the numbers: (1 - e) / (1 + e) with e = exp(-2 |x|), or its Taylor series near 0."""
    number = numbers.dtype.type
    one, near = number(1), number(0.25 if numbers.itemsize == 4 else 0.02)
    for i in range(numbers.shape[0]):
        x = numbers[i]
        e, y, series = math.exp(number(-2) * abs(x)), x * x, number(0)
        for factor in TANH:
            series = series * y + number(factor)
        far = (one - e) / (one + e)
        out[i] = x * series if abs(x) < near else far if x > 0 else -far
