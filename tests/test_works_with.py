"""What people use with transformers, on a converted MiniLM; see docs/works-with.md.

Packages that the tests do not need otherwise come with the extra ``works``.
"""

import copy
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_models import LOW, TINY, aligned, factors
from tolerances import assert_close
from torch import Tensor, nn

from collabify import convert, find_attention, storage

SENTENCES = ["A cat.", "The quick brown fox jumps over the lazy dog, who was dreaming of rabbits."]
WORKS = "pip install 'collabify[works]'"
P_L = {"method": "talking-heads", "projections": "logits"}
AO = "pip install 'collabify[torchao]', as make newest does"


@pytest.fixture(scope="module")
def folder(
    real_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """MiniLM at half its channels, and the original."""
    original = real_model("minilm-l6")
    model, source = storage.load(str(original))
    report = convert(model, dk=192, calibration="none", iterations=3)
    made = tmp_path_factory.mktemp("works") / "minilm-192"
    storage.save(model, made, source=source, report=report)
    return made, original


@pytest.fixture(scope="module")
def batch(folder: tuple[Path, Path]) -> dict[str, Tensor]:
    """Two sentences, one padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder[0])
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


@pytest.fixture
def model(folder: tuple[Path, Path]) -> Any:
    return aligned(transformers.AutoModel.from_pretrained(folder[0]).eval())


@pytest.fixture(scope="module")
def hidden(folder: tuple[Path, Path], batch: dict[str, Tensor]) -> Tensor:
    """What the model makes of the batch."""
    loaded = aligned(transformers.AutoModel.from_pretrained(folder[0]).eval())
    assert all(site.converted for site in find_attention(loaded))
    with torch.no_grad():
        return loaded(**batch)[0]


def states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch)[0]


def cosine(one: Tensor, other: Tensor, batch: dict[str, Tensor]) -> float:
    """Of hidden states, mean of the real tokens."""
    real = batch["attention_mask"] == 1
    return float(torch.cosine_similarity(one[real].float(), other[real].float(), dim=-1).mean())


def test_whoever_runs_all_tests_has_these_packages() -> None:
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert "collabify[demo,test,works]" in extras["dev"]
    pinned = dict(re.findall("^(.+)==(.+)$", (root / "constraints.txt").read_text(), re.MULTILINE))
    for requirement in extras["works"]:
        name, _, lowest = requirement.partition(">=")
        assert numbers(pinned[name]) >= numbers(lowest)
    assert ",torchao]" in (root / "Makefile").read_text(), "make newest"
    assert "make slow" in (root / ".github" / "workflows" / "test.yml").read_text()


def numbers(version: str) -> list[int]:
    return [int(each) for each in version.split(".")]


def test_fast_tokenizer_is_untouched(folder: tuple[Path, Path]) -> None:
    made, original = (transformers.AutoTokenizer.from_pretrained(each) for each in folder)
    assert made.is_fast
    assert made(SENTENCES)["input_ids"] == original(SENTENCES)["input_ids"]
    assert (folder[0] / "tokenizer.json").read_bytes() == (
        folder[1] / "tokenizer.json"
    ).read_bytes()


def test_feature_extraction(folder: tuple[Path, Path], hidden: Tensor) -> None:
    pipe = transformers.pipeline("feature-extraction", model=str(folder[0]))
    short = torch.tensor(pipe(SENTENCES[0]))
    assert_close(short[0], hidden[0, : short.shape[1]], "kernels")


def headed(auto: Any, folder: Path) -> Any:
    """The model of a folder with a new head for three labels, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return auto.from_pretrained(folder, num_labels=3).eval()


def scores(found: list[dict[str, Any]]) -> Tensor:
    """Of LABEL_0 and so on, in order."""
    assert {each["label"] for each in found} == {"LABEL_0", "LABEL_1", "LABEL_2"}
    return torch.tensor([each["score"] for each in sorted(found, key=lambda each: each["label"])])


@pytest.fixture
def with_head(folder: tuple[Path, Path], tmp_path: Path) -> Callable[[Any], tuple[Any, str]]:
    """Makes a model with a head of the converted MiniLM; its folder, too."""

    def make(auto: Any) -> tuple[Any, str]:
        model = headed(auto, folder[0])
        assert all(site.converted for site in find_attention(model))
        model.save_pretrained(tmp_path)
        transformers.AutoTokenizer.from_pretrained(folder[0]).save_pretrained(tmp_path)
        return aligned(model), str(tmp_path)

    return make


def test_text_classification(with_head: Any, batch: dict[str, Tensor]) -> None:
    model, name = with_head(transformers.AutoModelForSequenceClassification)
    logits = states(model, batch)
    assert logits.std(-1).min() > 0.01
    pipe = transformers.pipeline("text-classification", model=name, top_k=None)
    for found, expected in zip(pipe(SENTENCES), logits.softmax(-1), strict=True):
        assert_close(scores(found), expected, "kernels")


def test_token_classification(with_head: Any, batch: dict[str, Tensor]) -> None:
    model, name = with_head(transformers.AutoModelForTokenClassification)
    pipe = transformers.pipeline("token-classification", model=name, ignore_labels=[])
    best, labels = states(model, batch)[1, 1:-1].softmax(-1).max(-1)  # less [CLS] and [SEP]
    found = pipe(SENTENCES[1])
    assert [each["index"] for each in found] == list(range(1, 17))
    assert len(set(labels.tolist())) > 1
    assert [each["entity"] for each in found] == [f"LABEL_{label}" for label in labels.tolist()]
    assert_close(torch.tensor([float(each["score"]) for each in found]), best, "kernels")
    assert "".join(each["word"] for each in found[:3]) == "thequickbrown"


def test_image_classification(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    auto = transformers.AutoModelForImageClassification
    model = headed(auto, real_model("dinov2-small"))
    convert(model, method="head-svd", dk=192, calibration="none")
    model.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 56, "width": 56})
    processor.save_pretrained(tmp_path)
    stripes = (np.indices((40, 60, 3)).sum(0) * 9 % 256).astype(np.uint8)
    logits = states(aligned(model), dict(processor(stripes, return_tensors="pt")))
    assert logits.std() > 0.01
    pipe = transformers.pipeline("image-classification", model=str(tmp_path), top_k=3)
    found = pipe(Image.fromarray(stripes))
    assert_close(scores(found), logits.softmax(-1)[0], "kernels")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:UserWarning")
