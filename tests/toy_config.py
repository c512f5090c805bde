"""The configuration of toy_experiment.py: JAXline's, and two settings more."""

from jaxline import base_config
from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  config = base_config.get_base_config()
  config.training_steps = 20
  config.interval_type = "steps"
  config.save_checkpoint_interval = 5
  config.log_train_data_interval = 1
  config.log_tensors_interval = 10
  config.best_model_eval_metric = "mse"
  config.best_model_eval_metric_higher_is_better = False
  config.evaluation_interval = 10
  config.experiment_kwargs.fail_at_step = -1
  config.experiment_kwargs.fail_in_evaluation = False
  config.experiment_kwargs.scores = ()
  return config
