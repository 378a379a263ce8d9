"""The loops of `compiled`: a scan over the tokens, and its gradients, for the sequences begin .. end - 1 of a batch.

Tensors come as addresses, which costs a call with few tokens less than arrays do (0: there is none), and are flat, in
the order of `reference`'s dimensions unless a comment says otherwise. A stack in work lies in a row of a scratch
buffer, slot -1 (what a push pushes) in front and zeros behind: the update of all its slots is one loop over contiguous
numbers, new[i] = push old[i - D] + pop old[i + D] + no_op old[i]. Heads are walked one after the other; with feedback,
which mixes them, all at once.

Backward, the states of a segment of `every` tokens are computed anew from the one kept at its start.

All in one file: numba compiles what it cached anew when the file changes that holds the function called, and only then.
"""

import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from stackexp.stack.reference import ADDITIVE_PENALTY

TOP, MULTIPLY, LOG, ADDITIVE = range(4)  # how to read
LOG_LANES = 3
LANES = 1 << LOG_LANES  # numbers in a vector operation of ours
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; infinities and NaN stay what they are


def compiled(function: Callable) -> Callable:
    """numba's, kept on disk: beside this file, else in the user's cache; where neither may be written, not kept."""
    options = {"nogil": True, "fastmath": SUMS, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return njit(**options)(function)


@intrinsic
def view(typing_context, array, start, count):
    """array[start : start + count], not counted as a reference (an atomic addition for each) and not checked.

    The array must outlive it.
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


@compiled
def _row(rows, number, length):
    return view(rows, number * length, length)


@compiled
def _copy(source, target):
    for i in range(target.shape[0]):
        target[i] = source[i]


@compiled
def _clear(target):
    for i in range(target.shape[0]):
        target[i] = 0


def _vector(context, builder, array_type, array, at):
    """Address of array[at : at + LANES] as one vector, and the vector's type and alignment."""
    number = context.get_data_type(array_type.dtype)
    kind = ir.VectorType(number, LANES)
    address = cgutils.gep_inbounds(builder, make_array(array_type)(context, builder, array).data, at)
    return builder.bitcast(address, kind.as_pointer()), kind, context.get_abi_sizeof(number)


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


@intrinsic
def _add_vectors(typing_context, factor, a, out, at):
    """out[i] += factor a[i] over at <= i < at + LANES."""

    def generate(context, builder, signature, arguments):
        address, kind, align = _vector(context, builder, signature.args[1], arguments[1], arguments[3])
        target, _, _ = _vector(context, builder, signature.args[2], arguments[2], arguments[3])
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[0], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        factors = builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes)
        product = builder.fmul(factors, builder.load(address, align=align), flags=["contract"])
        total = builder.fadd(product, builder.load(target, align=align), flags=["contract"])
        builder.store(total, target, align=align)
        return context.get_dummy_value()

    return types.void(a.dtype, a, out, types.intp), generate


@intrinsic
def _exp_vectors(typing_context, a, at):
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


@compiled
def _dot(a, b):
    count, total = a.shape[0], a.dtype.type(0)
    whole = (count >> LOG_LANES) << LOG_LANES
    for c in range(count >> LOG_LANES):
        total += _dot_vectors(a, b, c * LANES)
    for i in range(whole, count):
        total += a[i] * b[i]
    return total


@compiled
def _add(factor, a, out):
    """out[i] += factor a[i]."""
    count = out.shape[0]
    whole = (count >> LOG_LANES) << LOG_LANES
    for c in range(count >> LOG_LANES):
        _add_vectors(factor, a, out, c * LANES)
    for i in range(whole, count):
        out[i] += factor * a[i]


@compiled
def _add_read(weight, g_read, factor, query, slot, g_slot, g_query):
    """g_slot += weight g_read + factor query;  g_query += factor slot."""
    count = slot.shape[0]
    for c in range(count >> LOG_LANES):
        _add_vectors(weight, g_read, g_slot, c * LANES)
        _add_vectors(factor, query, g_slot, c * LANES)
        _add_vectors(factor, slot, g_query, c * LANES)
    for i in range((count >> LOG_LANES) << LOG_LANES, count):
        g_slot[i] += weight * g_read[i] + factor * query[i]
        g_query[i] += factor * slot[i]