def test_peft_lora(model: Any, hidden: Tensor, batch: dict[str, Tensor], tmp_path: Path) -> None:
    """An adapter on the new projections: trained, saved, merged, unloaded."""
    peft = pytest.importorskip("peft", reason=WORKS)
    options = peft.LoraConfig(r=4, target_modules=["query", "key", "value"])
    adapted = peft.get_peft_model(model, options)
    assert_close(states(adapted, batch), hidden, "kernels")  # B is zero
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted.train()
    for _ in range(2):  # A learns once B is no longer zero
        optimizer.zero_grad()
        (adapted(**batch)[0] - 1).square().mean().backward()
        optimizer.step()
    adapted.eval()
    trained = [p for n, p in adapted.named_parameters() if "lora_A" in n and "key" in n]
    assert len(trained) == 6
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    after = states(adapted, batch)
    assert (after - hidden).abs().max() > 1e-2
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert_close(states(merged, batch), after, "kernels")
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModel.from_pretrained(tmp_path / "merged")
    assert all(site.converted for site in find_attention(again))
    assert_close(states(again, batch), after, "kernels")
    assert_close(states(adapted.unload(), batch), hidden, "kernels")


def test_sentence_transformers(
    folder: tuple[Path, Path], hidden: Tensor, batch: dict[str, Tensor]
) -> None:
    sentences = pytest.importorskip("sentence_transformers", reason=WORKS)
    found = sentences.SentenceTransformer(str(folder[0]), device="cpu")
    mask = batch["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    expected = nn.functional.normalize(mean, dim=-1)
    assert_close(found.encode(SENTENCES, convert_to_tensor=True), expected, "kernels")


traced = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 cannot trace models of transformers 5"
)


def dynamic(batch: dict[str, Tensor], longest: int = 512) -> dict[str, Any]:
    size, length = torch.export.Dim("size", max=64), torch.export.Dim("length", min=2, max=longest)
    return {name: {0: size, 1: length} for name in batch}


