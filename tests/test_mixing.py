"""How heads mix what they share, in numbers, words and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import HEADS, LOW, TINY
from typer.testing import CliRunner

from collabify import convert, find_attention
from collabify.cli.app import app
from collabify.errors import LayerError, NonFiniteError, OptionError, OutputError
from collabify.mixing import effective, is_converted, mixing_report
from collabify.mixing_figure import by_likeness, mixing_figure
from collabify.report import save_figure

KINDS = {
    "cp": {"M": (HEADS, 10)},
    "head-svd": {"M": (HEADS, 10)},
    "tucker": {},
    "tucker-heads": {"M": (HEADS, 2)},
    "talking-heads": {"P_l": (HEADS, 2), "P_w": (2, HEADS)},
    "talking-weights": {"P_w": (4, HEADS)},
    "value-heads": {"M": (HEADS, 10), "P_w": (2, HEADS)},
}


def test_one_hot_rows_read_one_and_even_rows_all() -> None:
    rows = torch.tensor([[0, 5.0, 0, 0], [2.0, -2, 2, 2], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert effective(rows) == pytest.approx([1, 4, 2, 0])


@pytest.mark.parametrize("form", KINDS)
def test_every_form_shows_what_it_mixes(form: str) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW[form])
    report = mixing_report(model)
    assert report.layers == 2
    assert len(report.mixings) == 2 * len(KINDS[form])
    for mixing in report.mixings:
        assert (len(mixing.weights), len(mixing.weights[0])) == KINDS[form][mixing.kind]
        assert all(1 <= number <= len(mixing.weights[0]) for number in mixing.effective)
        assert f"layer {mixing.index}, {mixing.kind}: a " in mixing.words()
    assert ("nothing is mixed" in report.reading()) == (not KINDS[form])
    assert json.loads(report.to_json())["layers"] == 2
    panels = [axes for axes in mixing_figure(report).axes if axes.images]
    drawn = sorted(axes.get_title() for axes in panels)
    assert drawn == sorted(
        f"{m.kind}: {m.mean_effective:.1f} of {len(m.weights[0])}" for m in report.mixings
    )


def test_channels_count_by_their_lengths() -> None:
    model = TINY["bert"].build()
    convert(model, **LOW["cp-all"])
    before = mixing_report(model)
    with torch.no_grad():
        for site in find_attention(model):
            site.query.weight.mul_(4)
            site.module.mixing.div_(4)  # type: ignore[operator]
    for old, new in zip(before.mixings, mixing_report(model).mixings, strict=True):
        assert old.weights == pytest.approx(np.asarray(new.weights), rel=1e-5)


def test_base_heads_count_by_what_they_say() -> None:
    """However queries, keys and P_l share it among them."""
    model = TINY["bert"].build()
    convert(model, method="talking-heads", base_heads=4, base_width=3, calibration="none")
    before = mixing_report(model)
    for site in find_attention(model):
        with torch.no_grad():
            rows = slice(3, 6)  # the second base head
            site.query.weight[rows] *= 8
            site.key.weight[rows] /= 2
            site.module.logits_mixing[:, 1] /= 4
    after = mixing_report(model)
    for old, new in zip(before.mixings, after.mixings, strict=True):
        assert new.effective == pytest.approx(old.effective, rel=1e-5)
    site = find_attention(model)[0]
    query, key = (part.weight.detach().view(-1, 3, 24) for part in (site.query, site.key))
    lengths = torch.stack([(q.T @ k).norm() for q, k in zip(query, key[: len(query)], strict=True)])
    weights = site.module.logits_mixing.detach() * lengths
    torch.testing.assert_close(torch.tensor(after.mixings[0].weights), weights)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW["talking-heads"])
    with pytest.raises(LayerError, match=r"layers=\[\] must name at least one layer"):
        mixing_report(model, layers=[])
    with torch.no_grad():
        find_attention(model)[1].module.logits_mixing[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="logits_mixing"):
        mixing_report(model)


def test_inserted_projections_read_one_head() -> None:
    model = TINY["vit"].build()
    assert not is_converted(model)
    convert(model, method="talking-heads", calibration="none", layers=[1])
    assert is_converted(model)
    report = mixing_report(model)
    assert [mixing.index for mixing in report.mixings] == [1, 1]
    assert all(mixing.effective == (1, 1, 1) for mixing in report.mixings)
    assert report.reading() == (
        "P_l: a head reads 1.0 of 3 base heads. P_w: a value head reads 1.0 of 3 heads."
    )
    for layer in (0, 2):
        with pytest.raises(
            LayerError, match=rf"layer={layer} must be one that was converted \(1\)"
        ):
            mixing_report(model, layers=[layer])


def test_what_is_alike_is_side_by_side() -> None:
    one, other = np.eye(2)
    rows = np.stack([one, other, -2 * one, 3 * other + 0.01, one + 0.01, other])
    order = by_likeness(rows)
    assert sorted(order) == list(range(6))
    groups = [n % 2 for n in order]
    assert groups in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_figures_that_cannot_be_written(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW["cp"])
    report = mixing_report(model)
    with pytest.raises(OptionError, match="must end in one of"):
        save_figure(lambda: mixing_figure(report), tmp_path / "figure.txt")
    with pytest.raises(OutputError, match="is not a folder"):
        save_figure(lambda: mixing_figure(report), tmp_path / "nowhere" / "figure.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OutputError, match=r"could not be written .* Choose another --plot"):
        save_figure(lambda: mixing_figure(report), tmp_path / "taken.png")


def test_the_command_shows_converted_models(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW["talking-heads"])
    model.save_pretrained(tmp_path / "model")
    command = ["analyze", str(tmp_path / "model"), "--plot", str(tmp_path / "figure.png")]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert "layer 1, P_w: a value head reads" in outcome.stdout
    assert "P_l: a head reads" in outcome.stdout
    assert (tmp_path / "figure.png").stat().st_size > 5000
    outcome = CliRunner().invoke(app, [*command[:2], "--json", "--layer", "1"])
    assert {m["index"] for m in json.loads(outcome.stdout)["mixings"]} == {1}
    outcome = CliRunner().invoke(app, [*command[:2], "--layer", "7"])
    assert outcome.exit_code == 1
    assert "layer=7 must be one that was converted (0, 1)" in outcome.stderr