@compiled
def _softmax(logits, action):
    """a of one head into action [3]; its entropy. Two logits are push and no-op."""
    last = logits.shape[0] - 1
    largest = logits[0]
    for i in range(1, last + 1):
        largest = max(largest, logits[i])
    action[1] = 0
    total = logits.dtype.type(0)
    for i in range(last + 1):
        weight = math.exp(logits[i] - largest)
        action[2 if i == last else i] = weight
        total += weight
    log_total = math.log(total)
    entropy = logits.dtype.type(0)
    for i in range(last + 1):
        a = action[2 if i == last else i] / total
        action[2 if i == last else i] = a
        entropy -= a * (logits[i] - largest - log_total)
    return entropy


@compiled
def _ratio(following, mask, tiny):
    """M[j+1] / M[j], 0 where M[j] is."""
    return following / mask if mask >= tiny else tiny * 0


@compiled
def _update(old, new, old_mask, new_mask, action, grown, size, queue, tiny):
    """The row of a state into the row of the next, of `grown` slots of `size` numbers; sum of M'."""
    push, pop, no_op = action[0], action[1], action[2]
    total = grown * size
    here, raised, out = view(old, size, total), view(old, 2 * size, total), view(new, size, total)
    if queue:
        for j in range(grown):
            stays = no_op + pop * _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            for i in range(j * size, (j + 1) * size):
                out[i] = push * old[i] + stays * here[i]
    else:
        for i in range(total):
            out[i] = push * old[i] + pop * raised[i] + no_op * here[i]
    _clear(view(new, size + total, 2 * size))
    here, raised, out = view(old_mask, 1, grown), view(old_mask, 2, grown), view(new_mask, 1, grown)
    occupancy = tiny * 0
    for j in range(grown):
        mask = push * old_mask[j] + pop * raised[j] + no_op * here[j]
        out[j] = mask
        occupancy += mask
    _clear(view(new_mask, grown + 1, 2))
    return occupancy


@compiled
def _weigh(row, mask, query, how, slots, num_slots, weights, tiny):
    """The softmax of the global read, in which the empty slots count; and, a third of `weights` on, w_g . St[j]."""
    size, contents = query.shape[0], _row(weights, 1, weights.shape[0] // 3)
    penalty, empty_score = mask.dtype.type(ADDITIVE_PENALTY), tiny * 0
    if how == LOG:
        empty_score = math.log(tiny)
    elif how == ADDITIVE:
        empty_score = penalty
    largest = empty_score if num_slots > slots else -mask.dtype.type(np.inf)
    for j in range(slots):
        score = contents[j] = _dot(view(row, (j + 1) * size, size), query)
        if how == MULTIPLY:
            score *= mask[j + 1]
        elif how == LOG:
            score += math.log(max(mask[j + 1], tiny))
        else:
            score += (1 - mask[j + 1]) * penalty
        weights[j] = score
        largest = max(largest, score)
    total = tiny * 0
    for j in range(slots):
        weights[j] -= largest
    for j in range(0, slots, LANES):
        _exp_vectors(weights, j)
    for j in range(slots):
        total += weights[j]
    if num_slots > slots:
        total += (num_slots - slots) * math.exp(empty_score - largest)
    for j in range(slots):
        weights[j] /= total


@compiled
def _read(row, mask, query, how, slots, num_slots, weights, out, tiny):
    """R [D] into `out`."""
    size = out.shape[0]
    if how == TOP:
        _copy(view(row, size, size), out)
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, tiny)
    _clear(out)
    for j in range(slots):
        _add(weights[j], view(row, (j + 1) * size, size), out)


@compiled
def _load(slots, mask, row, row_mask):
    """A state, slots [n * D] and mask [n], into a row, with zeros behind."""
    numbers, count = slots.shape[0], mask.shape[0]
    size = row.shape[0] // row_mask.shape[0]
    _copy(slots, view(row, size, numbers))
    _clear(view(row, size + numbers, row.shape[0] - size - numbers))
    _copy(mask, view(row_mask, 1, count))
    _clear(view(row_mask, 1 + count, row_mask.shape[0] - 1 - count))


@compiled
def _activate(read, tanh, fed):
    for i in range(fed.shape[0]):
        fed[i] = math.tanh(read[i]) if tanh else read[i]


