"""A layer's stack, kept factored, against slow references on the dense stack."""

import pytest
import torch
from tolerances import assert_close

from collabify.forms import HeadForms

HEADS, HEAD_DIM, QUERY_SIZE, KEY_SIZE = 3, 5, 17, 19


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(actual, expected, "rounding")


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def projections(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Query and key weights and biases, as torch.nn.Linear stores them."""
    width = HEADS * HEAD_DIM
    shapes = ((width, QUERY_SIZE), (width, KEY_SIZE), (width,), (width,))
    return tuple(randn(generator, *shape) for shape in shapes)


def slow_stack(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Head by head, channel by channel, with outer products of rows."""
    stack = torch.zeros(HEADS, QUERY_SIZE, KEY_SIZE, dtype=query.dtype)
    for head in range(HEADS):
        for channel in range(head * HEAD_DIM, (head + 1) * HEAD_DIM):
            stack[head] += torch.outer(query[channel], key[channel])
    return stack


def test_from_projections_reads_heads_in_order(projections: tuple[torch.Tensor, ...]) -> None:
    query, key, b_q, _ = projections
    forms = HeadForms.from_projections(query, key, b_q, num_heads=HEADS, scale=0.25)
    assert (forms.num_heads, forms.head_dim, forms.full_rank) == (HEADS, HEAD_DIM, 15)
    assert forms.scale == 0.25
    close(forms.dense(), slow_stack(query, key))
    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        close(forms.w_q[head], query[rows])
        close(forms.w_k[head], key[rows])
        close(forms.content[head], key[rows].T @ b_q[rows])


def test_no_query_bias_is_no_content(projections: tuple[torch.Tensor, ...]) -> None:
    query, key, *_ = projections
    forms = HeadForms.from_projections(query, key, None, num_heads=HEADS, scale=1.0)
    assert torch.equal(forms.content, torch.zeros(HEADS, KEY_SIZE, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(projections: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    query, key, b_q, _ = (weight.to(dtype) for weight in projections)
    forms = HeadForms.from_projections(query, key, b_q, num_heads=HEADS, scale=1.0)
    made = (forms.w_q, forms.w_k, forms.content, forms.dense(), forms.squared_norms())
    assert {tensor.dtype for tensor in made} == {dtype}


def test_norms_and_grams_need_no_stack(forms: HeadForms) -> None:
    dense = forms.dense()
    close(forms.squared_norms(), torch.linalg.matrix_norm(dense).square())
    query_side = dense.permute(1, 0, 2).flatten(1)  # i (h j): [P_1 | ... | P_H]
    key_side = dense.permute(2, 0, 1).flatten(1)
    close(forms.query_gram(), query_side @ query_side.T)
    close(forms.key_gram(), key_side @ key_side.T)


def test_transposed_exchanges_queries_and_keys(forms: HeadForms) -> None:
    transposed = forms.transposed()
    close(transposed.dense(), forms.dense().transpose(1, 2))
    assert torch.equal(transposed.content, torch.zeros(HEADS, QUERY_SIZE, dtype=torch.float64))
    assert transposed.scale == forms.scale
    close(transposed.query_gram(), forms.key_gram())


@pytest.mark.parametrize("biased_query", [True, False])
@pytest.mark.parametrize("biased_key", [True, False])
def test_content_bias_replaces_both_biases_under_softmax(
    projections: tuple[torch.Tensor, ...],
    generator: torch.Generator,
    biased_query: bool,
    biased_key: bool,
) -> None:
    """softmax((w_q x + b_q) . (w_k y + b_k) * scale) = softmax((x^T P y + content y) * scale)."""
    query, key, b_q, b_k = projections
    b_q, b_k = b_q * biased_query, b_k * biased_key
    scale = HEAD_DIM**-0.5
    x, y = randn(generator, 2, 7, QUERY_SIZE), randn(generator, 2, 11, KEY_SIZE)
    padding = torch.zeros(2, 1, 1, 11, dtype=torch.float64)
    padding[1, ..., 8:] = float("-inf")

    q, k = (
        (tokens @ weight.T + bias).unflatten(-1, (HEADS, HEAD_DIM))
        for tokens, weight, bias in ((x, query, b_q), (y, key, b_k))
    )
    trained = torch.einsum("bthd,bshd->bhts", q, k) * scale + padding

    forms = HeadForms.from_projections(
        query, key, b_q if biased_query else None, num_heads=HEADS, scale=scale
    )
    bilinear = torch.einsum("bti,hij,bsj->bhts", x, forms.dense(), y)
    content = torch.einsum("hj,bsj->bhs", forms.content, y)[:, :, None]
    ours = (bilinear + content) * forms.scale + padding

    close(ours.softmax(-1), trained.softmax(-1))
    if biased_query:  # and the content is not a thing that softmax would drop
        without = bilinear * forms.scale + padding
        assert (without.softmax(-1) - trained.softmax(-1)).abs().max() > 0.01
