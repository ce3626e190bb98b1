"""P_l two ways on one attention layer: base logits that are mixed, or sdpa on heads of width n d.

    python benchmarks/talking_heads/mixed_logits.py

Writes mixed_logits.json. One layer of MiniLM's and of BERT-base's shape (random weights: time does
not depend on them), D/2 shared channels, one thread, both ways by turns; the figure is the median
of the ratios, mixed over sdpa, and of mixed over the original layer.
"""

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

import collabify
from collabify.storage import quiet, versions

SHAPES = {"minilm": (384, 12), "bert-base": (768, 12)}
INPUTS = [(1, 32), (1, 128), (1, 512), (8, 128)]


def seconds(call: Any) -> float:
    """Of one call."""
    begin = time.perf_counter()
    with torch.inference_mode():
        call()
    return time.perf_counter() - begin


def ways(module: Any, original: Any, x: torch.Tensor, width: int) -> dict[str, Any]:
    """The same layer computed three ways; values and output apart, which are alike."""
    heads = module.heads
    value = module.value(x).view(*x.shape[:2], heads, width).transpose(1, 2)

    def mixed() -> torch.Tensor:
        q, k = module.query(x), module.key(x)
        return (module.logits(x, q, k) * module.scaling).softmax(-1) @ value

    def sdpa() -> torch.Tensor:
        query, key = module.scores(module.query(x), module.key(x))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=module.scaling
        )

    def before() -> torch.Tensor:
        query, key = (
            part(x).view(*x.shape[:2], heads, width).transpose(1, 2)
            for part in (original.query, original.key)
        )
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return {"mixed": mixed, "sdpa": sdpa, "original": before}


def main() -> None:
    """Measure, and write mixed_logits.json."""
    quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, (size, heads) in SHAPES.items():
        config = BertConfig(hidden_size=size, num_attention_heads=heads, num_hidden_layers=1)
        model = BertModel(config).eval()
        original = copy.deepcopy(model).encoder.layer[0].attention.self
        for width in (8, 32):
            base, fast = size // 2 // width, {"calibration": "none", "iterations": 2}
            options = {"method": "talking-heads", "base_heads": base, "base_width": width}
            converted = copy.deepcopy(model)
            collabify.convert(converted, **options, **fast)
            module = converted.encoder.layer[0].attention.self
            for batch, length in INPUTS:
                calls = ways(module, original, torch.randn(batch, length, size), size // heads)
                rounds = [{way: seconds(call) for way, call in calls.items()} for _ in range(12)]
                row: dict[str, Any] = {"shape": name, "base_heads": f"{base} x {width}"}
                row |= {"batch": batch, "length": length}
                for way in ("sdpa", "original"):
                    ratios = [each["mixed"] / each[way] for each in rounds[2:]]
                    row[f"mixed over {way}"] = statistics.median(ratios)
                rows.append(row)
                print(json.dumps(row), flush=True)
    result = {"versions": versions(), "rows": rows}
    (Path(__file__).parent / "mixed_logits.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