@compiled
def _add_product(vector, matrix, out):
    """out [n] += vector [m] matrix [m, n]."""
    columns = out.shape[0]
    for k in range(vector.shape[0]):
        _add(vector[k], view(matrix, k * columns, columns), out)


@compiled
def _transpose(matrix, columns, out):
    lines = matrix.shape[0] // columns
    for i in range(lines):
        for j in range(columns):
            out[j * lines + i] = matrix[i * columns + j]


@compiled
def forward(begin, end, like, options, inputs, outputs, kept):
    """Fill `outputs` and, for the backward pass, `kept`. `like` is an array of the dtype."""
    batch, tokens, heads, size, count, start, num_slots, how, queue, tanh, every = options
    room, width, actions, stacks = min(start + tokens, num_slots), heads * size, heads * count, batch * heads
    segments, span, length, dtype = (tokens - 1) // every, (room + 3) * size, room + 3, like.dtype
    feedback, pushes, keeps, tiny = inputs[5] != 0, kept[0] != 0, kept[2] != 0, dtype.type(np.finfo(dtype).tiny)
    slots, mask = array_at(inputs[0], stacks * start * size, like), array_at(inputs[1], stacks * start, like)
    x, logits = array_at(inputs[2], tokens * batch * width, like), array_at(inputs[3], tokens * batch * actions, like)
    query = array_at(inputs[4], width, like)
    map_x, map_logits = array_at(inputs[5], width * width, like), array_at(inputs[6], width * actions, like)
    read, action = array_at(outputs[0], tokens * batch * width, like), array_at(outputs[1], tokens * stacks * 3, like)
    entropy, occupancy = array_at(outputs[2], tokens * stacks, like), array_at(outputs[3], tokens * stacks, like)
    last_slots, last_mask = array_at(outputs[4], stacks * room * size, like), array_at(outputs[5], stacks * room, like)
    pushed, first_read = array_at(kept[0], tokens * batch * width, like), array_at(kept[1], batch * width, like)
    states = array_at(kept[2], stacks * segments * room * size, like)  # [B, H, segments, room, D]
    masks = array_at(kept[3], stacks * segments * room, like)
    group = heads if feedback else 1
    rows, row_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * length, dtype)
    weights, fed, mixed = np.zeros(3 * (room + LANES), dtype), np.zeros(width, dtype), np.zeros(width + actions, dtype)
    mixed_x, mixed_logits = view(mixed, 0, width), view(mixed, width, actions)
    for i in range(group * 2):
        row_masks[i * length] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            for k in range(group):
                at, row, row_mask = b * heads + first + k, _row(rows, 2 * k, span), _row(row_masks, 2 * k, length)
                _load(_row(slots, at, start * size), _row(mask, at, start), row, row_mask)
                if feedback:
                    own, out = _row(query, first + k, size), _row(first_read, at, size)
                    _read(row, row_mask, own, how, start, num_slots, weights, out, tiny)
            if feedback:
                _activate(_row(first_read, b, width), tanh, fed)
            for t in range(tokens):
                grown, here, now = min(start + t + 1, num_slots), b * tokens + t, t % 2
                if feedback:
                    _copy(_row(x, here, width), mixed_x)
                    _copy(_row(logits, here, actions), mixed_logits)
                    _add_product(fed, map_x, mixed_x)
                    _add_product(fed, map_logits, mixed_logits)
                    if pushes:
                        _copy(mixed_x, _row(pushed, here, width))
                for k in range(group):
                    h, i, j = first + k, 2 * k + now, 2 * k + 1 - now
                    at = here * heads + h
                    row, row_mask = _row(rows, i, span), _row(row_masks, i, length)
                    new, new_mask = _row(rows, j, span), _row(row_masks, j, length)
                    if keeps and t and t % every == 0:
                        place = (b * heads + h) * segments + t // every - 1
                        _copy(view(row, size, room * size), _row(states, place, room * size))
                        _copy(view(row_mask, 1, room), _row(masks, place, room))
                    chosen = _row(action, at, 3)
                    if feedback:
                        _copy(_row(mixed_x, h, size), view(row, 0, size))
                        entropy[at] = _softmax(_row(mixed_logits, h, count), chosen)
                    else:
                        _copy(_row(x, at, size), view(row, 0, size))
                        entropy[at] = _softmax(_row(logits, at, count), chosen)
                    occupancy[at] = _update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                    own, out = _row(query, h, size), _row(read, at, size)
                    _read(new, new_mask, own, how, grown, num_slots, weights, out, tiny)
                if feedback:
                    _activate(_row(read, here, width), tanh, fed)
            for k in range(group):
                at, i = b * heads + first + k, 2 * k + tokens % 2
                _copy(view(rows, i * span + size, room * size), _row(last_slots, at, room * size))
                _copy(view(row_masks, i * length + 1, room), _row(last_mask, at, room))


