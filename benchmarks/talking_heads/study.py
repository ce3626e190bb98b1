"""The papers' claim in miniature: more, narrower heads, with and without talking, from scratch.

    python benchmarks/talking_heads/study.py --glue FOLDER --work DIR [--seeds N] [--steps N]

Writes study.json and study.png. A small BERT (two layers, D = 128) learns to fill in masked tokens
of the sentences of five GLUE tasks, with 4, 8, 16 and 32 heads at the same h d = D: multi-head,
talking heads (P_l and P_w, from the identity), P_l only, P_w only, and collaborative attention at
D/2 with all channels, fitted to the random start. Multi-head is a head-SVD of full width, so that
every form has a content bias in place of the query bias. All see the same batches with the same
masks. Measured: loss on held-out sentences (of the validation splits that are not in training),
mean and spread over seeds. Every run's loss stays in DIR, so that a study that was stopped goes on;
with --only N/M a process does every M-th run, so that several share the work.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertForMaskedLM

import collabify
from collabify.storage import quiet, versions

HERE = Path(__file__).parent
TASKS = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
}
HEADS = (4, 8, 16, 32)
WIDTH, LAYERS, LENGTH, BATCH, VOCABULARY = 128, 2, 48, 32, 4096
FORMS: dict[str, dict[str, Any]] = {
    "multi-head": {"method": "head-svd", "dk": WIDTH},
    "talking heads": {"method": "talking-heads"},
    "P_l only": {"method": "talking-heads", "projections": "logits"},
    "P_w only": {"method": "talking-heads", "projections": "weights"},
    "collaborative, D/2": {"dk": WIDTH // 2, "channels": "all"},
}


def sentences(glue: str) -> tuple[list[str], list[str]]:
    """Distinct ones to train on, and others to judge by."""
    found: dict[str, dict[str, None]] = {"train": {}, "validation": {}}
    for task, columns in TASKS.items():
        data = datasets.load_dataset(glue, task)
        for split, kept in found.items():
            for column in columns:
                kept |= dict.fromkeys(data[split][column])
    train, held_out = found["train"], found["validation"]
    return list(train), [text for text in held_out if text not in train]


def encode(texts: list[str], tokenizer: BertWordPieceTokenizer) -> torch.Tensor:
    """Token ids ``[n, t]``, zero beyond the end."""
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    return torch.tensor([each.ids for each in tokenizer.encode_batch(texts)])


def masked(ids: torch.Tensor, draw: torch.Generator, mask: int) -> dict[str, torch.Tensor]:
    """15 % of the tokens hidden, as in BERT but always by the mask."""
    real = ids > 3  # neither padding nor special
    hidden = real & (torch.rand(ids.shape, generator=draw) < 0.15)
    return {
        "input_ids": ids.masked_fill(hidden, mask),
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(~hidden, -100),
    }


def build(form: str, heads: int, seed: int) -> Any:
    """An untrained model; the same numbers for the same seed, whatever the form."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    collabify.convert(model, calibration="none", **FORMS[form])
    return model


def train(model: Any, data: tuple[torch.Tensor, torch.Tensor], mask: int, given: Any) -> float:
    """All steps of AdamW on one cycle; the loss on what was held out."""
    seen, held_out = data
    draw = torch.Generator().manual_seed(given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, given.learning_rate, total_steps=given.steps
    )
    model.train()
    for _ in range(given.steps):
        rows = torch.randint(len(seen), (BATCH,), generator=draw)
        loss = model(**masked(seen[rows], draw, mask)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    draw = torch.Generator().manual_seed(12345)  # the same masks for all
    total = count = 0.0
    with torch.inference_mode():
        for part in held_out.split(64):
            batch = masked(part, draw, mask)
            hidden = int((batch["labels"] != -100).sum())
            total += float(model(**batch).loss) * hidden
            count += hidden
    return total / count


def place(given: argparse.Namespace, form: str, heads: int, seed: int) -> Path:
    """Where a run's loss is kept."""
    options = f"{given.steps} {given.learning_rate:g}"
    return Path(given.work / f"{form.replace('/', '-')} {heads} {seed} {options}.json")


def figure(rows: list[dict[str, Any]]) -> None:
    """Loss over the number of heads, one line a form, bars of one standard deviation."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = drawn.subplots()
    for form in FORMS:
        own = [row for row in rows if row["form"] == form]
        axes.errorbar(
            [row["heads"] for row in own],
            [row["mean"] for row in own],
            yerr=[row["spread"] or 0 for row in own],
            marker="o",
            capsize=2,
            label=form,
        )
    axes.set(xscale="log", xlabel="heads, at the same h d", ylabel="held-out loss (nats a token)")
    axes.set_xticks(HEADS, [str(heads) for heads in HEADS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(color="0.9", linewidth=0.5)
    drawn.savefig(HERE / "study.png", dpi=150)


def main() -> None:
    """Run what is not there yet, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--glue", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--only", default="0/1", metavar="N/M", help="every M-th run from the N-th")
    given = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    texts, held_out = sentences(given.glue)
    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    data, mask = (
        (encode(texts, tokenizer), encode(held_out, tokenizer)),
        tokenizer.token_to_id("[MASK]"),
    )
    first, of = map(int, given.only.split("/"))
    runs = [(s, h, f) for s in range(given.seeds) for h in HEADS for f in FORMS]
    for seed, heads, form in runs[first::of]:
        kept = (
            given.work
            / f"{form.replace('/', '-')} {heads} {seed} {given.steps} {given.learning_rate:g}.json"
        )
        if not kept.is_file():
            given.seed = seed
            model = build(form, heads, seed)
            size = sum(p.numel() for p in model.parameters())
            loss = train(model, data, mask, given)
            kept.write_text(json.dumps({"loss": loss, "parameters": size}))
            print(form, heads, seed, round(loss, 4), flush=True)
    rows = []
    for form in FORMS:
        for heads in HEADS:
            names = [place(given, form, heads, seed) for seed in range(given.seeds)]
            if not all(name.is_file() for name in names):
                return  # another process is at it
            found = [json.loads(name.read_text()) for name in names]
            losses = [each["loss"] for each in found]
            spread = statistics.stdev(losses) if len(losses) > 1 else None
            row = {"form": form, "heads": heads, "mean": statistics.mean(losses), "spread": spread}
            rows.append(row | {"losses": losses, "parameters": found[0]["parameters"]})
    options = {"seeds": given.seeds, "steps": given.steps, "learning_rate": given.learning_rate}
    options |= {"width": WIDTH, "layers": LAYERS, "length": LENGTH, "batch": BATCH}
    options |= {"vocabulary": VOCABULARY, "sentences": [len(texts), len(held_out)]}
    result = {"versions": versions(), "options": options, "rows": rows}
    (HERE / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    figure(rows)


if __name__ == "__main__":
    main()
