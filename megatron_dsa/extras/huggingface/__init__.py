"""Hugging Face checkpoints of DeepSeek-V3, V3.2, V4, GLM-5 and GLM-5.3, in and out.

* ``models.py``, ``keys.py``, ``pairs.py`` - keys of config.json: the table of models, how keys are
  read, keys that say one thing twice
* ``config_json.py``, ``build.py`` - the content of a config.json; its model, as flags or modules
* ``names.py``, ``ranks.py`` - tensors of each parameter, and the slices that a rank holds
* ``files.py``, ``quantised.py``, ``precision.py`` - shards; fp8 and fp4; precision of an export
* ``features.py`` - parts that a V4 may be built without
* ``convert.py``, ``checks.py``, ``trained_config.py`` - the conversion and its checks
* ``streaming.py``, ``commands.py`` - distributed checkpoints tensor by tensor, without a model
* ``adapters.py``, ``bridge.py``, ``load_hf.py`` - PEFT, Megatron-Bridge, and runs that start from
  a checkpoint
"""