@compiled
def _read_back(row, mask, query, how, slots, num_slots, weights, g_read, grad, g_mask, g_query, tiny):
    """Add to the gradients of a row and its mask, and of w_g, what the read's gradient gives."""
    size = query.shape[0]
    if how == TOP:
        top = view(grad, size, size)
        for i in range(size):
            top[i] += g_read[i]
        return
    _weigh(row, mask, query, how, slots, num_slots, weights, tiny)
    third = weights.shape[0] // 3
    contents, g_weights = _row(weights, 1, third), _row(weights, 2, third)
    mean = tiny * 0  # dR . R
    for j in range(slots):
        g_weights[j] = _dot(view(row, (j + 1) * size, size), g_read)
        mean += weights[j] * g_weights[j]
    for j in range(slots):
        slot, g_slot = view(row, (j + 1) * size, size), view(grad, (j + 1) * size, size)
        g_score = weights[j] * (g_weights[j] - mean)
        factor = g_score
        if how == MULTIPLY:
            g_mask[j + 1] += g_score * contents[j]
            factor = g_score * mask[j + 1]
        elif how == LOG:
            if mask[j + 1] >= tiny:
                g_mask[j + 1] += g_score / mask[j + 1]
        else:
            g_mask[j + 1] -= g_score * mask.dtype.type(ADDITIVE_PENALTY)
        _add_read(weights[j], g_read, factor, query, slot, g_slot, g_query)


@compiled
def _update_back(old, old_mask, action, new, g_mask, out, out_mask, before, grown, size, queue, use_mask, tiny, g_x):
    """Gradients of an update: of the state before it (`before` slots) into `out`, of x into g_x; of the action.

    new, g_mask: those of the state after it (`grown` slots).
    """
    push, pop, no_op = action[0], action[1], action[2]
    g_push, g_pop, g_no_op = tiny * 0, tiny * 0, tiny * 0
    total = grown * size
    here, raised = view(old, size, total), view(old, 2 * size, total)
    g_here, g_raised, g_old = view(new, size, total), view(new, 2 * size, total), view(out, size, total)
    if use_mask:
        for j in range(1, grown + 1):
            g = g_mask[j]
            g_push += g * old_mask[j - 1]
            g_pop += g * old_mask[j + 1]
            g_no_op += g * old_mask[j]
            out_mask[j] = push * g_mask[j + 1] + pop * g_mask[j - 1] + no_op * g
        _clear(view(out_mask, grown + 1, 2))
    if queue:
        for j in range(grown):
            ratio = _ratio(old_mask[j + 2], old_mask[j + 1], tiny)
            stays, g_stays = no_op + pop * ratio, tiny * 0
            for i in range(j * size, (j + 1) * size):
                g = g_here[i]
                g_push += g * old[i]
                g_stays += g * here[i]
                g_old[i] = push * g_raised[i] + stays * g
            g_no_op += g_stays
            g_pop += g_stays * ratio
            if old_mask[j + 1] >= tiny:
                g_ratio = g_stays * pop / old_mask[j + 1]
                out_mask[j + 2] += g_ratio
                out_mask[j + 1] -= g_ratio * ratio
    else:
        for i in range(total):
            g = g_here[i]
            g_push += g * old[i]
            g_pop += g * raised[i]
            g_no_op += g * here[i]
            g_old[i] = push * g_raised[i] + pop * new[i] + no_op * g
    for i in range(size):
        g_x[i] = push * g_here[i]
    _clear(view(out, (before + 1) * size, 2 * size))
    _clear(view(out_mask, before + 1, 2))
    return g_push, g_pop, g_no_op


