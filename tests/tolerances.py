"""How far apart two numbers may be, in one table: absolute, and relative where above one."""

from typing import Any

import torch

TOLERANCES: dict[str, float] = {
    # rounding of a float64 model; ViT's eager attention takes its softmax in float32
    "exact": 2e-6,
    # a slow reference in float64 against the module, with the same float32 softmax
    "reference": 2e-6,
    # gradients of "exact" outputs, sums over many of them
    "gradient": 1e-5,
    # a trained float32 model of six to twelve layers, exact factors of it
    "trained": 1e-5,
    # a float32 model run by other kernels, with other padding, or with merged adapters
    "kernels": 1e-4,
    # share of the outputs' spread: two layers in float16 (11 bits), logits of about 10
    "float16": 0.02,
    # the same in bfloat16 (8 bits)
    "bfloat16": 0.15,
    # float64, the same sums in another order, of terms up to a thousand
    "rounding": 1e-11,
    # float64, a norm from a difference of Gram matrices: 10 sqrt(eps), where the solvers stop
    "gram": 1.5e-7,
    # float64, planted factors found by a solver that stops at "gram", somewhat amplified
    "recovered": 1e-6,
    # float32, a norm from a difference of Gram matrices: 10 sqrt(eps)
    "float32 gram": 3.5e-3,
    # float32, a squared relative error from Gram matrices: a few times eps
    "float32 squares": 3e-7,
    # HOOI from two starts, each stopped where a sweep gains less than 1e-9
    "same optimum": 1e-6,
    # cp has local minima: how far above the end of tensorly's random start ours may end
    "cp minima": 1e-3,
}


def assert_close(actual: Any, expected: Any, name: str) -> None:
    """Compare tensors under the tolerance called ``name``."""
    bound = TOLERANCES[name]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
