"""Hugging Face checkpoints of DeepSeek-V3, DeepSeek-V3.2 and GLM-5, in and out.

* ``names.py`` - which tensors make up which parameter
* ``ranks.py`` - which slices of them a rank holds
* ``conventions.py`` - what config.json says, in Megatron's terms
* ``quantised.py`` - FP8 weights with block scales
* ``files.py`` - safetensors shards and their index
* ``convert.py`` - the conversion itself
* ``commands.py``, ``start.py`` - the commands, and the flag of training runs
"""
