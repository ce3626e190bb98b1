"""What holds for every adapter and every form, on tiny models with padding."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from tiny_models import FORMS, HEADS, LOW, LOW_RANK, TINY, Tiny, factors, pairs, run, sources
from tolerances import TOLERANCES, assert_close
from torch import Tensor, nn

from collabify import convert, find_attention

every_model = pytest.mark.parametrize("name", TINY)
every_pair = pytest.mark.parametrize(("name", "form"), pairs(FORMS))
every_kernel = pytest.mark.parametrize("kernel", ["eager", "sdpa"])

# Parameters by name, independent of the adapters.
QUERY_KEY = re.compile(
    r"attention\.(self\.)?((query|key|[qk]_lin|[qk]_proj)\.(weight|bias)|(logits_)?mixing|core)$"
)
VALUE_OUTPUT = re.compile(
    r"attention\.((self\.)?(value|v_lin|v_proj)|(output\.)?dense|out_lin|o_proj)\.(weight|bias)$"
    r"|weights_mixing$"
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(23)


def seeded(model: Any, batch: dict[str, Tensor], seed: int) -> Tensor:
    """One forward pass whose dropout starts from ``seed``."""
    torch.manual_seed(seed)
    return run(model, batch)


def calls(model: Any, batch: dict[str, Tensor]) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
    """Site, input, output and probabilities of every attention call, in order of execution."""
    seen: list[Any] = []
    hooks = []
    for site in find_attention(model):

        def hook(_module: Any, args: Any, kwargs: Any, result: Any, site: Any = site) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen.append((site, hidden, *result))

        hooks.append(site.module.register_forward_hook(hook, with_kwargs=True))
    model(**batch)
    for handle in hooks:
        handle.remove()
    return seen


def changed(form: str, name: str) -> bool:
    """Whether a conversion makes this parameter anew."""
    values = {"dv", "value_heads"} & LOW[form].keys()
    return bool(QUERY_KEY.search(name) or (values and VALUE_OUTPUT.search(name)))


def mixing_of(module: Any) -> Tensor:
    """Weights of all shared channels, head by head."""
    if hasattr(module, "logits_mixing"):
        base = torch.eye(HEADS) if module.logits_mixing is None else module.logits_mixing
        width = getattr(module, module.layout.query).out_features // base.shape[1]
        return torch.stack([weight for weight in base.T for _ in range(width)], dim=1).double()
    if module.channels is None:
        return module.mixing
    whole = torch.zeros(HEADS, LOW_RANK, dtype=module.mixing.dtype)
    for h, kept in enumerate(module.channels.tolist()):
        for n, r in enumerate(kept[: module.mixing.shape[1]]):
            whole[h, r] = module.mixing[h, n]
    return whole


def slow_probs(site: Any, x: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Attention from the factors, one head at a time, written from the equations."""
    key, content = site.key.weight[:-HEADS], site.key.weight[-HEADS:]
    q, k = x @ site.query.weight.T, x @ key.T
    own = dict(site.module.named_parameters(recurse=False))
    probs = []
    for h in range(HEADS):
        if "core" not in own:
            core = torch.diag(mixing_of(site.module)[h])
        elif "mixing" in own:
            core = sum(own["mixing"][h, a] * own["core"][a] for a in range(len(own["core"])))
        else:
            core = own["core"][h]
        logits = (q @ core @ k.mT + (x @ content[h])[:, None, :]) * scale
        probs.append(logits.masked_fill(~allowed[:, None], float("-inf")).softmax(-1))
    return torch.stack(probs, 1)


