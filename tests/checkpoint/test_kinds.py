"""Kinds of checkpoints that people have: each loads with the right weights, or is refused with the
true reason.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers as tf
from command_line import Answer, ending
from safetensors.torch import load_file, save_file

from ssdprof.checkpoint.load import fetch, load_model
from ssdprof.checkpoint.model import open_model
from ssdprof.core.report import Report
from ssdprof.errors import BadInputError
from ssdprof.store import reports

pytestmark = pytest.mark.usefixtures("in_empty_folder")
Weights = dict[str, torch.Tensor]
GDN = ("qwen3_5_text", "qwen3_next", "olmo_hybrid")
SSD = ("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "zamba2")


def checkpoint(name: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """A saved tiny model, whose config has other entries."""
    folder = Path(name)
    tiny_models.build(name, dtype).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(
        {k: v.contiguous() for k, v in change(load_file(file)).items()},
        file,
        metadata={"format": "pt"},
    )


def renamed(before: str, after: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key.replace(before, after, 1): one for key, one in weights.items()}


def loaded(folder: Path, *, head: bool = False) -> Weights:
    return load_model(fetch(open_model(str(folder)), head=head), device="cpu").state_dict()


def run(folder: Path, *options: str) -> tuple[Answer, Report | None]:
    words = [
        "--prompt",
        "random",
        "--seq",
        "24",
        "--layers",
        "first:1",
        "--intermediates",
        "exact",
        "--out",
        "run",
    ]
    answer = Answer("run", str(folder), *words, *options)
    return answer, reports.load("run")[1] if Path("run").exists() else None


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h", "qwen3_5_text"])
def test_parameters_of_operators_keep_fp32(name: str) -> None:
    folder = checkpoint(name)
    exact: Weights = {}

    def in_fp32(weights: Weights) -> Weights:
        for key in [key for key in weights if key.endswith(("A_log", "D", "dt_bias"))]:
            exact[key[key.index("layers.") :]] = weights[key] = torch.randn(weights[key].shape)
        return weights

    rewrite(folder, in_fp32)
    found = {
        key[key.index("layers.") :]: one for key, one in loaded(folder).items() if "layers." in key
    }
    assert exact
    assert all(torch.equal(found[key], one) for key, one in exact.items())
    assert (
        found[
            "layers.0.input_layernorm.weight" if "nemotron" not in name else "layers.0.norm.weight"
        ].dtype
        == torch.bfloat16
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SSD, *GDN])
def test_models_decode_with_parameters_in_fp32(name: str) -> None:
    folder = checkpoint(name)
    kept = ("A_log", "D", "dt_bias")
    rewrite(
        folder,
        lambda weights: {k: one.float() if k.endswith(kept) else one for k, one in weights.items()},
    )
    answer, _ = run(folder, "--decode", "2")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "_orig_mod."),
        ("", "module."),
        ("", "model._orig_mod."),
        ("model.", "model.language_model.model."),
    ],
)
def test_keys_with_foreign_prefixes_load_or_are_named(before: str, after: str, head: bool) -> None:
    folder = checkpoint("qwen3_5_text")
    expected = loaded(folder, head=head)
    rewrite(folder, renamed(before, after))
    if head and not before:  # the head has the prefix, too
        answer = Answer("answers", str(folder), "--prompt", "random", "--seq", "24", "--dry-run")
        assert answer.code in (0, 2, 4)
        if answer.code:
            assert f"{after}lm_head.weight" in answer.err or "lm_head.weight" in answer.err
            return
    found = loaded(folder, head=head)
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[key]) for key, one in found.items())


def test_an_adapter_is_named_and_never_silent() -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 4}
    Path("alone").mkdir()
    for folder in (Path("alone"), checkpoint("qwen3_5_text")):
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {"base_model.model.layers.0.lora_A.weight": torch.ones(1)},
            folder / "adapter_model.safetensors",
        )
    answer = ending(2, "run", "alone", "--dry-run")
    assert "alone is a LoRA adapter for 'org/base' (adapter_config.json)." in answer.err
    assert "Merge it into its base model first." in answer.err
    (Path("alone") / "adapter_config.json").write_text("{")
    assert "alone is a LoRA adapter for another model." in Answer("capture", "alone").err
    answer, report = run(Path("qwen3_5_text"))
    words = "adapter_model.safetensors of qwen3_5_text is not applied"
    assert words in answer.err
    assert report
    assert any(words in note for note in report.notes)
    rewrite(Path("qwen3_5_text"), renamed("in_proj_qkv.weight", "in_proj_qkv.base_layer.weight"))
    answer = ending(2, "capture", "qwen3_5_text", "--prompt", "random", "--seq", "24", "--dry-run")
    assert "base_layer.weight', not" in answer.err
    assert "an adapter was not merged" in answer.err


@pytest.mark.parametrize(
    ("key", "tied"),
    [("score.weight", True), ("classifier.weight", False), ("model.score.weight", True)],
)
def test_a_classifier_predicts_no_tokens(key: str, tied: bool) -> None:
    folder = checkpoint("qwen3_5_text", tie_word_embeddings=tied)
    rewrite(
        folder,
        lambda weights: (
            {k: one for k, one in weights.items() if "lm_head" not in k} | {key: torch.ones(2, 64)}
        ),
    )
    for command in (("answers",), ("run", "--decode", "1")):
        answer = ending(
            2, command[0], str(folder), "--prompt", "random", "--seq", "24", *command[1:]
        )
        assert f"is a classifier, with '{key}' and no lm_head.weight" in answer.err
    assert run(folder)[0].code == 0  # its operators are measured


def test_a_lost_head_is_named() -> None:
    folder = checkpoint("qwen3_5_text", tie_word_embeddings=False)
    rewrite(folder, lambda weights: {k: one for k, one in weights.items() if "lm_head" not in k})
    answer = Answer("answers", str(folder), "--prompt", "random", "--seq", "24")
    assert (answer.code, "qwen3_5_text lacks lm_head.weight." in answer.err) == (4, True)


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (True, True), (None, True)])
def test_the_outer_config_decides_whether_the_head_is_the_embedding(
    outer: bool | None, inner: bool
) -> None:
    folder = checkpoint("qwen3_5_text")
    text = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": inner}
    outside = {} if outer is None else {"tie_word_embeddings": outer}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, **outside})
    )
    rewrite(
        folder,
        lambda weights: {
            k.replace("model.", "model.language_model."): one
            for k, one in weights.items()
            if "lm_head" not in k
        },
    )
    found = loaded(folder, head=True)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "value", ["flash_attention_2", "flash_attention_3", "made_up", {"": "flash_attention_2"}]
)
def test_the_attention_of_a_config_need_not_be_installed(key: str, value: object) -> None:
    answer, _ = run(checkpoint("qwen3_5_text", **{key: value}), "--dry-run")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("where", ["quantization", "quantization_config"])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_is_named(where: str, bits: int) -> None:
    answer, _ = run(
        checkpoint("qwen3_5_text", **{where: {"group_size": 64, "bits": bits}}), "--dry-run"
    )
    assert answer.code == 2
    assert f"is of MLX's format, with {bits} bits in groups of 64" in answer.err


@pytest.mark.parametrize(("hidden", "block"), [(80, 32), (96, 64), (72, 128), (64, 32)])
def test_blocks_of_fp8_may_be_cut_off(hidden: int, block: int) -> None:
    """96 in blocks of 64 would divide into two blocks of 48: equal blocks give wrong weights
    without an error.
    """
    shape = dict(tiny_models.build("qwen3_5_text").config.to_dict(), hidden_size=hidden)
    model = tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**shape)).to(torch.bfloat16)
    folder = Path("fp8")
    model.save_pretrained(folder)
    decoded: Weights = {}
    kept = []

    def encoded(weights: Weights) -> Weights:
        found: Weights = {}
        for key, one in weights.items():
            if "layers." not in key or one.ndim != 2 or "in_proj_a" in key or "in_proj_b" in key:
                found[key] = one
                kept.append(key.removesuffix(".weight"))
                continue
            rows, columns = one.shape
            scales = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
            codes = one.float().to(torch.float8_e4m3fn)
            wide = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[
                :, :columns
            ]
            decoded[key] = (codes.float() * wide).to(torch.bfloat16)
            found |= {key: codes, f"{key}_scale_inv": scales}
        return found

    rewrite(folder, encoded)
    file = folder / "config.json"
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": kept,
    }
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    found = loaded(folder)
    assert decoded
    for key, one in decoded.items():
        assert torch.equal(found[key.removeprefix("model.")], one), key


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_fp8_of_modelopt_has_a_scale_for_each_tensor(file: str) -> None:
    folder, decoded = checkpoint("qwen3_5_text"), dict[str, torch.Tensor]()

    def encoded(weights: Weights) -> Weights:
        found: Weights = {}
        for key, one in weights.items():
            found[key] = one
            if "layers." in key and one.ndim == 2 and "in_proj_a" not in key:
                found[key], scale = (16 * one.float()).to(torch.float8_e4m3fn), torch.rand(()) + 0.5
                found |= {
                    f"{key}_scale": scale,
                    key.replace("weight", "input_scale"): torch.ones(()),
                }
                decoded[key] = (found[key].float() * scale).to(torch.bfloat16)
        return found

    rewrite(folder, encoded)
    codes, config = (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        json.loads((folder / "config.json").read_text()),
    )
    stored = (
        {"quantization_config": {"quant_method": "modelopt", **codes}}
        if file == "config.json"
        else {}
    )
    (folder / file).write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": codes})
    )
    (folder / "config.json").write_text(json.dumps(config | stored))
    found = loaded(folder)
    assert decoded
    for key, one in decoded.items():
        assert torch.equal(found[key.removeprefix("model.")], one), key
    assert open_model(str(folder)).quantization == "fp8"


@pytest.mark.parametrize(
    ("codes", "scale"), [("float8_e4m3fn", None), ("float8_e4m3fn", (3,)), ("uint8", ())]
)
def test_codes_without_a_scale_are_refused(codes: str, scale: tuple[int, ...] | None) -> None:
    folder, weight = checkpoint("qwen3_5_text"), "model.layers.0.linear_attn.in_proj_qkv.weight"
    scales = {} if scale is None else {f"{weight}_scale": torch.ones(scale)}
    rewrite(
        folder, lambda found: {**found, weight: found[weight].to(getattr(torch, codes)), **scales}
    )
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8", "quant_method": "awq"}}'
    )
    answer, _ = run(folder, "--dry-run")
    assert (answer.code, "linear_attn.in_proj_qkv.weight' in" in answer.err) == (2, True)
    assert "and has no fp8 scale for it." in " ".join(answer.err.split())


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_other_formats_of_modelopt_are_refused_by_name(file: str, algorithm: str) -> None:
    codes = {"quant_method": "modelopt", "quant_algo": algorithm}
    folder = checkpoint(
        "qwen3_5_text", **{"quantization_config": codes} if file == "config.json" else {}
    )
    if file != "config.json":
        (folder / file).write_text(json.dumps({"quantization": codes}))
    answer, _ = run(folder, "--dry-run")
    assert answer.code == 2
    where = "" if file == "config.json" else "ModelOpt's config beside "
    words = (
        f"{where}config.json of qwen3_5_text is quantised by 'modelopt' as {algorithm!r}, "
        "which ssdprof cannot load"
    )
    assert words in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {
                "rmsnorm": True,
                "D_has_hdim": False,
                "norm_before_gate": False,
                "bias": False,
                "conv_bias": True,
                "dt_limit": [0.0, 1e30],
                "A_init_range": [1, 16],
                "use_mem_eff_path": True,
                "d_ssm": None,
            },
            "",
        ),
        ({"D_has_hdim": True}, "has 'D_has_hdim' = True in ssm_cfg"),
        ({"rmsnorm": False}, "has 'rmsnorm' = False in ssm_cfg"),
        ({"d_ssm": 64}, "has 'd_ssm' = 64 in ssm_cfg"),
        ({"heads": 1}, "has 'heads' = 1 in ssm_cfg"),
    ],
)
def test_options_of_original_mamba2(change: dict[str, Any], words: str) -> None:
    folder = checkpoint("mamba2")
    ssm = {"layer": "Mamba2", "headdim": 16, "d_state": 16, "ngroups": 2, "chunk_size": 32} | change
    config = {
        "d_model": 64,
        "n_layer": 3,
        "vocab_size": 128,
        "ssm_cfg": ssm,
        "pad_vocab_size_multiple": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, renamed("embeddings.", "embedding."))
    if words:
        with pytest.raises(BadInputError, match=re.escape(words)):
            open_model(str(folder))
    else:
        assert load_model(
            fetch(open_model(str(folder), tokenizer="demo")), device="cpu"
        ).state_dict()


def test_a_type_that_nobody_listed_works() -> None:
    """As in the next release of transformers: a wrapper with its language model in another config,
    of a new type.
    """
    file = Path("modeling_made_up.py").absolute()
    source = Path(sys.modules[tf.Qwen3_5TextModel.__module__].__file__ or "").read_text()
    file.write_text(
        source.replace("from ... import", "from transformers import")
        .replace("from ...", "from transformers.")
        .replace("from ..", "from transformers.models.")
        .replace("from .", "from transformers.models.qwen3_5.")
    )
    spec = importlib.util.spec_from_file_location(
        "transformers.models.qwen3_5.modeling_made_up", file
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    config = type("MadeUpConfig", (tf.Qwen3_5TextConfig,), {"model_type": "made_up"})
    made_up = type(
        "MadeUp",
        (module.Qwen3_5TextModel,),
        {"config_class": config, "__module__": module.__name__},
    )
    tf.AutoConfig.register("made_up", config)
    tf.AutoModel.register(config, made_up)
    folder = checkpoint("qwen3_5_text")
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "made_up"}
    rewrite(folder, renamed("model.", "thinker.text."))
    for key in ("text_config", "llm_config", "writer_config"):
        (folder / "config.json").write_text(
            json.dumps({"model_type": "made_up_omni", key: text, "audio_config": {}})
        )
        answer, report = run(folder)
        assert answer.code == 0, answer.err
        assert report
        assert report.model
        assert (report.model.model_type, len(report.model.layers)) == ("made_up_omni", 3)
        Answer("runs")
        for file in Path("run").iterdir():
            file.unlink()
        Path("run").rmdir()
