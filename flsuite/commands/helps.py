"""The help texts of the command and of the subcommands without a parser."""

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

The exit status is 0, 1 if the run failed, 2 if the request cannot be met, 130 after Ctrl-C, or 143
after SIGTERM, which clusters send before they reclaim a machine. A run that ended with 1, 130 or
143 keeps its last finished round; --ckpt_path last continues from there.
"""

_PARTITION_HELP = """usage: flsuite partition --config FILE [--output FOLDER]
                         [--data.KEY VALUE ...] [--seed_everything SEED]

Draw how a config splits the data (class by client), without training. Writes NAME-partition.png,
and the same numbers to NAME-partition.csv with the columns client, split, class, samples. NAME is
the name of the config.

  --config FILE           a config as for flsuite fit; its model and trainer are not used
  --output FOLDER         where to write; default: the working folder
  --data.KEY VALUE        override a key of the data, e.g. --data.partition.alpha 0.1
  --seed_everything SEED  the run's seed, which decides the partition unless data.seed is given
  --plugins LIST          modules to import first, e.g. '[my_package]', for short class names
"""

_SCHEDULE_HELP = """usage: flsuite schedule --config FILE [--output FOLDER] [--KEY VALUE ...]

Draw which clients train when on the virtual clock, without training. Writes NAME-timeline.png, and
the same fits to NAME-timeline.csv with the columns fit, client, version, started_s, ended_s,
outcome, round, merged_s, staleness, weight. NAME is the name of the config.

  --config FILE      a config as for flsuite fit
  --output FOLDER    where to write; default: the working folder
  --KEY VALUE        override a key of the config, as for flsuite fit, e.g. --trainer.rounds 20
"""

_SWEEP_HELP = """usage: flsuite sweep --config FILE [--folder FOLDER] [--workers N]
                     [--status | --dry-run] [--KEY VALUE ...]

Run methods x grid x seeds. Each cell is an ordinary run folder, FOLDER/METHOD-GRID-HASH/seed-N.
Run the same command again after a kill or an error: it skips finished cells, resumes interrupted
ones and retries failed ones. Several of these commands may share one folder. If FILE has changed,
the new cells are run. Cells that fail are listed at the end and do not stop the others.

  --config FILE      a sweep, see configs/guide/comparing.md
  --folder FOLDER    the sweep's folder; default: runs/NAME, with the name of FILE
  --workers N        cells that run at the same time; default: workers of FILE, else 1
  --status           print each cell's score or state, failures and the time left; run nothing
  --dry-run          build every method once, print the cells and the time left; run nothing
  --KEY VALUE        override a key of the config in all cells, e.g. --trainer.rounds 2

The exit status is 0 if all cells are done, 1 if some have failed, 2 if FILE has an error, 130 after
Ctrl-C, or 143 after SIGTERM.
"""

_REPORT_HELP = """usage: flsuite report FOLDER [FOLDER ...] [--metric NAME ...] [--last N]
                      [--x AXIS] [--split SPLIT] [--target VALUE] [--against METHOD]
                      [--rows SETTING --columns SETTING]
                      [--output FOLDER] [--html FILE] [--wandb PROJECT]

Compare all runs in or below the FOLDERs. Unfinished runs are left out, and a note names them,
unless no run is finished. Runs whose settings (settings.yaml) differ in nothing but the seed form
one row, named by the settings that differ from the other rows. Each row has the mean and standard
deviation of the test score in the last round, in the round picked on validation data, averaged over
the last rounds, and the best on test data (not an honest choice; for comparison with published
tables that report it). Methods that share seeds are compared in pairs within the same partition:
mean difference, 95 % interval and p-value of the paired t-test, and the p-value with Holm's
correction over all pairs. For a sweep, the tuning budget is shown too.

  --metric NAME ...   scores of metrics.csv, e.g. accuracy f1_macro; default: the score by which
                      the runs pick a round, and for a single experiment the other main scores
  --last N            number of last rounds to average over; default 10
  --x AXIS            axis of the picture and of --target: round, virtual_s, wall_s, client_updates
                      or bytes (shown in MB); default round
  --split SPLIT       data of the picture and of --target: test or val; default test
  --target VALUE      show when the score first reaches VALUE (a loss from above), in rounds,
                      virtual seconds, seconds, client updates and MB: mean and standard deviation
                      over the runs that reach it, and how many do not; also names the method
                      that gets there first on the axis of --x
  --against METHOD    compare all others with this method instead of all pairs
  --rows SETTING --columns SETTING
                      print cross tables instead, e.g. --rows aggregator --columns attack: the
                      scores of the last round by two settings, one table per combination of the
                      others; --output writes cross.csv, cross.md (with spreads, and the round
                      picked on validation data) and a heat map per metric
  --output FOLDER     write report.csv, report.md (with the pairs), report.png (curves with
                      their range), comparison.csv (pairs) and target.csv (all axes) there
  --html FILE         write one page that needs no other file and no network: sortable tables,
                      curves with bands, clients, partition, and how to run each row again; needs
                      pip install 'flsuite[report]'
  --wandb PROJECT     create a report with the table and charts in Weights & Biases; PROJECT or
                      ENTITY/PROJECT; needs pip install 'flsuite[workspaces]'

The numbers of target.csv are in the units of metrics.csv. On every axis but round, the runs of a
row have different points. The picture then shows the range that all of them cover, with the last
score at or before each point.
"""

_WORKSPACE_HELP = """usage: flsuite workspace --project PROJECT [--entity ENTITY] [--name NAME]
                         [--metric NAME] [--dry-run]

