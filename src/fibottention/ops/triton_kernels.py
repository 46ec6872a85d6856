"""The Triton kernels of sparse attention. One program handles a block of patch tokens of one head of one image.

Queries go over their keys one at a time, a whole block of queries together: for a pattern of offsets the keys of a
block are rows next to each other, for explicit rows they are gathered. The backward pass over the keys goes over their
queries in the same way, so nothing is ever added to by two programs.
"""

import triton
import triton.language as tl

__all__ = ["attention_backward_columns", "attention_backward_rows", "attention_forward"]


@triton.jit
def _place(heads, stored_heads, tokens, BLOCK: tl.constexpr):
    """Image, head, stored head and patch tokens of this program."""
    blocks = tl.cdiv(tokens, BLOCK)
    index = tl.program_id(0) // blocks
    batch = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    stored = tl.where(stored_heads == 1, 0, head)
    token = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return index.to(tl.int64), batch, head, stored, token.to(tl.int64)


@triton.jit
def _rows(base, token, stride, inside, channel, dim, ACC: tl.constexpr):
    """Rows of a tensor: ``(BLOCK, channels)`` numbers in the dtype of the sums."""
    mask = inside[:, None] & (channel < dim)[None, :]
    return tl.load(base + token[:, None] * stride + channel[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def _row(base, token, stride, channel, dim, ACC: tl.constexpr):
    """One row of a tensor, ``(1, channels)``."""
    return tl.load(base + token * stride + channel, mask=channel < dim, other=0.0).to(ACC)[None, :]


@triton.jit
def _include(top, total, acc, score, valid, value, missing, ZERO_FILL: tl.constexpr):
    """One step of the online softmax: a key for each query of the block."""
    score = tl.where(valid, score, float("-inf"))
    new_top = tl.maximum(top, score)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp(top - shift)
    weight = tl.exp(score - shift)
    total = total * factor + weight
    if ZERO_FILL:
        # The pairs outside the pattern are summed at the end as if all keys were outside.
        weight = weight - tl.where(valid & (missing > 0), tl.exp(-shift), 0.0)
    acc = acc * factor[:, None] + weight[:, None] * value
    return new_top, total, acc


@triton.jit
def attention_forward(
    q, k, v, out, lse, bias, value_sums,
    offsets, offset_starts, row_base, row_starts, row_keys,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, out_batch, out_head, out_token,
    heads, stored_heads, tokens, prefix, pairs, bias_images,
    scale: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    OFFSETS: tl.constexpr, ZERO_FILL: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the patch queries."""
    index, batch, head, stored, i = _place(heads, stored_heads, tokens, BLOCK)
    inside = i < tokens
    length = prefix + tokens
    channel, value_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row = stored * tokens + i
    start = tl.load(row_starts + row, mask=inside, other=0)
    count = tl.load(row_starts + row + 1, mask=inside, other=0) - start
    # Pairs of prefix tokens before this row's first patch pair.
    before = stored * prefix * (length + tokens) + prefix * length + (i + 1) * prefix
    bias += ((batch % bias_images) * (heads // stored_heads) + tl.where(stored_heads == 1, head, 0)) * pairs
    query = _rows(q + batch * q_batch + head * q_head, i + prefix, q_token, inside, channel, head_dim, ACC) * scale
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head

    missing = tokens - count
    top = tl.full([BLOCK], float("-inf"), ACC)
    if ZERO_FILL:
        top = tl.where(missing > 0, 0.0, top)
    total = tl.zeros([BLOCK], ACC)
    acc = tl.zeros([BLOCK, BLOCK_V], ACC)
    for p in range(prefix):
        key = _row(k, p, k_token, channel, head_dim, ACC)
        value = _row(v, p, v_token, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            score += tl.load(bias + start + before - prefix + p, mask=inside, other=0.0)
        top, total, acc = _include(top, total, acc, score, inside, value, missing, ZERO_FILL)
    if OFFSETS:
        first = tl.load(offset_starts + stored)
        steps = tl.load(offset_starts + stored + 1) - first
        base = tl.load(row_base + row, mask=inside, other=0)
    else:
        first = start
        steps = tl.max(count, 0)
        base = start
    for t in range(steps):
        if OFFSETS:
            j = i + tl.load(offsets + first + t)
            valid = inside & (j >= 0) & (j < tokens)
        else:
            valid = inside & (t < count)
            j = tl.load(row_keys + first + t, mask=valid, other=0).to(tl.int64)
        key = _rows(k, j + prefix, k_token, valid, channel, head_dim, ACC)
        value = _rows(v, j + prefix, v_token, valid, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            score += tl.load(bias + base + t + before, mask=valid, other=0.0)
        top, total, acc = _include(top, total, acc, score, valid, value, missing, ZERO_FILL)
    shift = tl.where(top == float("-inf"), 0.0, top)
    if ZERO_FILL:
        rest = tl.where(missing > 0, tl.exp(-shift), 0.0)
        total += missing * rest
        sums = tl.load(value_sums + index * value_dim + value_channel, mask=value_channel < value_dim, other=0.0)
        acc += rest[:, None] * sums[None, :]
    alive = total > 0
    acc = tl.where(alive[:, None], acc / tl.where(alive, total, 1.0)[:, None], 0.0)
    place = out + batch * out_batch + head * out_head + (i + prefix)[:, None] * out_token + value_channel[None, :]
    mask = inside[:, None] & (value_channel < value_dim)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(
        lse + index * length + prefix + i,
        tl.where(alive, shift + tl.log(tl.where(alive, total, 1.0)), float("inf")),
        mask=inside,
    )


@triton.jit
def attention_backward_rows(
    q, k, v, grad_out, grad_q, lse, delta, bias, grad_scores,
    offsets, offset_starts, row_base, row_starts, row_keys,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    dq_batch, dq_head, dq_token,
    heads, stored_heads, tokens, prefix, pairs, bias_images,
    scale: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    OFFSETS: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradient of the patch queries, and of their scores where there is a bias."""
    index, batch, head, stored, i = _place(heads, stored_heads, tokens, BLOCK)
    inside = i < tokens
    length = prefix + tokens
    channel, value_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row = stored * tokens + i
    start = tl.load(row_starts + row, mask=inside, other=0)
    count = tl.load(row_starts + row + 1, mask=inside, other=0) - start
    before = stored * prefix * (length + tokens) + prefix * length + (i + 1) * prefix
    block = tl.where(stored_heads == 1, head, 0)
    bias += ((batch % bias_images) * (heads // stored_heads) + block) * pairs
    grad_scores += (batch * (heads // stored_heads) + block) * pairs
    query = _rows(q + batch * q_batch + head * q_head, i + prefix, q_token, inside, channel, head_dim, ACC) * scale
    grad = _rows(grad_out + batch * g_batch + head * g_head, i + prefix, g_token, inside, value_channel, value_dim, ACC)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    total = tl.load(lse + index * length + prefix + i, mask=inside, other=float("inf"))
    mean = tl.load(delta + index * length + prefix + i, mask=inside, other=0.0)

    acc = tl.zeros([BLOCK, BLOCK_D], ACC)
    for p in range(prefix):
        key = _row(k, p, k_token, channel, head_dim, ACC)
        value = _row(v, p, v_token, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            score += tl.load(bias + start + before - prefix + p, mask=inside, other=0.0)
        change = tl.exp(score - total) * (tl.sum(grad * value, 1) - mean)
        if BIAS:
            tl.store(grad_scores + start + before - prefix + p, change, mask=inside)
        acc += change[:, None] * key
    if OFFSETS:
        first = tl.load(offset_starts + stored)
        steps = tl.load(offset_starts + stored + 1) - first
        base = tl.load(row_base + row, mask=inside, other=0)
    else:
        first = start
        steps = tl.max(count, 0)
        base = start
    for t in range(steps):
        if OFFSETS:
            j = i + tl.load(offsets + first + t)
            valid = inside & (j >= 0) & (j < tokens)
        else:
            valid = inside & (t < count)
            j = tl.load(row_keys + first + t, mask=valid, other=0).to(tl.int64)
        key = _rows(k, j + prefix, k_token, valid, channel, head_dim, ACC)
        value = _rows(v, j + prefix, v_token, valid, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            score += tl.load(bias + base + t + before, mask=valid, other=0.0)
        change = tl.where(valid, tl.exp(score - total) * (tl.sum(grad * value, 1) - mean), 0.0)
        if BIAS:
            tl.store(grad_scores + base + t + before, change, mask=valid)
        acc += change[:, None] * key
    place = grad_q + batch * dq_batch + head * dq_head + (i + prefix)[:, None] * dq_token + channel[None, :]
    mask = inside[:, None] & (channel < head_dim)[None, :]
    tl.store(place, (acc * scale).to(grad_q.dtype.element_ty), mask=mask)


@triton.jit
def attention_backward_columns(
    q, k, v, grad_out, grad_k, grad_v, lse, delta, bias, grad_sums,
    offsets, offset_starts, row_base, row_starts, column_starts, column_queries, column_pairs,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, g_batch, g_head, g_token,
    dk_batch, dk_head, dk_token, dv_batch, dv_head, dv_token,
    heads, stored_heads, tokens, prefix, pairs, bias_images,
    scale: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    OFFSETS: tl.constexpr, ZERO_FILL: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradients of the patch keys and values."""
    index, batch, head, stored, j = _place(heads, stored_heads, tokens, BLOCK)
    inside = j < tokens
    length = prefix + tokens
    channel, value_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    column = stored * tokens + j
    bias += ((batch % bias_images) * (heads // stored_heads) + tl.where(stored_heads == 1, head, 0)) * pairs
    key = _rows(k + batch * k_batch + head * k_head, j + prefix, k_token, inside, channel, head_dim, ACC) * scale
    value = _rows(v + batch * v_batch + head * v_head, j + prefix, v_token, inside, value_channel, value_dim, ACC)
    q += batch * q_batch + head * q_head
    grad_out += batch * g_batch + head * g_head
    lse += index * length
    delta += index * length

    acc_k = tl.zeros([BLOCK, BLOCK_D], ACC)
    acc_v = tl.zeros([BLOCK, BLOCK_V], ACC)
    head_start = stored * prefix * (length + tokens) + tl.load(row_starts + stored * tokens)
    for p in range(prefix):
        query = _row(q, p, q_token, channel, head_dim, ACC)
        grad = _row(grad_out, p, g_token, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            score += tl.load(bias + head_start + p * length + prefix + j, mask=inside, other=0.0)
        weight = tl.exp(score - tl.load(lse + p))
        acc_v += weight[:, None] * grad
        acc_k += (weight * (tl.sum(grad * value, 1) - tl.load(delta + p)))[:, None] * query
    if OFFSETS:
        first = tl.load(offset_starts + stored)
        steps = tl.load(offset_starts + stored + 1) - first
        count = tl.zeros([BLOCK], tl.int64)
    else:
        first = tl.load(column_starts + column, mask=inside, other=0)
        count = tl.load(column_starts + column + 1, mask=inside, other=0) - first
        steps = tl.max(count, 0)
    for t in range(steps):
        if OFFSETS:
            i = j - tl.load(offsets + first + t)
            valid = inside & (i >= 0) & (i < tokens)
        else:
            valid = inside & (t < count)
            i = tl.load(column_queries + first + t, mask=valid, other=0).to(tl.int64)
        query = _rows(q, i + prefix, q_token, valid, channel, head_dim, ACC)
        grad = _rows(grad_out, i + prefix, g_token, valid, value_channel, value_dim, ACC)
        score = tl.sum(query * key, 1)
        if BIAS:
            if OFFSETS:
                pair = tl.load(row_base + stored * tokens + i, mask=valid, other=0) + t
            else:
                pair = tl.load(column_pairs + first + t, mask=valid, other=0)
            before = stored * prefix * (length + tokens) + prefix * length + (i + 1) * prefix
            score += tl.load(bias + pair + before, mask=valid, other=0.0)
        total = tl.load(lse + prefix + i, mask=valid, other=float("inf"))
        weight = tl.where(valid, tl.exp(score - total), 0.0)
        mean = tl.load(delta + prefix + i, mask=valid, other=0.0)
        acc_k += (weight * (tl.sum(grad * value, 1) - mean))[:, None] * query
        if ZERO_FILL:
            start = tl.load(row_starts + stored * tokens + i, mask=valid, other=0)
            row_count = tl.load(row_starts + stored * tokens + i + 1, mask=valid, other=0) - start
            weight -= tl.where(valid & (row_count < tokens), tl.exp(-total), 0.0)
        acc_v += weight[:, None] * grad
    if ZERO_FILL:
        sums = tl.load(grad_sums + index * value_dim + value_channel, mask=value_channel < value_dim, other=0.0)
        acc_v += sums[None, :]
    place = grad_k + batch * dk_batch + head * dk_head + (j + prefix)[:, None] * dk_token + channel[None, :]
    mask = inside[:, None] & (channel < head_dim)[None, :]
    tl.store(place, (acc_k * scale).to(grad_k.dtype.element_ty), mask=mask)
    place = grad_v + batch * dv_batch + head * dv_head + (j + prefix)[:, None] * dv_token + value_channel[None, :]
    mask = inside[:, None] & (value_channel < value_dim)[None, :]
    tl.store(place, acc_v.to(grad_v.dtype.element_ty), mask=mask)
