"""Hugging Face checkpoints of DeepSeek-V3, V3.2, V4 and GLM-5, in and out.

* ``names.py``, ``names_v4.py`` - which tensors make up which parameter
* ``ranks.py`` - which slices of them a rank holds
* ``config_json.py``, ``conventions.py``, ``conventions_v4.py`` - what config.json says, in
  Megatron's terms
* ``config_values.py``, ``json_files.py`` - which numbers may stand there, and the file itself
* ``flags.py`` - the same as flags
* ``build.py`` - the same as a model, also as one without memory
* ``quantised.py`` - fp8 and fp4 weights with block scales
* ``files.py`` - safetensors shards and their index
* ``inventory.py``, ``finite.py`` - what is looked at in every checkpoint: layers, experts, values
* ``convert.py`` - the conversion itself
* ``hyper_connections.py`` - V4's, where they leave plain residuals
* ``streaming.py`` - Megatron's distributed checkpoints, one tensor at a time
* ``bridge.py`` - Megatron-Bridge's conversion instead, where it is installed
* ``commands.py``, ``start.py`` - the commands, and the flags of training runs
"""
