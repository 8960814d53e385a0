"""The bundled convolution and gated norm in place of a model's: the same outputs, and the model is
restored.
"""

import pytest
import tiny_models
import torch
from targets import slow
from torch import Tensor, nn

from ssdprof.capture.conv_and_norm import CONVOLUTION, ConvAndNorm, gated_norms, norm_form
from ssdprof.capture.forward import prefill
from ssdprof.checkpoint.mixers import find_mixers
from ssdprof.kernels import UnsupportedError


def logits(model, segment: int = 40) -> Tensor:
    return prefill(model, tiny_models.prompt(40), segment)


@pytest.mark.parametrize("name", ["mamba2", *slow(*[*tiny_models.SSD][1:]), *tiny_models.GDN])
@pytest.mark.parametrize("segment", [*slow(40), 16])
def test_logits_of_every_family_stay_the_same(name, segment):
    model = tiny_models.shared(name)
    bundled = ConvAndNorm(find_mixers(model))
    assert bundled.left_to_model == ()
    before = logits(model, segment)
    with bundled.installed():
        replaced = logits(model, segment)
    assert not torch.equal(replaced, before)  # sums in another order: our kernels ran
    assert float((replaced - before).abs().max() / before.abs().max()) < 1e-4
    assert torch.equal(logits(model, segment), before)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mamba2", (64, False)),  # two groups of 64
        ("granitemoehybrid", (128, False)),
        ("qwen3_5_text", (16, True)),
    ],
)
def test_the_form_is_found_by_a_probe(name, form: tuple[int, bool]):
    (norm,) = gated_norms(find_mixers(tiny_models.shared(name))[0])
    options = norm_form(norm)
    assert (options["group_size"], options["norm_first"]) == form


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
def test_the_probe_tells_the_forms_apart_in_bf16(name):
    norm = gated_norms(find_mixers(tiny_models.build(name, torch.bfloat16))[0])[0]
    assert norm_form(norm) == norm_form(gated_norms(find_mixers(tiny_models.shared(name))[0])[0])


class Sigmoid(nn.Module):
    """A gate that the kernel does not support."""

    variance_epsilon = 1e-6

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden_states, (128,)) * torch.sigmoid(gate)


def test_another_norm_is_left_to_the_model_and_named():
    model = tiny_models.build("granitemoehybrid")
    sites = find_mixers(model)
    sites[0].module.norm = Sigmoid()
    assert norm_form(sites[0].module.norm) is None
    replaced = vars(sites[1].module.norm)
    replaced["forward"] = of_accelerate = sites[1].module.norm.forward
    bundled = ConvAndNorm(sites)
    assert bundled.left_to_model == ("1 gated norm of a form that the kernel does not have",)
    with bundled.installed():
        assert "forward" not in vars(sites[0].module.norm)
        assert replaced["forward"] is not of_accelerate
        logits(model)
    assert replaced["forward"] is of_accelerate


def test_the_model_is_restored_whatever_ends_the_context():
    model = tiny_models.shared("mamba2")
    sites = find_mixers(model)
    before = sites[0].namespace[CONVOLUTION]
    installed = ConvAndNorm(sites).installed()
    installed.__enter__()
    assert sites[0].namespace[CONVOLUTION] is not before
    assert not installed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sites[0].namespace[CONVOLUTION] is before
    assert "forward" not in vars(sites[0].module.norm)


def test_a_convolution_that_the_kernel_does_not_do_is_refused_by_name():
    sites = find_mixers(tiny_models.shared("mamba2"))
    x = torch.zeros(1, 8, 4)
    weight = torch.zeros(8, 4)
    with ConvAndNorm(sites).installed():
        convolve = sites[0].namespace[CONVOLUTION]
        with pytest.raises(UnsupportedError, match="no gelu"):
            convolve(x, weight, None, activation="gelu")
        with pytest.raises(UnsupportedError, match="does not take seq_idx"):
            convolve(x, weight, None, activation="silu", seq_idx=torch.zeros(1, 4))
        assert convolve(x, weight, None, activation="silu", seq_idx=None).shape == x.shape


def test_the_form_comes_from_a_probe_and_not_from_a_name():
    """The group width of a norm comes from probing the module, not from its name."""
    (norm,) = gated_norms(find_mixers(tiny_models.build("mamba2"))[0])
    norm.group_size = 32  # this also changes the module's output
    assert norm_form(norm) == {"group_size": 32, "norm_first": False, "eps": norm.variance_epsilon}
