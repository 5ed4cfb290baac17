"""The help of the command, and summaries of the subcommands that LightningCLI runs."""

from flsuite import __version__

SUMMARIES = {
    "fit": "Run a federation and write its folder. --ckpt_path last resumes a run.",
    "validate": "Score a finished run on validation data.",
    "test": "Score a finished run on test data: the global model and every client.",
    "predict": "Write class probabilities on test data to predictions.csv, and a model's pictures.",
}
HELP = f"""flsuite {__version__}: federated-learning experiments with PyTorch Lightning

usage: flsuite COMMAND --config FILE [--KEY VALUE ...]

commands:
  new         create a model, a data module and an experiment to start from
  fit         run a federation and write its folder
  resume      continue a run: flsuite resume RUN
  fork        begin a run at a moment of another one, under changed settings
  contribution  train a run again without each of its clients
  verify      do rounds of a run again, and compare them with its record
  pack        write what is needed to verify a run into one file
  ls          list runs: method, data, rounds, score, state
  validate    score a finished run on validation data
  test        score a finished run on test data: the global model and every client
  predict     write class probabilities on test data to predictions.csv, and a model's pictures
  partition   draw how a config splits the data, without training
  schedule    draw which clients train when on the virtual clock, without training
  sweep       run methods x grid x seeds; can be killed and restarted
  report      compare finished runs: mean and spread over seeds
  workspace   create the charts of a project in Weights & Biases

examples:
  flsuite fit --config configs/quickstart.yaml
  flsuite fit --config configs/quickstart.yaml --trainer.rounds 50 --data.partition.alpha 0.1
  flsuite resume runs/quickstart/TIME-SEED --trainer.rounds 100
  flsuite fork runs/quickstart/TIME-SEED --at 10 --without 3
  flsuite verify runs/quickstart/TIME-SEED
  flsuite test runs/quickstart/TIME-SEED --ckpt_path best
  flsuite partition --config configs/quickstart.yaml
  flsuite schedule --config configs/asynchronous/quickstart.yaml
  flsuite sweep --config configs/sweeps/comparison.yaml
  flsuite report runs/comparison --metric accuracy f1_macro --html report.html

flsuite fit --help lists the options, --help=trainer Lightning's Trainer options, --help=KEY the
classes that a key takes, such as trainer.aggregator, and --help=CLASS the arguments of a class.
flsuite fit --config FILE --print_config prints the resolved config. A key of a class is given
without init_args:
  --trainer.aggregator FedAvgM --trainer.aggregator.momentum 0.5

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, 129
after SIGHUP, which a closed terminal sends, or 143 after SIGTERM, which clusters send before they
reclaim a machine. A run that ended with 1, 129, 130 or 143 keeps its last finished round;
--ckpt_path last continues from there.
"""
