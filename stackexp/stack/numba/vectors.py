"""What the kernels of `compiled` are made of: views without references, and loops over contiguous numbers.

Compiled anew with the kernels that call them, never kept by themselves: see `kernels`.
"""

import math

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

LOG_LANES = 3
LANES = 1 << LOG_LANES  # numbers in a vector operation of ours
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are
TANH = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)  # of x^11, x^9, ..., x
OPTIONS = {"nogil": True, "fastmath": SUMS, "error_model": "numpy"}
plain = njit(**OPTIONS)


@intrinsic
def view(typing_context, array, start, count):
    """array[start : start + count], not counted as a reference (an atomic addition for each) and not checked.

    The array must outlive it, and to numba an array's life ends where its name is used last: a kernel that makes one
    must still use it, the array and not the view, after the last use of the view, or in the same loop.
    """

    def generate(context, builder, signature, arguments):
        whole = make_array(signature.args[0])(context, builder, arguments[0])
        part = make_array(signature.return_type)(context, builder)
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype)))
        data = cgutils.gep_inbounds(builder, whole.data, arguments[1])
        populate_array(part, data=data, shape=[arguments[2]], strides=[size], itemsize=size, meminfo=None)
        return part._getvalue()

    return types.Array(array.dtype, 1, "C")(array, types.intp, types.intp), generate


@intrinsic
def array_at(typing_context, address, count, like):
    """The `count` contiguous numbers of the dtype of `like` at an address; the same holds as for `view`."""

    def generate(context, builder, signature, arguments):
        array = make_array(signature.return_type)(context, builder)
        number = context.get_data_type(like.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(number))
        data = builder.inttoptr(arguments[0], number.as_pointer())
        populate_array(array, data=data, shape=[arguments[1]], strides=[size], itemsize=size, meminfo=None)
        return array._getvalue()

    return types.Array(like.dtype, 1, "C")(address, types.intp, like), generate


