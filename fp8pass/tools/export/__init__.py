"""Export: the weights of a compiled model in FP8, as its forward GEMMs read them, in formats that inference engines load.

`weights.py`     which Parameters forward GEMMs read in FP8, and how; why the others stay in high precision
`quantize.py`    a weight's FP8 values and scales, as the forward's casts make them
`formats.py`     what the formats can hold: kinds of scales, names and shapes of tensors, `quantization_config`
`names.py`       names of tensors on disk, which for some models of transformers are not those in memory
`contents.py`    every tensor of an export, in order, and how it is made
`files.py`       safetensors files, written tensor by tensor, with their index
`report.py`      what was written in FP8, and what was not and why
`folder.py`      `export_fp8` and `state_dict_fp8`
"""