def slow_output(site: Any, x: Tensor, probs: Tensor) -> Tensor:
    """What the module makes of the probabilities."""
    value, module = site.value(x), site.module
    if module.weights_mixing is not None:
        probs = torch.einsum("vh,bhts->bvts", module.weights_mixing, probs)
    owner = [n // (value.shape[-1] // probs.shape[1]) for n in range(value.shape[-1])]
    if module.context_rows is not None:
        owner = (module.context_rows // site.head_dim).tolist()
    channels = [probs[:, h] @ value[..., n, None] for n, h in enumerate(owner)]
    context = torch.cat(channels, dim=-1)
    if "Albert" in type(site.module).__name__:
        return site.module.LayerNorm(x + site.output(context))
    return context if site.name.endswith(".self") else site.output(context)


@every_kernel
@every_pair
def test_exact_factors_change_no_real_token(name: str, form: str, kernel: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation(kernel)
    batch = tiny.batch(model)
    with torch.no_grad():
        before = run(model, batch)
        convert(model, **tiny.full(form))
        assert all(site.converted for site in find_attention(model))
        assert not any(module.training for module in model.modules())
        assert_close(run(model, batch), before, "exact")


@every_pair
def test_exact_factors_return_the_same_attention(name: str, form: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation("eager")
    batch = tiny.batch(model)
    with torch.no_grad():
        before = model(**batch, output_attentions=True).attentions
        convert(model, **tiny.full(form))
        after = model(**batch, output_attentions=True).attentions
    assert len(after) == len(before) > 0
    for actual, expected in zip(after, before, strict=True):
        assert_close(actual, expected, "exact")


@pytest.mark.parametrize(("name", "form"), pairs(LOW))
def test_low_rank_is_what_its_factors_say(name: str, form: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    model.set_attn_implementation("eager")
    batch = tiny.batch(model)
    allowed = sources(model, batch)
    forms = [site.read() for site in find_attention(model)]
    with torch.no_grad():
        before = run(model, batch)
        report = convert(model, **LOW[form])
        after = run(model, batch)
        assert (after - before).abs().max() > 1e-2
        for site, x, output, probs in calls(model, batch):
            expected = slow_probs(site, x, tiny.head_dim**-0.5, allowed)
            assert_close(probs, expected, "reference")
            assert_close(output, slow_output(site, x, expected), "reference")
        model.set_attn_implementation("sdpa")
        assert_close(run(model, batch), after, "exact")
    for site, original, layer in zip(find_attention(model), forms, report.layers, strict=True):
        assert site.module.scaling == original.scale == tiny.head_dim**-0.5
        assert site.query.weight.shape == (layer.rank, site.width)
        assert torch.equal(site.key.weight[layer.rank :], original.content)
        assert layer.relative_error is not None
        assert 0.01 < layer.relative_error < 1


@every_model
def test_content_bias_is_the_query_bias_seen_by_the_keys(name: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64)
    expected = []
    for site in find_attention(model):
        w_k = site.key.weight.detach().view(HEADS, tiny.head_dim, -1)
        b_q = torch.zeros(HEADS * tiny.head_dim) if site.query.bias is None else site.query.bias
        b_q = b_q.detach().view(HEADS, tiny.head_dim)
        expected.append([sum(b_q[h, d] * w_k[h, d] for d in range(tiny.head_dim)) for h in (0, 2)])
    convert(model, **LOW["cp"])
    for site, (first, last) in zip(find_attention(model), expected, strict=True):
        assert_close(site.key.weight.detach()[-HEADS], first.double(), "reference")
        assert_close(site.key.weight.detach()[-1], last.double(), "reference")


@every_kernel
@every_pair
def test_dropout_acts_as_before(name: str, form: str, kernel: str) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=torch.float64, attention_dropout=0.3, dropout=0.1).train()
    model.set_attn_implementation(kernel)
    batch = tiny.batch(model)
    with torch.no_grad():
        before = seeded(model, batch, 1)
        convert(model, **tiny.full(form))
        assert all(module.training for module in model.modules())
        assert_close(seeded(model, batch, 1), before, "exact")


@every_model
def test_attention_dropout_alone_acts_in_training_only(name: str) -> None:
    tiny = TINY[name]
    dropped, plain = (tiny.build(attention_dropout=share) for share in (0.3, 0.0))
    batch = tiny.batch(dropped)
    with torch.no_grad():
        for model in (dropped, plain):
            convert(model, **LOW["cp"])
        still = run(dropped.eval(), batch)
        assert torch.equal(run(plain.train(), batch), still)
        first, second = (seeded(dropped.train(), batch, seed) for seed in (1, 2))
    assert (first - second).abs().max() > 1e-3
    assert (first - still).abs().max() > 1e-3


@every_pair
def test_gradients_reach_every_factor(name: str, form: str) -> None:
    tiny = TINY[name]
    model = tiny.build().train()
    convert(model, **LOW[form])
    output = run(model, tiny.batch(model))
    (output * torch.randn_like(output)).sum().backward()
    for label, factor in factors(model).items():
        assert factor.requires_grad, label
        assert factor.grad is not None, label
        assert factor.grad.isfinite().all(), label
        assert factor.grad.ne(0).any(-1).all(), label  # every row: content rows of the key too


@every_model
def test_gradients_of_everything_else_are_the_same(name: str) -> None:
    tiny = TINY[name]
    gradients = []
    for converted in (False, True):
        model = tiny.build(dtype=torch.float64)
        if converted:
            convert(model, **tiny.full("tucker"))
        output = run(model, tiny.batch(model))
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        named = model.named_parameters()
        gradients.append(
            {key: p.grad for key, p in named if not QUERY_KEY.search(key) and p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert_close(gradients[1][key], gradient, "gradient")


@every_pair
def test_everything_else_stays_the_same_object(name: str, form: str) -> None:
    model = TINY[name].build(headed=True)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    convert(model, **LOW[form])
    kept = {key: p for key, p in model.named_parameters() if not changed(form, key)}
    assert kept.keys() == {key for key in parameters if not changed(form, key)}
    assert all(parameters[key] is p for key, p in kept.items())
    after = dict(model.named_buffers())
    assert all(after[key] is buffer for key, buffer in buffers.items())
    replaced = re.compile(r"\.(query|key|value|[qkv]_lin|[qkv]_proj)$")
    for key, module in model.named_modules():
        assert modules[key] is module or replaced.search(key), key


@every_pair
def test_every_factor_matters(name: str, form: str) -> None:
    model = TINY[name].build()
    convert(model, **LOW[form])
    batch = TINY[name].batch(model)
    with torch.no_grad():
        before = run(model, batch)
        for label, factor in factors(model).items():
            rows = factor.split([len(factor) - HEADS, HEADS]) if ".key" in label else (factor,)
            for part in rows:
                kept = part.clone()
                part += 0.3 * torch.randn_like(part)
                assert (run(model, batch) - before).abs().max() > 1e-3, label
                part.copy_(kept)
        assert torch.equal(run(model, batch), before)


@every_model
def test_layers_not_asked_for_stay(name: str) -> None:
    tiny = TINY[name]
    model = tiny.build()
    last = len(tiny.sites) - 1
    others = [(site.module, type(site.module)) for site in find_attention(model)[:last]]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = convert(model, dk=LOW_RANK, layers=[last])
    sites = find_attention(model)
    assert [layer.index for layer in report.layers] == [last]
    assert [site.converted for site in sites] == [False] * last + [True]
    assert [(site.module, type(site.module)) for site in sites[:last]] == others
    after = model.state_dict()
    changed = {key for key in after if key not in before or not same(before[key], after[key])}
    assert all(tiny.sites[last] in key for key in changed)
    run(model, tiny.batch(model))


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


@every_model
def test_sites_with_and_without_a_head(name: str) -> None:
    tiny = TINY[name]
    for headed in (False, True):
        sites = find_attention(tiny.build(headed=headed))
        assert tuple(site.name for site in sites) == tiny.sites
        assert [site.index for site in sites] == list(range(len(sites)))
        assert {(site.num_heads, site.head_dim) for site in sites} == {(HEADS, tiny.head_dim)}
        assert len({site.module for site in sites}) == len(sites)


@every_model
def test_forms_are_the_projections(name: str) -> None:
    tiny = TINY[name]
    for site in find_attention(tiny.build()):
        read = site.read()
        heads = slice(tiny.head_dim, 2 * tiny.head_dim)  # the second
        w_q, w_k = (part.weight.detach().double()[heads] for part in (site.query, site.key))
        assert_close(read.dense()[1], w_q.T @ w_k, "reference")


def count(model: nn.Module) -> tuple[int, int, int]:
    """Parameters of the query-key part, of attention, of the model; each tensor once."""
    sizes = {key: p.numel() for key, p in model.named_parameters()}
    query_key = sum(size for key, size in sizes.items() if QUERY_KEY.search(key))
    value_output = sum(size for key, size in sizes.items() if VALUE_OUTPUT.search(key))
    return query_key, query_key + value_output, sum(sizes.values())


@every_pair
@pytest.mark.parametrize("layers", [None, [0]])
def test_report_counts_what_is_there(name: str, form: str, layers: list[int] | None) -> None:
    model = TINY[name].build(headed=True)
    before = count(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config, classes = model.config.to_dict(), [type(module) for module in model.modules()]
    dry = convert(model, **LOW[form], layers=layers, dry_run=True)
    assert config == model.config.to_dict()
    assert classes == [type(module) for module in model.modules()]
    assert all(same(value, state[key]) for key, value in model.state_dict().items())
    report = convert(model, **LOW[form], layers=layers)
    for said in (dry, report):
        counts = (said.query_key, said.attention, said.model)
        assert tuple(part.before for part in counts) == before
        assert tuple(part.after for part in counts) == count(model)
    assert report.query_key.kept == count(model)[0] / before[0]
    assert dry.mean_relative_error is None
    assert report.mean_relative_error is not None
    sites = TINY[name].sites if layers is None else TINY[name].sites[:1]
    assert [layer.name for layer in report.layers] == list(sites)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
@every_pair
def test_copies_work(name: str, form: str, copied: Any) -> None:
    tiny: Tiny = TINY[name]
    model = tiny.build()
    convert(model, **LOW[form])
    other, batch = copied(model), tiny.batch(model)
    with torch.no_grad():
        assert torch.equal(run(other, batch), run(model, batch))
        factor = next(iter(factors(other).values()))
        factor += 1
        assert (run(other, batch) - run(model, batch)).abs().max() > 1e-3
    for mine, theirs in zip(find_attention(model), find_attention(other), strict=True):
        assert type(mine.module) is type(theirs.module)
    assert other.config.quantization_config == model.config.quantization_config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@every_pair
def test_half_precision_stays(name: str, form: str, dtype: torch.dtype) -> None:
    tiny = TINY[name]
    model = tiny.build(dtype=dtype)
    batch = tiny.batch(model)
    with torch.no_grad():
        before = run(model, batch)
        convert(model, **tiny.full(form))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        after = run(model, batch)
    assert after.dtype == dtype
    assert after.isfinite().all()
    difference = (after - before).float().square().mean().sqrt() / before.float().std()
    assert difference < TOLERANCES[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["cache", "past_key_values", "encoder_hidden_states"])
def test_caches_are_refused(form: str, option: str) -> None:
    model = TINY["bert"].build()
    convert(model, **LOW[form])
    module = find_attention(model)[0].module
    with pytest.raises(NotImplementedError, match=f"^{option} cannot be used .* Call the model"):
        module(torch.randn(1, 2, 24), **{option: object()})
    module(torch.randn(1, 2, 24), **{option: None})


@pytest.mark.parametrize("form", FORMS)
def test_frozen_models_stay_frozen(form: str) -> None:
    model = TINY["bert"].build().requires_grad_(False)
    convert(model, **LOW[form])
    assert not any(parameter.requires_grad for parameter in model.parameters())
