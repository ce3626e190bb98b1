"""Principal directions of a layer's heads: each head, their sum, and their unfoldings.

    P_h = w_q[h]^T w_k[h]                                       hdi,hdj -> hij
    heads          sigma(P_h), out of d
    concatenated   sigma(sum_h P_h) = sigma(W_Q W_K^T), out of min(i, j, h d)
    query side     eigenvalues of sum_h P_h P_h^T, the Gram matrix of [P_1 | ... | P_H]
    key side       eigenvalues of sum_h P_h^T P_h

Energy is the share of the squared singular values. Variance is the same after centring the columns
of ``P`` over its rows, which is PCA; in the factored form that is ``w_q`` centred over ``i``.

Axes: h head, d channel within a head, i query-side input, j key-side input.
Reference: Cordonnier et al. 2020, Figure 1 (captured variance, heads separately and concatenated).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from collabify.forms import HeadForms
from collabify.spectra import LayerSpectra, Spectrum


def layer_spectra(forms: HeadForms, *, index: int = 0, name: str = "") -> LayerSpectra:
    """All spectra of one layer, from its factored form.

    Parameters
    ----------
    forms
        The heads.
    index, name
        Passed on to the record.
    """
    w_q, w_k = forms.w_q, forms.w_k
    centred = w_q - w_q.mean(-1, keepdim=True)
    squares = product_squares(w_q, w_k)
    variances = product_squares(centred, w_k)
    whole, whole_variance = (
        product_squares(w.flatten(0, 1), w_k.flatten(0, 1)) for w in (w_q, centred)
    )
    return LayerSpectra(
        index=index,
        name=name,
        heads=tuple(
            Spectrum(_cumulative(energy), _cumulative(variance))
            for energy, variance in zip(squares, variances, strict=True)
        ),
        concatenated=Spectrum(_cumulative(whole), _cumulative(whole_variance)),
        query_side=Spectrum(_cumulative(_eigenvalues(forms.query_gram(), forms.full_rank))),
        key_side=Spectrum(_cumulative(_eigenvalues(forms.key_gram(), forms.full_rank))),
        triplets=Spectrum(_cumulative(squares.flatten().sort(descending=True).values)),
    )


def product_squares(
    w_q: Float[Tensor, "*h d i"], w_k: Float[Tensor, "*h d j"]
) -> Float[Tensor, "*h n"]:
    """Squared singular values of ``w_q^T w_k``, descending: n = min(d, i, j)."""
    upper_q = torch.linalg.qr(w_q.mT, mode="r").R
    upper_k = torch.linalg.qr(w_k.mT, mode="r").R
    values: Tensor = torch.linalg.svdvals(upper_q @ upper_k.mT)
    return values.square()


def _eigenvalues(gram: Float[Tensor, "i i"], at_most: int) -> Float[Tensor, "n"]:
    """Eigenvalues of a Gram matrix, descending, without those that its rank excludes."""
    values: Tensor = torch.linalg.eigvalsh((gram + gram.T) / 2)
    return values.flip(0).clamp(min=0)[:at_most]


def _cumulative(squares: Float[Tensor, "n"]) -> tuple[float, ...]:
    """Cumulative shares; all ones for a matrix of zeros, which nothing is lost of."""
    total = squares.sum()
    if total == 0:
        return (1.0,) * len(squares)
    shares: list[float] = (squares.cumsum(0) / total).tolist()
    shares[-1] = 1.0
    return tuple(shares)
