"""Rows filled with samples, batches of similar lengths and losses in parts change no number."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import finetune
from trainkit.language import losses
from trainkit.language.packing import Packed, best_fit, check_packing
from trainkit.numbers.orders import WINDOW, by_length

transformers = pytest.importorskip("transformers")

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = WIDTHS | {"intermediate_size": 64, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0}
# Positions that turn, are learned, slide over 4 tokens; logits that are capped.
KINDS = {
    "llama": LLAMA,
    "gpt2": GPT2 | {"attn_pdrop": 0},
    "mistral": LLAMA | {"sliding_window": 4},
    "gemma2": LLAMA | {"head_dim": 16},
}


def make(kind, **options):
    torch.manual_seed(0)
    options = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": 64} | options
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[kind](**options)
    )
    with torch.no_grad():  # so that no two tokens are about equally likely
        model.get_output_embeddings().weight.mul_(20)
    losses.allow_parts(model)
    return model


def make_samples(num) -> list:
    torch.manual_seed(0)
    lengths = torch.randint(2, 21, (num,)).tolist()
    return [(torch.randint(1, 64, (n,)), torch.arange(n) % 3 == 1) for n in lengths]


def gradients(model, batch):
    """The losses, sorted, and all gradients of the sum of their squares."""
    model.zero_grad()
    found = finetune.compute_losses(model, batch)["loss"]
    found.square().sum().backward()
    grads = [weight.grad.flatten() for weight in model.parameters()]
    return found.detach().sort().values, torch.cat(grads)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_and_parts_change_no_loss_and_no_gradient(kind, float64_default, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)  # which some models ask for
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model, samples = make(kind, **KINDS[kind]), make_samples(9)
    rows = Packed(samples, 40)
    assert 1 < len(rows) < 5
    packed = finetune.collate([rows[n] for n in range(len(rows))])
    alone = [gradients(model, finetune.collate([sample])) for sample in samples]
    expected = torch.cat([each for each, _ in alone]).sort().values, sum(each for _, each in alone)
    head = model.get_output_embeddings()
    assert getattr(head, "may_have_parts", False) == (kind != "gemma2")
    for most in (2**24, 1000):  # all at once, 15 tokens at a time
        monkeypatch.setattr(losses, "MAX_LOGITS", most)
        for batch in (packed, finetune.collate(samples)):
            for found, wanted in zip(gradients(model, batch), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# By the types of the weights: autocast in bfloat16, and none.
TYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, None)]


@pytest.mark.parametrize("weights, computed", TYPES)
def test_a_head_may_be_frozen_have_a_bias_and_be_rounded(weights, computed, monkeypatch):
    model, batch = make("phi", **WIDTHS, intermediate_size=64), finetune.collate(make_samples(4))
    model.to(weights)
    head = model.get_output_embeddings()
    assert head.may_have_parts and head.bias is not None
    sizes: list[int] = []
    see = torch.autograd.graph.saved_tensors_hooks(
        lambda kept: sizes.append(kept.numel()) or kept, lambda kept: kept
    )
    for frozen in (False, True):
        head.requires_grad_(not frozen)
        results = []
        for most in (2**24, 500):
            monkeypatch.setattr(losses, "MAX_LOGITS", most)
            model.zero_grad()
            sizes.clear()
            with see, torch.autocast("cpu", computed, enabled=computed is not None):
                found = finetune.compute_losses(model, batch)["loss"]
            num_logits = len(found) * len(head.weight)
            assert (num_logits in sizes) == (most == 2**24) and num_logits > 500
            (16 * found.mean()).backward()
            assert found.dtype == torch.float32
            results.append((found, *(x.grad for x in model.parameters())))
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).norm() < 0.01 * a.norm()
    with torch.no_grad(), torch.autocast("cpu", computed, enabled=computed is not None):
        assert torch.equal(finetune.compute_losses(model, batch)["loss"], found)


CONVOLUTIONS = LLAMA | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARE = {"qwen3_moe": LLAMA | EXPERTS | {"head_dim": 16}, **KINDS}
LEAK = {
    "bloom": {"n_layer": 2, "n_head": 2, "hidden_size": 32},  # positions by the place in the row
    "mamba": WIDTHS,
    "lfm2": CONVOLUTIONS,
}
HALF = [(kind, torch.bfloat16) for kind in ("bloom", "qwen3_moe")]


@pytest.mark.parametrize("kind, dtype", [(kind, torch.float32) for kind in (*LEAK, *SHARE)] + HALF)
def test_a_model_in_which_samples_of_a_row_see_each_other_is_refused(kind, dtype):
    model = make(kind, **(LEAK | SHARE)[kind]).to(dtype)
    if kind in SHARE:
        check_packing(Accelerator(), model)
        return
    with refused(rf"--pack: this model \({kind}\) does not keep"):
        check_packing(Accelerator(), model)
    assert model.training


@settings(derandomize=True, database=None, deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=300))
def test_each_sample_is_in_one_row_and_no_row_is_too_long_or_could_have_been_spared(lengths):
    rows = best_fit(lengths, 50)
    assert sorted(itertools.chain(*rows)) == [*range(len(lengths))]
    sums = [sum(lengths[index] for index in row) for row in rows]
    assert max(sums) <= 50
    assert all(a + b > 50 for a, b in itertools.combinations(sums, 2))


def test_a_batch_has_similar_lengths_and_neither_batches_nor_the_short_one_are_sorted():
    num, size = 4007, 8
    lengths = torch.randint(1, 1000, (num,), generator=torch.Generator().manual_seed(0))
    order = by_length(lengths, size, 0)
    found = lengths[order(0, 0, num)]
    full = found[: num // size * size].view(-1, size)
    assert (full.amax(1) - full.amin(1)).float().mean() < 2 * 1000 / WINDOW
    means = full.float().mean(1)
    assert abs(torch.corrcoef(torch.stack((means[1:], means[:-1])))[0, 1]) < 0.15
    short = torch.stack([lengths[order(n, num - 7, num)].float().mean() for n in range(60)])
    assert abs(short.mean() - 500) < 5 * 288 / (7 * 60) ** 0.5
