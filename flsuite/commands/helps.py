"""What ``--help`` prints, for commands that need no parser to say it."""

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
  new         write a model, its data and an experiment of your own, to start from
  fit         run a federation and write its folder
  resume      go on with a run: flsuite resume RUN
  ls          list runs: method, data, rounds, score, state
  validate    score a finished run on validation data
  test        score a finished run on test data: the global model and every client
  predict     write class probabilities on test data to predictions.csv, and a model's pictures
  partition   draw how a config splits the data, without training
  schedule    draw who trains when by the virtual clock, without training
  sweep       run methods x grid x seeds; killed and started again it goes on
  report      compare finished runs: mean and spread over seeds
  workspace   make the charts of a project in Weights & Biases

examples:
  flsuite fit --config configs/quickstart.yaml
  flsuite fit --config configs/quickstart.yaml --trainer.rounds 50 --data.partition.alpha 0.1
  flsuite resume runs/quickstart/TIME-SEED --trainer.rounds 100
  flsuite test runs/quickstart/TIME-SEED --ckpt_path best
  flsuite partition --config configs/quickstart.yaml
  flsuite schedule --config configs/quickstart.yaml
  flsuite sweep --config configs/sweeps/quickstart.yaml
  flsuite report runs/quickstart --metric accuracy f1_macro --html report.html

flsuite fit --help lists the options, --help=trainer those of Lightning's Trainer, --help=KEY the
classes that a key takes, such as trainer.aggregator, and --help=CLASS the arguments of a class.
flsuite fit --config FILE --print_config prints the resolved config. A key of a class is given
without init_args:
  --trainer.aggregator FedAvgM --trainer.aggregator.momentum 0.5

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, or 143
after SIGTERM, which clusters send before they take a machine away. A run that has ended with 1, 130
or 143 keeps its last finished round, from which --ckpt_path last goes on.
"""

_PARTITION_HELP = """usage: flsuite partition --config FILE [--output FOLDER]
                         [--data.KEY VALUE ...] [--seed_everything SEED]

Draw how a config splits the data (class by client), without training. It writes NAME-partition.png,
and the same numbers as NAME-partition.csv with the columns client, split, class, samples. NAME is
the name of the config.

  --config FILE           a config as for flsuite fit; its model and trainer are not used
  --output FOLDER         where to write; default: the working folder
  --data.KEY VALUE        override a key of the data, e.g. --data.partition.alpha 0.1
  --seed_everything SEED  the run's seed, which decides the partition unless data.seed is given
  --plugins LIST          modules to import first, e.g. '[my_package]', for short class names
"""

_SCHEDULE_HELP = """usage: flsuite schedule --config FILE [--output FOLDER] [--KEY VALUE ...]

Draw who trains when by the virtual clock, without training. It writes NAME-timeline.png, and the
same fits as NAME-timeline.csv with the columns fit, client, version, started_s, ended_s, outcome,
round, staleness, weight. NAME is the name of the config.

  --config FILE      a config as for flsuite fit
  --output FOLDER    where to write; default: the working folder
  --KEY VALUE        override a key of the config, as for flsuite fit, e.g. --trainer.rounds 20
"""

_SWEEP_HELP = """usage: flsuite sweep --config FILE [--folder FOLDER] [--workers N]
                     [--status | --dry-run] [--KEY VALUE ...]

Run methods x grid x seeds. Each cell is an ordinary run folder, FOLDER/METHOD-GRID-HASH/seed-N.
Start the same command again after a kill or an error, and it goes on: done cells are left alone,
others are resumed, failed ones are tried again. Several of these commands may work on one folder.
After a change of FILE, the new cells run. Cells that fail are listed at the end and stop nobody.

  --config FILE      a sweep, see configs/guide/comparing.md
  --folder FOLDER    the sweep's folder; default: runs/NAME, with the name of FILE
  --workers N        cells that run at a time; default: workers of FILE, else 1
  --status           print each cell's score or state, failures and the time left; run nothing
  --dry-run          build every method once, print the cells and the time left; run nothing
  --KEY VALUE        override a key of the config in all cells, e.g. --trainer.rounds 2

The exit status is 0 if all cells are done, 1 if some have failed, 2 if something is wrong in FILE,
130 after Ctrl-C, or 143 after SIGTERM.
"""

_REPORT_HELP = """usage: flsuite report FOLDER [FOLDER ...] [--metric NAME ...] [--last N]
                      [--x AXIS] [--split SPLIT] [--target VALUE] [--against METHOD]
                      [--rows SETTING --columns SETTING]
                      [--output FOLDER] [--html FILE] [--wandb PROJECT]

