"""The published small character-level setting, on a text of your own.

The text is not part of distlm; give its path:

  distlm train --config=experiments/shakespeare_char.py \
    --workdir=runs/shakespeare --config.data.source=PATH/tinyshakespeare.txt
"""

from ml_collections import config_dict

from distlm import get_base_config


def get_config() -> config_dict.ConfigDict:
  """Returns 4 layers of width 128, context 64, batch 12, 2,000 steps."""
  config = get_base_config()
  config.training_steps = 2000

  config.model.num_layers = 4
  config.model.num_heads = 4
  config.model.model_size = 128
  config.model.dropout_rate = 0.0

  config.data.tokenizer = "char"
  config.data.sequence_length = 64
  config.data.global_batch_size = 12
  config.data.validation_fraction = 0.1

  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 100
  config.optimizer.end_learning_rate = 1e-4
  config.optimizer.b2 = 0.99
  config.optimizer.weight_decay = 0.1

  config.evaluation.interval = 500
  config.checkpoint.interval = 500
  config.log_train_data_interval = 100
  return config