def longer(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Three times the samples, of another length."""
    return {name: torch.cat([tensor] * 3)[:, :length] for name, tensor in batch.items()}


@traced
def test_torch_export(model: Any, hidden: Tensor, batch: dict[str, Tensor]) -> None:
    """With any number of samples of any length."""
    exported = torch.export.export(model, (), batch, dynamic_shapes=dynamic(batch)).module()
    assert_close(states(exported, batch), hidden, "kernels")
    other = longer(batch, 9)
    assert_close(states(exported, other), states(model, other), "kernels")


QUICK = ("cp", "tucker", "talking-heads", "values")
FORMS = [form if form in QUICK else pytest.param(form, marks=pytest.mark.slow) for form in LOW]


@traced
@pytest.mark.parametrize("form", FORMS)
def test_torch_export_of_every_form(form: str) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW[form])
    batch = TINY["bert"].batch(model)
    shapes = dynamic(batch, model.config.max_position_embeddings)
    exported = torch.export.export(model, (), batch, dynamic_shapes=shapes).module()
    other = longer(batch, 5)
    assert_close(states(exported, other), states(model, other), "kernels")


def onnx_session(model: Any, batch: dict[str, Tensor], path: Path) -> Callable[..., Tensor]:
    """The model written by torch's exporter and read by onnxruntime."""
    runtime = pytest.importorskip("onnxruntime", reason=WORKS)
    pytest.importorskip("onnxscript", reason=WORKS)

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.model(**dict(zip(batch, tensors, strict=True)))[0]

    shapes = (tuple(dynamic(batch, model.config.max_position_embeddings).values()),)
    inputs = tuple(batch.values())
    torch.onnx.export(
        States().eval(), inputs, path, dynamo=True, dynamic_shapes=shapes, external_data=False
    )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(other: dict[str, Tensor]) -> Tensor:
        feed = dict(zip(names, (tensor.numpy() for tensor in other.values()), strict=True))
        return torch.from_numpy(session.run(None, feed)[0])

    return run


of_the_exporter = pytest.mark.filterwarnings(
    "ignore:# The axis name",
    "ignore:.*isinstance.treespec, LeafSpec.:FutureWarning",
    "ignore::DeprecationWarning",  # onnxscript's own
)


@of_the_exporter
def test_onnx(
    model: Any, hidden: Tensor, batch: dict[str, Tensor], folder: tuple[Path, Path], tmp_path: Path
) -> None:
    run = onnx_session(model, batch, tmp_path / "model.onnx")
    assert_close(run(batch), hidden, "kernels")
    other = longer(batch, 9)
    assert_close(run(other), states(model, other), "kernels")
    whole = (folder[1] / "model.safetensors").stat().st_size
    assert (tmp_path / "model.onnx").stat().st_size < whole


@of_the_exporter
@pytest.mark.slow
@pytest.mark.parametrize("form", LOW)
def test_onnx_of_every_form(form: str, tmp_path: Path) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW[form])
    batch = TINY["bert"].batch(model)
    run, other = onnx_session(model, batch, tmp_path / "model.onnx"), longer(batch, 5)
    assert_close(run(other), states(model, other), "kernels")


COMPILED = """
import sys, torch, collabify, transformers
torch.set_num_threads(1)
model = transformers.AutoModel.from_pretrained(sys.argv[1]).eval()
batch = torch.load(sys.argv[2])
compiled = torch.compile(model, fullgraph=True)
with torch.no_grad():
    torch.save((compiled(**batch)[0], model(**batch)[0]), sys.argv[2])
"""


def compiled(folder: Path, batch: dict[str, Tensor], path: Path) -> tuple[Tensor, Tensor]:
    """Hidden states of the compiled model and of the plain one, without the tests' type checks."""
    torch.save(batch, path)
    subprocess.run([sys.executable, "-c", COMPILED, folder, path], check=True)
    found, expected = torch.load(path)
    return found, expected


@traced
def test_torch_compile(tmp_path: Path) -> None:
    tiny = TINY["bert"]
    model = tiny.build()
    convert(model, **LOW["cp"])
    model.save_pretrained(tmp_path / "model")
    found, expected = compiled(tmp_path / "model", tiny.batch(model), tmp_path / "batch.pt")
    assert not torch.equal(found, expected), "it was compiled"
    assert_close(found, expected, "kernels")


@traced
@pytest.mark.slow
def test_torch_compile_of_a_real_model(
    folder: tuple[Path, Path], batch: dict[str, Tensor], tmp_path: Path
) -> None:
    found, expected = compiled(folder[0], batch, tmp_path / "batch.pt")
    assert_close(found, expected, "kernels")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"channels": "all"}, {"method": "tucker"}, P_L])
def test_flex_attention(
    folder: tuple[Path, Path], options: dict[str, str], batch: dict[str, Tensor]
) -> None:
    model = transformers.AutoModel.from_pretrained(folder[1]).eval()
    convert(model, dk=192, calibration="none", iterations=3, **options)
    expected, real = states(model, batch), batch["attention_mask"] == 1
    model.set_attn_implementation("flex_attention")
    assert_close(states(model, batch)[real], expected[real], "kernels")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per")
def test_dynamic_int8(model: Any, folder: tuple[Path, Path], batch: dict[str, Tensor]) -> None:
    """A converted model loses no more by it than its original."""

    def kept(whole: Any) -> float:
        kinds = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(whole), kinds)
        name = type(quantised.encoder.layer[0].attention.self.key).__module__
        assert "quantized.dynamic" in name
        return cosine(states(quantised, batch), states(whole, batch), batch)

    original = transformers.AutoModel.from_pretrained(folder[1]).eval()
    assert kept(model) > kept(original) - 0.01