@intrinsic
def next_part(typing_context, job):
    """job[0]++, one thread after the other."""

    def generate(context, builder, signature, arguments):
        address = make_array(job)(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", address, context.get_constant(types.intp, 1), "monotonic")

    return types.intp(job), generate


@plain
def padded(count):
    """So many numbers in whole vectors."""
    return ((count + LANES - 1) >> LOG_LANES) << LOG_LANES


@plain
def part(rows, number, length):
    return view(rows, number * length, length)


@plain
def copy(source, target):
    for i in range(target.shape[0]):
        target[i] = source[i]


@plain
def clear(target):
    for i in range(target.shape[0]):
        target[i] = 0


def _vector(context, builder, array_type, array, at, lanes=LANES):
    """Address of array[at : at + lanes] as one vector, and the vector's type and alignment."""
    number = context.get_data_type(array_type.dtype)
    kind = ir.VectorType(number, lanes)
    address = cgutils.gep_inbounds(builder, make_array(array_type)(context, builder, array).data, at)
    return builder.bitcast(address, kind.as_pointer()), kind, context.get_abi_sizeof(number)


def _repeated(builder, number, kind):
    """A vector of one number."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    )


@intrinsic
def _dot_vectors(typing_context, a, b, at):
    """Sum of a[i] b[i] over at <= i < at + LANES: a head is too short for the compiler to see a vector in a loop."""

    def generate(context, builder, signature, arguments):
        factors = []
        for array in (0, 1):
            address, kind, align = _vector(context, builder, signature.args[array], arguments[array], arguments[2])
            factors.append(builder.load(address, align=align))
        product, number = builder.fmul(*factors), kind.element
        name = f"llvm.vector.reduce.fadd.v{LANES}f{8 * align}"
        add = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(number, [number, kind]))
        return builder.call(add, [ir.Constant(number, -0.0), product], fastmath=["reassoc"])

    return a.dtype(a, b, types.intp), generate


def _product_of(lanes):
    """A function for so many columns: their sums stay in registers."""

    @intrinsic
    def add(typing_context, vector, matrix, columns, out, at):
        """out[i] += sum over k of vector[k] matrix[k, i], at <= i < at + lanes; `columns`: of the matrix."""

        def generate(context, builder, signature, arguments):
            _, _, step, target, first = arguments
            numbers, weights = (make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 1))
            address, kind, align = _vector(context, builder, signature.args[3], target, first, lanes)
            total = cgutils.alloca_once_value(builder, builder.load(address, align=align))
            with cgutils.for_range(builder, builder.extract_value(numbers.shape, 0)) as loop:
                number = builder.load(cgutils.gep_inbounds(builder, numbers.data, loop.index))
                place = builder.add(builder.mul(loop.index, step), first)
                line = builder.bitcast(cgutils.gep_inbounds(builder, weights.data, place), kind.as_pointer())
                product = builder.fmul(
                    _repeated(builder, number, kind), builder.load(line, align=align), flags=["contract"]
                )
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
            builder.store(builder.load(total), address, align=align)
            return context.get_dummy_value()

        return types.void(vector, matrix, types.intp, out, types.intp), generate

    return add


_product_of_one, _product_of_four = _product_of(LANES), _product_of(4 * LANES)


@intrinsic
def _add_outer_vectors(typing_context, left, a, right, b, columns, out, at):
    """out[k, i] += left[k] a[i] + right[k] b[i], at <= i < at + LANES; `columns`: of out."""

    def generate(context, builder, signature, arguments):
        step, first = arguments[4], arguments[6]
        weights = [make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2)]
        lines = []
        for i in (1, 3):
            address, kind, align = _vector(context, builder, signature.args[i], arguments[i], first)
            lines.append(builder.load(address, align=align))
        with cgutils.for_range(builder, builder.extract_value(weights[0].shape, 0)) as loop:
            place = builder.add(builder.mul(loop.index, step), first)
            address, *_ = _vector(context, builder, signature.args[5], arguments[5], place)
            total = builder.load(address, align=align)
            for weight, line in zip(weights, lines, strict=True):
                factor = builder.load(cgutils.gep_inbounds(builder, weight.data, loop.index))
                product = builder.fmul(_repeated(builder, factor, kind), line, flags=["contract"])
                total = builder.fadd(total, product, flags=["contract"])
            builder.store(total, address, align=align)
        return context.get_dummy_value()

    return types.void(left, a, right, b, types.intp, out, types.intp), generate


@intrinsic
def exp_vectors(typing_context, a, at):
    """a[i] = exp a[i] over at <= i < at + LANES, for a[i] <= 0; below the smallest normal number it stays there.

    2^n e^r with n = round(a / ln 2), and e^r by its Taylor series: |r| <= ln(2) / 2.
    """
    single = a.dtype == types.float32
    degree, mantissa, bias, lowest = (7, 23, 127, -87.0) if single else (13, 52, 1023, -708.0)
    parts = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723212e-6)  # of ln 2

    def generate(context, builder, signature, arguments):
        address, kind, align = _vector(context, builder, signature.args[0], arguments[0], arguments[1])
        name = f"v{LANES}f{8 * align}"
        fma = builder.module.declare_intrinsic(f"llvm.fma.{name}", fnty=ir.FunctionType(kind, [kind] * 3))
        nearest = builder.module.declare_intrinsic(f"llvm.rint.{name}", fnty=ir.FunctionType(kind, [kind]))
        whole = ir.VectorType(ir.IntType(8 * align), LANES)

        def constant(value, of=kind):
            return ir.Constant(of, [value] * LANES)

        x = builder.load(address, align=align)
        x = builder.select(builder.fcmp_ordered("<", x, constant(lowest)), constant(lowest), x)
        n = builder.call(nearest, [builder.fmul(x, constant(1 / math.log(2)))])
        for part in parts:
            x = builder.call(fma, [n, constant(-part), x])
        total = constant(1 / math.factorial(degree))
        for power in range(degree - 1, -1, -1):
            total = builder.call(fma, [total, x, constant(1 / math.factorial(power))])
        exponent = builder.add(builder.fptosi(n, whole), constant(bias, whole))
        scale = builder.bitcast(builder.shl(exponent, constant(mantissa, whole)), kind)
        builder.store(builder.fmul(total, scale), address, align=align)
        return context.get_dummy_value()

    return types.void(a, types.intp), generate


@plain
def dot(a, b):
    count, total = a.shape[0], a.dtype.type(0)
    whole = (count >> LOG_LANES) << LOG_LANES
    for c in range(count >> LOG_LANES):
        total += _dot_vectors(a, b, c * LANES)
    for i in range(whole, count):
        total += a[i] * b[i]
    return total


@plain
def add(numbers, out):
    for i in range(out.shape[0]):
        out[i] += numbers[i]


@plain
def add_product(vector, matrix, out):
    """out [n] += vector [m] matrix [m, n]."""
    columns, at = out.shape[0], 0
    while at + 4 * LANES <= columns:
        _product_of_four(vector, matrix, columns, out, at)
        at += 4 * LANES
    while at + LANES <= columns:
        _product_of_one(vector, matrix, columns, out, at)
        at += LANES
    for i in range(at, columns):
        for k in range(vector.shape[0]):
            out[i] += vector[k] * matrix[k * columns + i]


@plain
def add_outer(left, a, right, b, out):
    """out [m, n] += left [m] a [n] + right [m] b [n]."""
    columns = a.shape[0]
    for c in range(columns >> LOG_LANES):
        _add_outer_vectors(left, a, right, b, columns, out, c * LANES)
    for k in range(left.shape[0]):
        for i in range((columns >> LOG_LANES) << LOG_LANES, columns):
            out[k * columns + i] += left[k] * a[i] + right[k] * b[i]


@plain
def tanh_into(numbers, out):
    """out[i] = tanh numbers[i]; of `out`, which may be longer, a multiple of LANES.

    (1 - e) / (1 + e) with e = exp -2|x|, and near 0, where 1 - e is the difference of close numbers, its Taylor series.
    """
    number = numbers.dtype.type
    one, near = number(1), number(0.25 if numbers.itemsize == 4 else 0.02)
    for i in range(numbers.shape[0]):
        out[i] = number(-2) * abs(numbers[i])
    for c in range(out.shape[0] >> LOG_LANES):
        exp_vectors(out, c * LANES)
    for i in range(numbers.shape[0]):
        x, e = numbers[i], out[i]
        y = x * x
        series = number(0)
        for factor in TANH:
            series = series * y + number(factor)
        far = (one - e) / (one + e)
        out[i] = x * series if abs(x) < near else far if x > 0 else -far
