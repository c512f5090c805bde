"""The main job: a small Transformer learns Python from the standard library.

  make train

or, on any number of devices that divides 16:

  distlm train --config=experiments/tiny.py --workdir=runs/tiny --devices=4
"""

from ml_collections import config_dict

from distlm import get_base_config


def get_config() -> config_dict.ConfigDict:
  """Returns a model of 0.8M parameters and 400 steps of 1,024 tokens."""
  config = get_base_config()
  config.training_steps = 400

  config.model.num_layers = 4
  config.model.num_heads = 4
  config.model.model_size = 128
  config.model.dropout_rate = 0.0

  config.data.source = "python-stdlib"
  config.data.sequence_length = 64
  config.data.global_batch_size = 16

  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 40

  config.evaluation.interval = 100
  config.evaluation.batches = 40
  config.checkpoint.interval = 100
  return config
