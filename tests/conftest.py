"""Fixtures that several test files use."""

import os
from pathlib import Path

import pytest
import torch

from collabify.forms import HeadForms

torch.set_num_threads(1)

# Distinct primes for every axis, so that a transposed result has the wrong shape.
HEADS, HEAD_DIM, QUERY_SIZE, KEY_SIZE = 3, 5, 17, 19


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def forms(generator: torch.Generator) -> HeadForms:
    """Three heads that share some directions, so that there is something to find."""
    mix = torch.randn(HEADS * HEAD_DIM, 7, generator=generator, dtype=torch.float64)
    noise = 0.3
    w_q, w_k = (
        mix @ torch.randn(7, size, generator=generator, dtype=torch.float64)
        + noise * torch.randn(HEADS * HEAD_DIM, size, generator=generator, dtype=torch.float64)
        for size in (QUERY_SIZE, KEY_SIZE)
    )
    bias = torch.randn(HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    return HeadForms.from_projections(w_q, w_k, bias, num_heads=HEADS, scale=HEAD_DIM**-0.5)


def real_models() -> Path | None:
    """Folder with real pretrained models, from COLLABIFY_MODELS; see CONTRIBUTING.md."""
    folder = os.environ.get("COLLABIFY_MODELS")
    return Path(folder) if folder and Path(folder).is_dir() else None
