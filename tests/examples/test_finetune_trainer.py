"""The example of transformers.Trainer: it learns, and the resumed half gives the same loss."""

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from examples import finetune_trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # the Trainer's, without a GPU
def test_a_tiny_run(tmp_path, capsys):
    options = ["--width", "32", "--layers", "1", "--steps", "8", "--backend", "aot_eager", "--out", str(tmp_path)]
    result = finetune_trainer.main(options)
    assert result["end"] < result["middle"]
    assert result["resumed"] == result["end"]
    assert capsys.readouterr().out.count("GEMMs run in FP8") == 1