def test_torchao(model: Any, hidden: Tensor, batch: dict[str, Tensor]) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason=AO)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert type(model.encoder.layer[0].attention.self.key.weight) is not nn.Parameter
    assert 0.999 < cosine(states(model, batch), hidden, batch) < 1


@pytest.mark.parametrize(
    ("kind", "least", "loss"), [("Linear8bitLt", 0.999, 0.001), ("LinearNF4", 0.97, 0.005)]
)
def test_bitsandbytes(
    kind: str,
    least: float,
    loss: float,
    model: Any,
    folder: tuple[Path, Path],
    batch: dict[str, Tensor],
) -> None:
    """Its layers in place of torch's, once the model is loaded."""
    layers = pytest.importorskip("bitsandbytes.nn", reason=WORKS)
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}

    def kept(whole: Any) -> float:
        quantised = copy.deepcopy(whole)
        for name, old in list(quantised.encoder.named_modules()):
            if isinstance(old, nn.Linear):
                size, bias = (old.in_features, old.out_features), old.bias is not None
                new = getattr(layers, kind)(*size, bias=bias, **options)
                new.load_state_dict(old.state_dict())
                quantised.encoder.set_submodule(name, new.to("cpu"))
        found = states(quantised, batch)
        assert not quantised.encoder.layer[0].attention.self.key.weight.is_floating_point()
        return cosine(found, states(whole, batch), batch)

    original = transformers.AutoModel.from_pretrained(folder[1]).eval()
    assert max(least, kept(original) - loss) < kept(model) < 1


def torchao_config() -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason=AO)
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


def bitsandbytes_config() -> Any:
    pytest.importorskip("bitsandbytes", reason=WORKS)
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


@pytest.mark.parametrize(
    "other", [lambda: transformers.GPTQConfig(bits=4), torchao_config, bitsandbytes_config]
)
def test_quantising_while_loading_is_refused(
    other: Callable[[], Any], folder: tuple[Path, Path]
) -> None:
    """config.json holds one method, and that is collabify."""
    options = {"quantization_config": other()}
    with pytest.raises(ValueError, match="quantized with CollabifyConfig but you are passing"):
        transformers.AutoModel.from_pretrained(folder[0], **options)


@pytest.mark.parametrize(
    "where", ["auto", {"embeddings": "cpu", "encoder": "cpu", "pooler": "disk"}]
)
def test_device_map(
    where: Any, folder: tuple[Path, Path], hidden: Tensor, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    """Of accelerate, also with a part of the model on the disk."""
    options = {"device_map": where, "offload_folder": str(tmp_path)}
    model = transformers.AutoModel.from_pretrained(folder[0], **options)
    assert_close(states(model, batch), hidden, "kernels")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_gradient_checkpointing(model: Any, batch: dict[str, Tensor]) -> None:
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    for each in (plain, model):
        for module in each.train().modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        each(**batch)[0].square().mean().backward()
    found = dict(factors(model))
    assert found
    for name, factor in factors(plain).items():
        assert_close(found[name].grad, factor.grad, "kernels")


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float16, 0.9999), (torch.bfloat16, 0.999)], ids=str
)
def test_half_precision(
    dtype: torch.dtype,
    least: float,
    folder: tuple[Path, Path],
    hidden: Tensor,
    batch: dict[str, Tensor],
) -> None:
    model = transformers.AutoModel.from_pretrained(folder[0], dtype=dtype)
    found = states(model, batch)
    assert found.dtype == dtype
    assert cosine(found, hidden, batch) > least


def test_autocast(model: Any, hidden: Tensor, batch: dict[str, Tensor]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cosine(states(model, batch), hidden, batch) > 0.999


def test_attentions_and_hidden_states(
    folder: tuple[Path, Path], hidden: Tensor, batch: dict[str, Tensor]
) -> None:
    model = transformers.AutoModel.from_pretrained(folder[0], attn_implementation="eager")
    with torch.no_grad():
        found = model(**batch, output_attentions=True, output_hidden_states=True)
    assert_close(found.hidden_states[-1], hidden, "kernels")
    assert len(found.hidden_states) == 7
    real = batch["attention_mask"] == 1
    for probs in found.attentions:
        assert probs.shape == (2, 12, 18, 18)
        assert_close(probs.sum(-1), torch.ones(2, 12, 18), "kernels")
        assert probs[0][:, :, ~real[0]].abs().max() == 0, "padding is never attended to"


def test_a_configuration_alone_builds_the_original(folder: tuple[Path, Path]) -> None:
    config = transformers.AutoConfig.from_pretrained(folder[0])
    model = transformers.AutoModel.from_config(config)
    assert not any(site.converted for site in find_attention(model))
