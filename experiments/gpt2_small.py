"""The smallest GPT-2: 124M parameters, context 1024.

For a machine with accelerators, such as 8 GPUs:

  distlm train --config=experiments/gpt2_small.py --workdir=runs/gpt2_small \
    --config.data.source='corpus/**/*.txt'

The sizes are those of Radford et al., 2019, "Language Models are Unsupervised
Multitask Learners"; the optimizer's settings those of Brown et al., 2020,
arXiv:2005.14165, appendix B. GPT-2 has no linear layer of its own at the output
and 50,257 tokens, of which the tokenizer may use fewer.
"""

from ml_collections import config_dict

from distlm import get_base_config


def get_config() -> config_dict.ConfigDict:
  """Returns 12 layers of width 768, and batches of half a million tokens."""
  config = get_base_config()
  config.training_steps = 100_000

  config.model.num_layers = 12
  config.model.num_heads = 12
  config.model.model_size = 768
  config.model.vocab_size = 50_257
  config.model.dropout_rate = 0.0

  config.data.sequence_length = 1024
  config.data.global_batch_size = 512
  config.accumulation_steps = 8

  config.optimizer.learning_rate = 6e-4
  config.optimizer.end_learning_rate = 6e-5
  config.optimizer.warmup_steps = 2000
  config.optimizer.b2 = 0.95
  config.optimizer.weight_decay = 0.1

  config.evaluation.interval = 1000
  config.evaluation.batches = 20
  config.checkpoint.interval = 1000
  config.log_train_data_interval = 10
  return config
