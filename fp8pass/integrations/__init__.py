"""Callbacks for training frameworks. Each file imports its framework, and is imported by its users alone.

`transformers.py` `Fp8Callback` for transformers.Trainer
`lightning.py`    `Fp8Callback` for Lightning's Trainer
`graph_trainer.py` `register_fp8_pipeline` for torchtitan's GraphTrainer
`torchtitan.py`   `Fp8Converter` for torchtitan's model registries
`accelerate.py`   adds "fp8pass" to accelerate's own list of backends
`saved.py`        what the callbacks share, and write into a framework's checkpoints
"""
