"""The config of an export for each kind of scales: static ones are from training, all others the engine's own."""

import pytest

from fp8pass.tools.export.formats import CompressedTensors, FineGrained, ScaleKind, StoredScheme


@pytest.mark.parametrize("kind", ScaleKind, ids=lambda kind: kind.name)
def test_only_static_input_scales_are_not_dynamic(kind):
    config = CompressedTensors().config({StoredScheme(kind): ["layer"]}, ["head"])
    (group,) = config["config_groups"].values()
    assert group["weights"]["dynamic"] is False
    assert group["input_activations"]["dynamic"] is (kind is not ScaleKind.STATIC)
    assert config["ignore"] == ["head"]


@pytest.mark.parametrize("kind", [ScaleKind.STATIC, ScaleKind.TENSOR, ScaleKind.BLOCK], ids=lambda kind: kind.name)
def test_deepseeks_format_says_it_in_one_word(kind):
    config = FineGrained().config({StoredScheme(kind): ["layer"]}, [])
    assert config["activation_scheme"] == ("static" if kind is ScaleKind.STATIC else "dynamic")
