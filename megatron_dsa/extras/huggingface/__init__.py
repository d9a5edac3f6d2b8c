"""Hugging Face checkpoints of DeepSeek-V3, V3.2, V4 and GLM-5, in and out.

* ``models.py`` - the table of models: keys of config.json and fields of Megatron's configuration
* ``names.py`` - the tables of tensors: which make up which parameter
* ``config_json.py``, ``rules.py`` - the parser that applies the table, and rules of every model
* ``flags.py``, ``build.py`` - the model of a config.json as flags, and as a model without memory
* ``ranks.py`` - which slices of the tensors a rank holds
* ``files.py``, ``quantised.py`` - JSON, safetensors shards; fp8 and fp4 weights with block scales
* ``quantising.py``, ``precision.py`` - weights into fp8 and fp4; what an export quantises, and how
* ``features.py`` - what a V4 may be built without
* ``convert.py``, ``checks.py`` - the conversion, and its checks of layers, experts and values
* ``hyper_connections.py`` - V4's, where they leave plain residuals
* ``streaming.py`` - Megatron's distributed checkpoints, one tensor at a time
* ``bridge.py`` - Megatron-Bridge's conversion instead, where it is installed
"""
