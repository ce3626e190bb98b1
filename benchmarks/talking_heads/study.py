"""The papers' claim in miniature: more, narrower heads, with and without talking, from scratch.

    python benchmarks/talking_heads/study.py --glue FOLDER --work DIR [--seeds N] [--steps N]

Writes study.json and study.png. A small BERT (two layers, D = 128) learns to fill in masked
characters of the sentences of five GLUE tasks, shuffled and packed into blocks, with 4, 8, 16 and
32 heads at the same h d = D: multi-head, talking heads (P_l and P_w, from the identity), P_l only,
P_w only, and collaborative attention at D/2 with all channels, fitted to the random start.
All see the same batches with the same masks. Measured: loss on held-out sentences (of the
validation splits that are not in training), mean and spread over seeds, and the same of the
difference to multi-head with as many heads and the same seed. Every run's loss stays in DIR, so
that a study that was stopped goes on; with --only N/M a process does every M-th run, so that
several share the work.

Characters, since with a vocabulary of thousands of word pieces so small a model is still at the
unigram loss after all the steps that there is time for, whatever its attention. Positions start as
sinusoids, and the weights with a deviation of 0.08, about 1 / sqrt(D), for the same reason.
"""

import argparse
import collections
import json
import random
import statistics
from pathlib import Path
from typing import Any

import datasets
import torch
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
WIDTH, LAYERS, LENGTH, BATCH, VOCABULARY, HIDDEN = 128, 2, 32, 48, 64, 0.25
MASK, RARE = 0, 1  # ids of no character
FORMS: dict[str, dict[str, Any] | None] = {
    "multi-head": None,  # BERT as it is
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


def encode(texts: list[str], alphabet: str = "") -> tuple[torch.Tensor, str]:
    """Ids ``[n, t]`` of the characters of the shuffled sentences, a line each; and the alphabet."""
    text = "\n".join(random.Random(0).sample(texts, len(texts))).lower()
    if not alphabet:
        common = collections.Counter(text).most_common(VOCABULARY - 2)
        alphabet = "".join(letter for letter, _ in common)
    place = {letter: index for index, letter in enumerate(alphabet, start=2)}
    ids = torch.tensor([place.get(letter, RARE) for letter in text])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH), alphabet


def loss_of(model: Any, ids: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Nats a character, of a share of them hidden at random."""
    hidden = torch.rand(ids.shape, generator=draw) < HIDDEN
    states = model.bert(ids.masked_fill(hidden, MASK)).last_hidden_state
    return torch.nn.functional.cross_entropy(model.cls(states[hidden]), ids[hidden])


def unigram(data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The held-out loss of guessing by frequency alone."""
    counts = torch.bincount(data[0].flatten(), minlength=VOCABULARY) + 1.0
    return float(-(counts / counts.sum()).log()[data[1].flatten()].mean())


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
        initializer_range=0.08,
    )
    model = BertForMaskedLM(config)
    turns = 1e4 ** -torch.linspace(0, 1, WIDTH // 2) * torch.arange(LENGTH)[:, None]
    positions = model.bert.embeddings.position_embeddings.weight
    positions.data = 0.08 * torch.cat((turns.sin(), turns.cos()), dim=1)
    options = FORMS[form]
    if options is not None:
        collabify.convert(model, calibration="none", **options)
    return model


def train(model: Any, data: tuple[torch.Tensor, torch.Tensor], given: Any, seed: int) -> float:
    """All steps of AdamW on one cycle; the loss on what was held out."""
    seen, held_out = data
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, given.learning_rate, total_steps=given.steps, pct_start=0.1
    )
    model.train()
    for _ in range(given.steps):
        rows = torch.randint(len(seen), (BATCH,), generator=draw)
        loss = loss_of(model, seen[rows], draw)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    draw = torch.Generator().manual_seed(12345)  # the same masks for all
    with torch.inference_mode():
        parts = [float(loss_of(model, part, draw)) for part in held_out.split(512)]
    return statistics.mean(parts)


def place(given: argparse.Namespace, form: str, heads: int, seed: int) -> Path:
    """Where a run's loss is kept."""
    options = f"{given.steps} {given.learning_rate:g}"
    return Path(given.work / f"{form.replace('/', '-')} {heads} {seed} {options}.json")


def spread(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation over the seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "deviation": deviation}


def figure(rows: list[dict[str, Any]]) -> None:
    """Loss over the number of heads, one line a form, bars of one standard deviation."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = drawn.subplots()
    for form in FORMS:
        own = [row for row in rows if row["form"] == form]
        axes.errorbar(
            [row["heads"] for row in own],
            [row["loss"]["mean"] for row in own],
            yerr=[row["loss"]["deviation"] for row in own],
            marker="o",
            capsize=2,
            label=form,
        )
    axes.set(
        xscale="log", xlabel="heads, at the same h d", ylabel="held-out loss (nats a character)"
    )
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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--only", default="0/1", metavar="N/M", help="every M-th run from the N-th")
    given = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    texts, held_out = sentences(given.glue)
    seen, alphabet = encode(texts)
    data = seen, encode(held_out, alphabet)[0]
    first, of = map(int, given.only.split("/"))
    runs = [(s, h, f) for s in range(given.seeds) for h in HEADS for f in FORMS]
    for seed, heads, form in runs[first::of]:
        kept = place(given, form, heads, seed)
        if not kept.is_file():
            model = build(form, heads, seed)
            size = sum(p.numel() for p in model.parameters())
            loss = train(model, data, given, seed)
            kept.write_text(json.dumps({"loss": loss, "parameters": size}))
            print(form, heads, seed, round(loss, 4), flush=True)
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        for heads in HEADS:
            names = [place(given, form, heads, seed) for seed in range(given.seeds)]
            if not all(name.is_file() for name in names):
                return  # another process is at it
            found = [json.loads(name.read_text()) for name in names]
            rows.append({"form": form, "heads": heads, "parameters": found[0]["parameters"]})
            rows[-1]["losses"] = [each["loss"] for each in found]
    for row in rows:
        same = next(each for each in rows if each["heads"] == row["heads"])  # multi-head is first
        gains = [new - old for new, old in zip(row["losses"], same["losses"], strict=True)]
        row["loss"], row["to multi-head"] = spread(row["losses"]), spread(gains)
    options = {"seeds": given.seeds, "steps": given.steps, "learning_rate": given.learning_rate}
    options |= {"width": WIDTH, "layers": LAYERS, "length": LENGTH, "batch": BATCH}
    options |= {"hidden": HIDDEN, "characters": [part.numel() for part in data]}
    result = {"versions": versions(), "options": options, "unigram": unigram(data), "rows": rows}
    (HERE / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    figure(rows)


if __name__ == "__main__":
    main()
