"""What stands in for data best: laws for token ids, kinds of images.

    python benchmarks/quality/synthetic.py --glue FOLDER minilm-l6=MODEL dinov2-small=MODEL

Writes synthetic.json. No training. minilm-l6: cosine of sentence embeddings to the original's on
held-out RTE premises, 256 sequences of 128 ids. dinov2-small: cosine of token features on nine
whole photographs, 128 images.
"""

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from inputs import CALIBRATED, HELD_OUT, premises, whole
from minilm import embed
from transformers import AutoTokenizer

import collabify
from collabify.data.synthetic import (
    dead_leaves,
    pink_noise,
    synthetic_images,
    usable_ids,
    zipf_ids,
)
from collabify.storage import load, quiet, versions


def laws(tokenizer: Any, config: Any) -> dict[str, torch.Tensor]:
    """Token ids by name, ``[256, 128]`` each."""
    everything = torch.arange(config.vocab_size)
    names = tokenizer.convert_ids_to_tokens(everything.tolist())
    used = torch.tensor([i for i, name in enumerate(names) if not name.startswith("[")])
    ends = {"first": tokenizer.cls_token_id, "last": tokenizer.sep_token_id}
    draw = {"shape": (256, 128), "generator": torch.Generator().manual_seed(0)} | ends
    uniform = used[torch.randint(len(used), (256, 128), generator=draw["generator"])]
    uniform[:, 0], uniform[:, -1] = ends["first"], ends["last"]
    return {
        "uniform ids": uniform,
        "1/id": zipf_ids(everything[1:], **draw),
        "1/id without [unused]": zipf_ids(used, **draw),
        "the default": zipf_ids(usable_ids(config, tokenizer), **draw),
    }


def kinds() -> dict[str, torch.Tensor]:
    """Images by name, ``[128, 3, 224, 224]`` each."""
    shape, generator = (128, 3, 224, 224), torch.Generator().manual_seed(0)
    return {
        "white noise": torch.randn(shape, generator=generator),
        "1/f noise": pink_noise(shape, generator=generator),
        "dead leaves": dead_leaves(shape, generator=generator),
        "the default": synthetic_images(shape, generator=generator),
    }


def features(photographs: torch.Tensor, model: Any) -> torch.Tensor:
    """Of every token."""
    with torch.inference_mode():
        return model(pixel_values=photographs).last_hidden_state


def main() -> None:
    """Run both models and write synthetic.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--glue", required=True)
    arguments = parser.parse_args()
    quiet()
    rows: list[dict[str, Any]] = []
    for name, folder in (pair.split("=", 1) for pair in arguments.models):
        original, where = load(folder)
        is_text = name == "minilm-l6"
        if is_text:
            tokenizer = AutoTokenizer.from_pretrained(where.location)
            sentences, sources = premises(arguments.glue)[1], laws(tokenizer, original.config)
            states = partial(embed, tokenizer=tokenizer, texts=sentences)
        else:
            states, sources = partial(features, whole(CALIBRATED + HELD_OUT)), kinds()
        reference, key = states(original), "input_ids" if is_text else "pixel_values"
        for dk in (192, 128):
            for kind, drawn in {"weights only": None, **sources}.items():
                model = copy.deepcopy(original)
                ready: Any = "none"
                if drawn is not None:
                    ready = [{key: part} for part in drawn.split(16)]
                collabify.convert(model, dk=dk, calibration=ready, samples=240 if is_text else 112)
                cosine = torch.nn.functional.cosine_similarity(reference, states(model), dim=-1)
                row = {"model": name, "dk": dk, "input": kind, "cosine": float(cosine.mean())}
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {"versions": versions(), "rows": rows}
    (Path(__file__).parent / "synthetic.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
