"""Compare sentence embeddings of two models: how similar a few sentences are, before and after.

    python examples/compare.py ORIGINAL CONVERTED

Each is a folder, a Hub id, or 'demo'. Embeddings are mean-pooled over real tokens and normalised.
"""

import sys

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import collabify
from collabify.storage import locate

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone performs music for an audience.",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week, and investors were worried about interest rates.",
    "How do I bake sourdough bread?",
]


def embed(name: str) -> tuple[Tensor, int]:
    """Embeddings of the sentences, and how many parameters the model has."""
    folder = locate(name).location
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    pooled = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1), model.num_parameters()


def main(original: str, converted: str) -> None:
    """Print the comparison."""
    before, size_before = embed(original)
    after, size_after = embed(converted)
    print(f"collabify {collabify.__version__}: {original} against {converted}")
    print(f"parameters: {size_before:,} before, {size_after:,} after")
    print("similarity of pairs of sentences, before -> after:")
    for i in range(len(SENTENCES)):
        for j in range(i + 1, len(SENTENCES)):
            old, new = (float(e[i] @ e[j]) for e in (before, after))
            print(f"  {old:6.3f} -> {new:6.3f}   {SENTENCES[i][:34]:34} | {SENTENCES[j][:34]}")
    agreement = (before * after).sum(-1)
    print(
        f"cosine of a sentence's embedding to the original's: mean {agreement.mean():.4f}, ", end=""
    )
    print(f"worst {agreement.min():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