@compiled
def _softmax_back(action, g_push, g_pop, g_no_op, g_entropy, entropy, g_logits):
    """Gradients of the logits of one head, from those of the action and of its entropy."""
    mean = action[0] * g_push + action[1] * g_pop + action[2] * g_no_op
    last = g_logits.shape[0] - 1
    for i in range(last + 1):
        k = 2 if i == last else i
        g = g_push if k == 0 else g_pop if k == 1 else g_no_op
        gradient = action[k] * (g - mean)
        if g_entropy != 0 and action[k] > 0:
            gradient -= g_entropy * action[k] * (math.log(action[k]) + entropy)
        g_logits[i] = gradient


@compiled
def backward(begin, end, like, options, inputs, outputs, kept, incoming, outgoing):
    """Fill `outgoing`: the gradients of the state, x and the logits; and add to w_g's, one for each sequence.

    `incoming`: those of read, action, entropy and the last state. `inputs` has, for x, what was pushed, and fed
    [B, T, H*D], f(R_{t-1}).
    """
    batch, tokens, heads, size, count, start, num_slots, how, queue, tanh, every = options
    room, width, actions, stacks = min(start + tokens, num_slots), heads * size, heads * count, batch * heads
    segments, span, length, dtype = (tokens - 1) // every, (room + 3) * size, room + 3, like.dtype
    feedback, tiny = inputs[4] != 0, dtype.type(np.finfo(dtype).tiny)
    slots, mask = array_at(inputs[0], stacks * start * size, like), array_at(inputs[1], stacks * start, like)
    pushed, query = array_at(inputs[2], tokens * batch * width, like), array_at(inputs[3], width, like)
    map_x, map_logits = array_at(inputs[4], width * width, like), array_at(inputs[5], width * actions, like)
    fed = array_at(inputs[6], tokens * batch * width, like)
    action, entropy = array_at(outputs[0], tokens * stacks * 3, like), array_at(outputs[1], tokens * stacks, like)
    states = array_at(kept[0], stacks * segments * room * size, like)
    masks = array_at(kept[1], stacks * segments * room, like)
    in_read, in_action = (
        array_at(incoming[0], tokens * batch * width, like),
        array_at(incoming[1], tokens * stacks * 3, like),
    )
    in_entropy, in_slots = (
        array_at(incoming[2], tokens * stacks, like),
        array_at(incoming[3], stacks * room * size, like),
    )
    in_mask = array_at(incoming[4], stacks * room, like)
    g_slots, g_mask = array_at(outgoing[0], stacks * start * size, like), array_at(outgoing[1], stacks * start, like)
    g_x, g_logits = (
        array_at(outgoing[2], tokens * batch * width, like),
        array_at(outgoing[3], tokens * batch * actions, like),
    )
    g_query = array_at(outgoing[4], batch * width, like)
    use_mask = queue or how != TOP or incoming[4] != 0
    group = heads if feedback else 1
    rows, row_masks = np.zeros(group * (every + 1) * span, dtype), np.zeros(group * (every + 1) * length, dtype)
    grads, grad_masks = np.zeros(group * 2 * span, dtype), np.zeros(group * 2 * length, dtype)
    weights, g_read, g_fed = np.zeros(3 * (room + LANES), dtype), np.zeros(size, dtype), np.zeros(width, dtype)
    maps = np.zeros(width * (width + actions) if feedback else 0, dtype)  # P and Q, transposed
    if feedback:
        _transpose(map_x, width, view(maps, 0, width * width))
        _transpose(map_logits, actions, view(maps, width * width, width * actions))
    for i in range(group * (every + 1)):
        row_masks[i * length] = 1
    for b in range(begin, end):
        for first in range(0, heads, group):
            _clear(g_fed)
            for k in range(group):
                at, grad, grad_mask = (
                    b * heads + first + k,
                    _row(grads, 2 * k + tokens % 2, span),
                    _row(grad_masks, 2 * k + tokens % 2, length),
                )
                _clear(grad)
                _clear(grad_mask)
                if incoming[3]:
                    _copy(_row(in_slots, at, room * size), view(grad, size, room * size))
                if incoming[4]:
                    _copy(_row(in_mask, at, room), view(grad_mask, 1, room))
            for segment in range(segments, -1, -1):
                begun, ended = segment * every, min((segment + 1) * every, tokens)
                for k in range(group):
                    h, i = first + k, k * (every + 1)
                    row, row_mask = _row(rows, i, span), _row(row_masks, i, length)
                    at, held = b * heads + h, start
                    if segment:
                        at = at * segments + segment - 1
                        _load(_row(states, at, room * size), _row(masks, at, room), row, row_mask)
                    else:
                        _load(_row(slots, at, held * size), _row(mask, at, held), row, row_mask)
                    for t in range(begun, ended):
                        at, row, row_mask = (
                            (b * tokens + t) * heads + h,
                            _row(rows, i, span),
                            _row(row_masks, i, length),
                        )
                        i += 1
                        _copy(_row(pushed, at, size), view(row, 0, size))
                        if t + 1 < ended or how != TOP:
                            new, new_mask = _row(rows, i, span), _row(row_masks, i, length)
                            chosen, grown = _row(action, at, 3), min(start + t + 1, num_slots)
                            _update(row, new, row_mask, new_mask, chosen, grown, size, queue, tiny)
                for t in range(ended - 1, begun - 1, -1):
                    here, before, grown = b * tokens + t, min(start + t, num_slots), min(start + t + 1, num_slots)
                    for k in range(group):
                        h, i, now, then = first + k, k * (every + 1) + t - begun, 2 * k + (t + 1) % 2, 2 * k + t % 2
                        at, grad, grad_mask = here * heads + h, _row(grads, now, span), _row(grad_masks, now, length)
                        _copy(_row(g_fed, h, size), g_read)
                        if incoming[0]:
                            _add(tiny / tiny, _row(in_read, at, size), g_read)
                        row, row_mask = _row(rows, i + 1, span), _row(row_masks, i + 1, length)
                        own, g_own = _row(query, h, size), _row(g_query, b * heads + h, size)
                        _read_back(
                            row, row_mask, own, how, grown, num_slots, weights, g_read, grad, grad_mask, g_own, tiny
                        )
                        row, row_mask = _row(rows, i, span), _row(row_masks, i, length)
                        out, out_mask, chosen = (
                            _row(grads, then, span),
                            _row(grad_masks, then, length),
                            _row(action, at, 3),
                        )
                        g_push, g_pop, g_no_op = _update_back(
                            row, row_mask, chosen, grad, grad_mask, out, out_mask, before, grown, size, queue, use_mask,
                            tiny, _row(g_x, at, size),
                        )  # fmt: skip
                        if incoming[1]:
                            g_push += in_action[at * 3]
                            g_pop += in_action[at * 3 + 1]
                            g_no_op += in_action[at * 3 + 2]
                        of_entropy = in_entropy[at] if incoming[2] else tiny * 0
                        out = _row(g_logits, at, count)
                        _softmax_back(chosen, g_push, g_pop, g_no_op, of_entropy, entropy[at], out)
                    if feedback:
                        _clear(g_fed)
                        _add_product(_row(g_x, here, width), view(maps, 0, width * width), g_fed)
                        _add_product(_row(g_logits, here, actions), view(maps, width * width, width * actions), g_fed)
                        if tanh:
                            for d in range(width):
                                g_fed[d] *= 1 - fed[here * width + d] * fed[here * width + d]
            for k in range(group):
                h, at, grad, grad_mask = (
                    first + k,
                    b * heads + first + k,
                    _row(grads, 2 * k, span),
                    _row(grad_masks, 2 * k, length),
                )
                if feedback and start:  # R_{-1} was read from the given state
                    row, row_mask = _row(rows, k * (every + 1), span), _row(row_masks, k * (every + 1), length)
                    _load(_row(slots, at, start * size), _row(mask, at, start), row, row_mask)
                    own, g_own, out = _row(query, h, size), _row(g_query, at, size), _row(g_fed, h, size)
                    _read_back(row, row_mask, own, how, start, num_slots, weights, out, grad, grad_mask, g_own, tiny)
                if outgoing[0]:
                    _copy(view(grad, size, start * size), _row(g_slots, at, start * size))
                    _copy(view(grad_mask, 1, start), _row(g_mask, at, start))