Compare finished runs. Every run in or below a FOLDER counts. Runs whose settings (settings.yaml)
differ in nothing but the seed are one row, named by the settings in which it differs from the other
rows, with mean and standard deviation: test scores of the last round, of the round picked on
validation data, the mean of the last rounds, and the best on test data (not an honest choice; for
comparison with published tables that were made so). Methods that have seeds in common are compared
in pairs, within the same partition: mean difference, 95 % interval and p-value of the paired
t-test, and p-value with Holm's correction over all pairs. Of a sweep, the budget of the tuning is
shown too.

  --metric NAME ...   scores of metrics.csv, e.g. accuracy f1_macro; default: the score by which
                      the runs pick a round, and of a single experiment the other main ones
  --last N            rounds in the mean of the last ones; default 10
  --x AXIS            axis of the picture and of --target: round, virtual_s, wall_s, client_updates
                      or bytes (shown in MB); default round
  --split SPLIT       data of the picture and of --target: test or val; default test
  --target VALUE      add when the score first reaches VALUE (a loss is reached from above), in
                      rounds, virtual seconds, seconds, client updates and MB: mean and standard
                      deviation over the runs that reach it, and how many do not; the group that is
                      first on the axis of --x is named
  --against METHOD    compare all others with this method, and not all pairs
  --rows SETTING --columns SETTING
                      print cross tables instead, e.g. --rows aggregator --columns attack: the
                      scores of the last round by two settings, one table for each combination of
                      the others; --output writes cross.csv, cross.md (with spreads, and the round
                      picked on validation data) and a heat map per metric
  --output FOLDER     write report.csv, report.md, report.png (curves with their range),
                      comparison.csv (pairs) and target.csv (all axes) there
  --html FILE         write one page that needs no other file and no network: tables that sort,
                      curves with bands, clients, partition, and how to run each row again; it needs
                      the extra flsuite[report]
  --wandb PROJECT     make a report with the table and charts in Weights & Biases; PROJECT or
                      ENTITY/PROJECT; needs pip install 'flsuite[workspaces]'

report.csv has the columns to_target, to_target_std and reached if there is a target. They are in
the unit of the AXIS in metrics.csv. On every axis but round, runs of one group have different
points. The picture then shows the range that all of them cover, with the last score at or before
each point.
"""

_WORKSPACE_HELP = """usage: flsuite workspace --project PROJECT [--entity ENTITY] [--name NAME]
                         [--metric NAME] [--dry-run]

Make the charts of a project in Weights & Biases: the score by round, bytes, virtual seconds and
client updates, as mean and band over the seeds of a group; last and picked round; gamma and its
parts; clients; partition; comparison of runs. It needs pip install 'flsuite[workspaces]'.

  --project PROJECT   the project of the runs
  --entity ENTITY     the user or team that owns it; default: $WANDB_ENTITY, else yours
  --name NAME         the title of the workspace; default flsuite
  --metric NAME       the score to compare; default accuracy
  --dry-run           print what would be made, without asking W&B
"""

_RESUME_HELP = """usage: flsuite resume RUN [--KEY VALUE ...]

Go on with a run in its folder, from its last finished round, with the settings of its config.yaml.
It is flsuite fit --config RUN/config.yaml --run_dir RUN --ckpt_path last.

  RUN                the folder of a run; flsuite ls lists them
  --KEY VALUE        override a key, such as --trainer.rounds 100, which extends the run
"""

_LS_HELP = """usage: flsuite ls [FOLDER ...] [--method NAME] [--data NAME] [--partition NAME]
                  [--state STATE] [--sort KEY] [--json | --csv]

List the runs in or below a FOLDER: what they are, how far they have come, their score on test data
in the last round and in the one picked on validation data, and when they last wrote something.

  FOLDER             default: runs
  --method NAME      runs of this aggregator; so are --data and --partition. A part of a name is
                     enough if no run has that name
  --state STATE      finished, interrupted, running or broken
  --sort KEY         run (default), score (best first), rounds or age
  --json, --csv      write the list to the standard output for other programs
"""

_NEW_HELP = """usage: flsuite new NAME

Write a folder NAME with my_model.py (a LightningModule), my_data.py (a LightningDataModule) and
exp.yaml (an experiment), which run as they are and are meant to be changed.
"""

HELPS = {
    "resume": _RESUME_HELP,
    "ls": _LS_HELP,
    "new": _NEW_HELP,
    "partition": _PARTITION_HELP,
    "schedule": _SCHEDULE_HELP,
    "sweep": _SWEEP_HELP,
    "report": _REPORT_HELP,
    "workspace": _WORKSPACE_HELP,
}