Create the charts of a project in Weights & Biases: the score by round, bytes, virtual seconds and
client updates, as mean and band over the seeds of a group; last and picked round; gamma and its
parts; clients; partition; comparison of runs. Needs pip install 'flsuite[workspaces]'.

  --project PROJECT   the project of the runs
  --entity ENTITY     the user or team that owns it; default: $WANDB_ENTITY, else yours
  --name NAME         the title of the workspace; default flsuite
  --metric NAME       the score to compare; default accuracy
  --dry-run           print what would be created, without contacting W&B
"""

_RESUME_HELP = """usage: flsuite resume RUN [--KEY VALUE ...]

Continue a run in its folder from its last finished round, with the settings of its config.yaml.
Short for flsuite fit --config RUN/config.yaml --run_dir RUN --ckpt_path last.

  RUN                the folder of a run; flsuite ls lists them
  --KEY VALUE        override a key, such as --trainer.rounds 100, which extends the run
"""

_LS_HELP = """usage: flsuite ls [FOLDER ...] [--method NAME] [--data NAME] [--partition NAME]
                  [--state STATE] [--sort KEY] [--json | --csv]

List the runs in or below a FOLDER: method, data, rounds done, the score on test data in the last
round and in the round picked on validation data, and the time since they last wrote a file.

  FOLDER             default: runs
  --method NAME      only runs with this aggregator; likewise --data and --partition. Part of a
                     name is enough if no run has exactly that name
  --state STATE      finished, interrupted, running, failed (a run of a sweep) or broken
  --sort KEY         run (default), score (best first), rounds or age
  --json, --csv      write the list to standard output for other programs
"""

_NEW_HELP = """usage: flsuite new NAME

Write a folder NAME with my_model.py (a LightningModule), my_data.py (a LightningDataModule) and
exp.yaml (an experiment). They run as they are; change them to your needs.
"""

_FORK_HELP = """usage: flsuite fork RUN --at ROUND [--without CLIENT ...] [--KEY VALUE ...]
                    [--run_dir FOLDER]

Begin a run at the state of RUN after a round, under changed settings: an attack that begins, a
client that leaves, another rule or rate. What does not change keeps its random draws, so that a
fork without changes ends like its parent, bit for bit. settings.yaml says where it came from, and
its table has the parent's rounds before. A round that RUN has not kept (trainer.keep_rounds) is
replayed from the nearest kept one before it, and then kept.

  --at ROUND            the round after which the fork begins; 0 is the start
  --without CLIENT ...  clients that no longer train; all others train as they would with them
  --KEY VALUE           override a key of RUN's config, as for flsuite fit
  --run_dir FOLDER      the fork's folder; default: a new one
"""

_CONTRIBUTION_HELP = """usage: flsuite contribution RUN [RUN ...] [--clients all|LIST] [--at ROUND]
                            [--by training|updates|both] [--method leave-one-out|shapley]
                            [--permutations N] [--tolerance X] [--metric NAME] [--output FOLDER]

Measure what each client adds to the score of a run. By training: the test score of the last round,
from forks of RUN without the client; all others train when and as they would with it. By updates:
an estimate without training, the validation score of each kept round that is aggregated again
without the client, summed over the rounds; RUN needs trainer.keep_updates true and
trainer.keep_rounds 1. Writes contribution.csv, cost.csv, contribution.png, and each fork's folder;
the same command continues after a kill. Several RUNs, such as seeds of one experiment, give a mean
and a spread.

  --clients LIST     clients, such as 0,3,7; default: all
  --at ROUND         the round after which the clients are gone; default 0, the start
  --by WHAT          training (default), updates, or both with their rank correlation
  --method METHOD    leave-one-out (default), or shapley: clients join in random orders
  --permutations N   orders of shapley per RUN; default 10. Equal sets are scored once
  --tolerance X      shapley: who joins within X of RUN's score adds nothing; default 0
  --metric NAME      the score; default accuracy. Positive values are useful clients, also of a loss
  --output FOLDER    where to write; default: contribution
"""

_VERIFY_HELP = """usage: flsuite verify RUN [--at ROUND] [--rounds N]

Do some rounds of a run again, and compare weights, table and timeline with its record, bit for
bit. RUN is the folder of a run, or a file of flsuite pack. The exit status is 0 if all are equal,
else 1. What differs is printed, and which versions, threads or kind of CPU are not those of the
record. There, weights may differ by 0.001 of their norm and scores by 0.01, and the status is 0.

  --at ROUND  the kept round to begin at; default: one at random
  --rounds N  the number of rounds; default 3
"""

_PACK_HELP = """usage: flsuite pack RUN [--output FILE]

Write what is needed to verify a run into one file: config, settings, tables, versions, kept
checkpoints, and digests of all of them and of the data. A run that was interrupted is named.

  --output FILE  default: RUN.zip in the working folder
"""

HELPS = {
    "fork": _FORK_HELP,
    "contribution": _CONTRIBUTION_HELP,
    "verify": _VERIFY_HELP,
    "pack": _PACK_HELP,
    "resume": _RESUME_HELP,
    "ls": _LS_HELP,
    "new": _NEW_HELP,
    "partition": _PARTITION_HELP,
    "schedule": _SCHEDULE_HELP,
    "sweep": _SWEEP_HELP,
    "report": _REPORT_HELP,
    "workspace": _WORKSPACE_HELP,
}
