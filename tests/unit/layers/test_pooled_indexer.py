"""Layers whose indexer selects pools of tokens (GLM-5.3), against transformers' modules in fp64."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.cases.models import gpt
from tests.host import small_config
